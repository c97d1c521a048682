"""EasySpec: fuzzy passes are those of a direct reading, the cache is a plain draft model's, and chips exchange less often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.small_target import TARGET, with_layers
from support.table_lm import Table

from specjax.assembly import registry
from specjax.draft import EasySpec, ModelDrafter, View
from specjax.expand import Chain
from specjax.lm import Block
from specjax.models import LayerConfig, LlamaLM
from specjax.plan.order import in_sequence
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.sharding import make_mesh, shardings

LM = with_layers(TARGET, 7)
SLOW = pytest.mark.slow
TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5)


def params_of(lm, seed=0):
    draw = lambda x, key: 0.3 * jax.random.normal(key, x.shape) + (x.ndim == 1)
    leaves, tree = jax.tree.flatten(lm.abstract())
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, list(map(draw, leaves, keys)))


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight["scale"]


def rope(x, at):
    angle = at[:, None, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    a, b, cos, sin = x[..., :4], x[..., 4:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def direct(params, tokens, exact, groups):
    """Logits after the last of `tokens`, token by token: the first `exact` tokens layer by layer, the others by groups."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layers = params["layers"]
    seen = {i: ([], []) for i in layers}

    def attention(i, stream, at):
        own = lambda name: norm(stream, layers[i]["attention_norm"]) @ layers[i]["attention"][name]["kernel"]
        q, k, v = (own(name).reshape(1, -1, 8) for name in "qkv")
        seen[i][0].append(rope(k, at)[0]), seen[i][1].append(v[0])
        keys, values = (np.repeat(np.stack(x), 2, axis=1) for x in seen[i])
        weight = np.exp(np.einsum("hd,khd->hk", rope(q, at)[0], keys) / np.sqrt(8))
        out = np.einsum("hk,khd->hd", weight / weight.sum(-1, keepdims=True), values)
        return out.reshape(-1) @ layers[i]["attention"]["o"]["kernel"]

    for place, token in enumerate(tokens):
        x, at = params["embed"]["embedding"][token], np.asarray([place])
        for lo, hi in [(i, i + 1) for i in layers] if place < exact else groups:
            mixed = {i: attention(i, x, at) for i in range(lo, hi)}  # all of them from the stream that enters the group
            for i in range(lo, hi):
                x = x + mixed[i]
                read, mlp = norm(x, layers[i]["mlp_norm"]), layers[i]["mlp"]
                gate = read @ mlp["gate"]["kernel"]
                x = x + (gate / (1 + np.exp(-gate)) * (read @ mlp["up"]["kernel"])) @ mlp["down"]["kernel"]
    return norm(x, params["norm"]) @ params["embed"]["embedding"].T


def proposed(drafter, params):
    """The proposal after `TEXT`, which the first pass reads whole, with the distributions of its draws."""
    bound, model = drafter.bind(TARGET), {"target": None, "draft": params}
    tokens = jnp.zeros((1, 16), jnp.int32).at[0, : len(TEXT)].set(jnp.asarray(TEXT))
    length, live = jnp.asarray([len(TEXT)]), jnp.ones((1,), bool)
    sampler = Sampler(row_keys(0, ["a"]), tokens, length, live, SamplingArrays({"temperature": jnp.ones((1,))}))

    def propose(params):
        view = View(tokens, length, live, None, len(TEXT), True)
        return bound.propose(model | {"draft": params}, bound.init(model, 1, 16), view, sampler)

    return jax.jit(propose)(params)


@pytest.mark.parametrize("groups", but_slow([(1, 2, 1), (1, 3, 2, 1)], (1, 3, 2, 1)))
def test_the_distributions_are_those_of_a_direct_reading(groups):
    lm = with_layers(TARGET, sum(groups))
    ends = np.cumsum([0, *groups]).tolist()
    pairs = list(zip(ends[:-1], ends[1:], strict=True))
    drafter, params = EasySpec(lm, Chain(2), groups[1]), params_of(lm)
    assert list(drafter.groups) == pairs
    tree = proposed(drafter, params).tree
    drafted = tree.tokens[0, 1:].tolist()
    for node in range(2):
        logits = direct(params, [*TEXT, *drafted[:node]], len(TEXT), pairs)
        wanted = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(tree.log_q[0, node], wanted, atol=2e-4)
        exact = direct(params, [*TEXT, *drafted[:node]], 99, pairs)
        assert np.allclose(exact, logits) == (node == 0), "the group's attention reads what enters the group"


@SLOW
def test_the_cache_is_a_plain_draft_models():
    """Whatever was drafted: the exact pass writes what the plain draft model writes."""
    params = params_of(LM)
    fuzzy, plain = (proposed(drafter, params).draft for drafter in (EasySpec(LM, Chain(2)), ModelDrafter(LM, Chain(2))))
    for one, other in zip(jax.tree.leaves(fuzzy), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


@SLOW
def test_a_pass_waits_for_fewer_exchanges():
    """On two chips 7 layers and the table sum 15 times, one after the other. In groups (1, 4, 1, 1) the four attentions of
    the second wait for none of each other, and the MLPs follow: three sums fewer."""
    mesh, shapes, one = make_mesh("data=1,model=2", jax.devices()[:2]), LM.abstract(), jnp.zeros((1, 1), jnp.int32)
    block = Block(one, one, one[0])
    params = jax.device_put(params_of(LM), shardings(mesh, LM.axes(shapes), shapes, LM.axis_counts()))

    def sums(drafter):
        compiled = jax.jit(lambda params: drafter.passed(params, block, None, None).final).lower(params).compile()
        return in_sequence(compiled.as_text())

    assert (sums(ModelDrafter(LM)), sums(EasySpec(LM))) == (15, 12)


@pytest.mark.parametrize(
    ("lm", "fields", "said"),
    [
        (LM, {"group": 1}, "needs group >= 2, got 1; one layer after another is the drafter draft"),
        (with_layers(TARGET, 3), {}, "the draft model has 3 in all: use one of at least 4 layers, or draft"),
        (Table(24), {}, "needs a draft model whose layers can read a stale stream"),
    ],
)
def test_what_is_refused(lm, fields, said):
    with pytest.raises(ValueError, match=said):
        EasySpec(lm, **fields).bind(TARGET)


def test_layers_of_several_streams_read_no_stale_one():
    lm = LlamaLM(LM.config.every(LayerConfig, streams=2))
    assert LM.reads_stale and not lm.reads_stale
    with pytest.raises(ValueError, match="read no stale stream"):
        lm.layers({}, jnp.zeros((1, 1, 64)), 1, 2, None, None, stale=jnp.zeros((1, 1, 64)))


def test_a_line_names_the_group():
    made = registry.parse("drafter", registry.DRAFTERS, "easyspec:model=folder,group=3,length=5")
    assert made.fields == {"group": 3, "expander": Chain(5)} and made.asked == "folder"
    assert registry.DRAFTERS["easyspec"].make().fields == {}
