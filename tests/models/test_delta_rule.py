"""The gated delta rule and its two mixers: examples, the recurrence over random trees, and the layers of transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.conformance import but_slow

from specjax.kernels.tree_attention.unrolled import Unrolled
from specjax.lm import Block
from specjax.models.mixers import committed
from specjax.models.states import delta_rule, paths
from specjax.models.states.delta_rule import Delta, Tokens
from specjax.models.states.gated_delta import GatedDeltaConfig
from specjax.models.states.kda import KimiDeltaConfig

PARENT = (-1, 0, 0, 1)
KEY, QUERY = ((0.6, 0.8), (1, 0), (0, 1), (0.8, -0.6)), ((1, 0), (0.5, 0.5), (0, 1), (0.3, -0.4))
VALUE, STRENGTH = ((1, -1), (2, 0), (0, 3), (-1, 1)), (0.5, 1, 0.25, 0.8)
EXAMPLES = {
    "a_decay_for_a_head": (
        ((-0.5,), (-0.1,), (-1,), (-0.2,)),
        ((0.360653, 0.840278), (1.674898, -0.499278), (0.411590, 0.445513), (-0.583218, 0.522656)),
        ((-0.409796, -0.621306), (1.673668, -0.760315), (-0.137197, 0.851496), (-1.317518, 0.407577)),
        ((0.583447, 0.326061), (1.895630, -1.062095)),
    ),
    "a_decay_for_a_channel": (
        ((-0.5, -0.1), (-0.1, -1), (-1, -0.2), (-0.2, -0.3)),
        ((0.145872, 0.911871), (1.386329, -0.240303), (1.289686, -0.052207), (-0.492869, 0.444385)),
        None,
        ((0.378882, 0.503280), (1.516333, -0.733502)),
    ),
}  # fmt: skip
"""By kind: logarithms of decays, outputs, corrections, and the state after nodes 0, 1 and 3; by the recurrence in float64."""


def visible(parents):
    """`[T, T]`, which nodes each node follows."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_example(kind):
    decay, outputs, corrections, after = EXAMPLES[kind]
    heads = lambda x: jnp.asarray(x, jnp.float32)[None, :, None]
    own = Tokens(
        heads(QUERY), heads(KEY), heads(VALUE)[:, :, None], heads(STRENGTH)[..., None], heads(decay)[:, :, None]
    )
    sums = jnp.asarray([[1.0, 2.0], [3.0, -1.0]])[None, None, None]
    out, made = delta_rule.corrected(sums, None, own, jnp.asarray(visible(PARENT))[None])
    np.testing.assert_allclose(out[0, :, 0, 0], outputs, atol=2e-6)
    if corrections is not None:
        np.testing.assert_allclose(made[0, :, 0, 0], corrections, atol=2e-6)
    path = lambda x: x[:, np.array([0, 1, 3])]
    found = delta_rule.advanced(sums, path(own.key), path(made), path(own.log_decay), jnp.asarray([3]))
    np.testing.assert_allclose(found[0, 0, 0], after, atol=2e-6)


def recurrence(sums, tokens, kept):
    """One token after the other: the state `[N, R, K, V]` after those that are `kept` `[T]`, and the last one's output."""

    def step(carry, own):
        (query, key, value, strength, decay), keep = own
        sums, _ = carry
        new = jnp.exp(decay)[..., None] * sums
        found = strength[..., None] * (value - jnp.einsum("nk,nrkv->nrv", key, new, precision="highest"))
        new = new + jnp.einsum("nk,nrv->nrkv", key, found, precision="highest")
        out = jnp.einsum("nk,nrkv->nrv", query, new, precision="highest")
        return jax.tree.map(lambda a, b: jnp.where(keep, b, a), carry, (new, out)), None

    first = (sums, jnp.zeros(tokens.value.shape[1:]))
    return jax.lax.scan(step, first, (tuple(tokens), kept))[0]


def drawn(rng, rows, size, decays, heads=(2, 2), widths=(8, 6)):
    """Tokens with unit keys, and a state."""
    normal = lambda *shape: rng.normal(size=(rows, size, *shape)).astype(np.float32)
    n, r = heads
    key = normal(n, widths[0])
    tokens = Tokens(
        normal(n, widths[0]) * 0.3, key / np.linalg.norm(key, axis=-1, keepdims=True), normal(n, r, widths[1]),
        rng.uniform(0, 1, (rows, size, n, r)).astype(np.float32),
        -rng.exponential(0.5, (rows, size, n, r, decays)).astype(np.float32),
    )  # fmt: skip
    return tokens, rng.normal(size=(rows, n, r, *widths)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="before")
def of_random_paths(sums, tokens, seen, kept, before):
    """What a random path of each tree gives, in two blocks with rejected nodes spoilt, and by the recurrence."""
    wide = lambda x: x.reshape(*x.shape, *[1] * (tokens.value.ndim - 2))
    spoilt = tokens._replace(
        value=jnp.where(wide(kept), tokens.value, 1e6),
        log_decay=jnp.where(wide(kept), tokens.log_decay, -1e6),
        query=jnp.where(wide(kept)[..., 0], tokens.query, 1e6),
    )
    cut = lambda lo, hi: jax.tree.map(lambda x: x[:, lo:hi], spoilt)
    first, second = cut(0, before), cut(before, None)
    out, made = delta_rule.corrected(sums, None, first, seen[:, :before, :before])
    past = Delta(first.key[..., :0], first.key, made, first.log_decay)
    more, found = delta_rule.corrected(sums, past, second, seen[:, before:])
    outs, made = jnp.concatenate([out, more], axis=1), jnp.concatenate([made, found], axis=1)
    order, count = jnp.argsort(~kept, axis=1, stable=True), kept.sum(axis=1)
    of_path = lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)
    after = delta_rule.advanced(sums, of_path(spoilt.key), of_path(made), of_path(spoilt.log_decay), count)
    end = order[jnp.arange(len(order)), count - 1]
    wanted, output = jax.vmap(recurrence)(sums, tokens, kept)
    return after, outs[jnp.arange(len(order)), end], wanted, output


@pytest.mark.parametrize("decays", but_slow((1, 8), 8))
def test_random_paths_of_random_trees(decays):
    """Of 3000 trees, some with several roots: the state after a path is that of plain decoding, whatever else was drafted."""
    rng = np.random.default_rng(decays)
    rows, size, before = 3000, 12, 5
    parents = np.stack(
        [rng.integers(-1, np.maximum(node, 1), rows) if node else -np.ones(rows, int) for node in range(size)], 1
    )
    seen = np.broadcast_to(np.eye(size, dtype=bool), (rows, size, size)).copy()
    every = np.arange(rows)
    for node in range(1, size):
        above = np.where(parents[:, node, None] >= 0, seen[every, parents[:, node]], False)
        seen[:, node] |= above
    kept = seen[every, rng.integers(0, size, rows)]
    tokens, sums = drawn(rng, rows, size, decays)
    after, out, wanted, output = of_random_paths(sums, tokens, seen, kept, before)
    most = np.abs(wanted).max(axis=(1, 2, 3, 4))
    assert (np.abs(after - wanted).max(axis=(1, 2, 3, 4)) / most).max() < 1e-5
    assert np.abs(out - output).max() < 1e-5 * np.abs(output).max()
    assert kept.sum(axis=1).max() > 5 and (kept.sum(axis=1) == 1).any()


@pytest.mark.parametrize("decays", (1, 8))
def test_a_text_of_one_token(decays):
    """Equal keys, strengths near 1 and no decay to speak of: powers of the system's matrix would leave no digit."""
    one, sums = drawn(np.random.default_rng(0), 1, 1, decays)
    one = one._replace(strength=np.full_like(one.strength, 0.999), log_decay=np.full_like(one.log_decay, -1e-3))
    length, chunk = 150, 64
    text = jax.tree.map(lambda x: np.repeat(x, length, axis=1), one)
    last, wanted = np.asarray(sums[0], np.float64), []
    query, key, value = (np.asarray(x[0, 0], np.float64) for x in one[:3])
    for _ in range(length):
        last = last * np.exp(-1e-3)
        made = 0.999 * (value - np.einsum("nk,nrkv->nrv", key, last))
        last = last + np.einsum("nk,nrv->nrkv", key, made)
        wanted.append((np.einsum("nk,nrkv->nrv", query, last), made))
    outputs, corrections = (np.stack(x) for x in zip(*wanted, strict=True))
    out, made = jax.jit(delta_rule.in_text, static_argnums=3)(sums, None, text, chunk)
    np.testing.assert_allclose(out[0], outputs, atol=1e-5)
    np.testing.assert_allclose(made[0], corrections, atol=1e-5)
    after = delta_rule.advanced(sums, text.key, made, text.log_decay, jnp.asarray([length]))
    np.testing.assert_allclose(after[0], last, atol=1e-5 * np.abs(last).max())


SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "rms_norm_eps": 1e-3, "hidden_act": "silu"}
HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"],
}  # fmt: skip
WIDTHS = (("query", 16), ("key", 16), ("value", 30))


def by_key_head(rows, *widths):
    """Parts of rows that lie key head by key head, each as one matrix."""
    grouped = np.split(rows.reshape(2, -1, rows.shape[-1]), np.cumsum(widths)[:-1], axis=1)
    return [part.reshape(-1, rows.shape[-1]) for part in grouped]


def of_qwen(own, kind):
    """Our parameters from those of transformers' layer."""
    if kind == "qwen3_next":
        *three, gate = by_key_head(own["in_proj_qkvz.weight"], 8, 8, 15, 15)
        strength, decay = by_key_head(own["in_proj_ba.weight"], 3, 3)
    else:
        three = np.split(own["in_proj_qkv.weight"], (16, 32))
        gate, strength, decay = (own[f"in_proj_{name}.weight"] for name in "zba")
    named = {"output_gate": gate, "strength": strength, "decay": decay, "output": own["out_proj.weight"]}
    return named | dict(zip(("query", "key", "value"), three, strict=True)), {
        "rate": own["A_log"],
        "shift": own["dt_bias"],
    }


def of_kimi(own, kind):
    names = {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "strength": "b_proj", "decay_inner": "forget_gate.f_a_proj",
        "decay": "forget_gate.f_b_proj", "gate_inner": "g_a_proj", "output_gate": "g_b_proj", "output": "o_proj",
    }  # fmt: skip
    named = {ours: own[f"{theirs}.weight"] for ours, theirs in names.items()}
    return named, {"head_rate": own["forget_gate.A_log"], "shift": own["forget_gate.dt_bias"]}


LAYERS = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", GatedDeltaConfig(2, 6, 8, 5, eps=1e-3), of_qwen),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", GatedDeltaConfig(2, 6, 8, 5, eps=1e-3), of_qwen),
    "kimi_linear": ("KimiLinearDeltaAttention", KimiDeltaConfig(3, 3, 8, 8, eps=1e-3), of_kimi),
}


@functools.cache
def layer(kind):
    """A layer of transformers with all of its parameters drawn, our mixer, and its parameters."""
    import importlib

    torch = pytest.importorskip("torch")
    modules = importlib.import_module(f"transformers.models.{kind}")
    name, config, read = LAYERS[kind]
    sizes = HEADS if kind != "kimi_linear" else {
        "linear_num_heads": 3, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"]
    }  # fmt: skip
    named = {"qwen3_next": "Qwen3NextConfig", "qwen3_5": "Qwen3_5TextConfig", "kimi_linear": "KimiLinearConfig"}[kind]
    theirs = getattr(modules, named)(**SIZES | sizes)
    torch.manual_seed(0)
    module = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), name)(theirs, 0).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape))
    own = {name: x.detach().numpy() for name, x in module.named_parameters()}
    kernels, vectors = read(own, kind)
    params = {name: {"kernel": x.T} for name, x in kernels.items()} | vectors
    ends = np.cumsum([config.num_key_heads * size for size in config.channels])[:-1]
    taps = np.split(own["conv1d.weight"][:, 0], ends)
    params |= {f"{name}_taps": x.T for name, x in zip(("query", "key", "value"), taps, strict=True)}
    params |= {"norm": {"scale": own["norm.weight" if "norm.weight" in own else "o_norm.weight"]}}
    graph = nnx.split(nnx.eval_shape(lambda: config.build(24, jnp.float32, nnx.Rngs(0))))
    assert jax.tree.structure(nnx.to_pure_dict(graph[1])) == jax.tree.structure(params)
    run = jax.jit(lambda params, *given: nnx.merge(graph[0], params)(given[0], None, *given[1:], None))
    return module, theirs, config, functools.partial(run, jax.tree.map(jnp.asarray, params))


def one_by_one(kind, x):
    """Outputs `[B, T, E]` of transformers' layer, one token per pass, and its state of the last."""
    import torch
    import transformers

    module, config, _, _ = layer(kind)
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        outs = [module(torch.as_tensor(x[:, at : at + 1]), cache=cache).numpy() for at in range(x.shape[1])]
    return np.concatenate(outs, axis=1), cache.layers[0].recurrent_states[0].numpy()


def block(rows, size, length, seen=None):
    zeros = jnp.zeros((rows, size), jnp.int32)
    return Block(zeros, zeros, jnp.full((rows,), length, jnp.int32), visible=seen)


@pytest.mark.parametrize("kind", but_slow(LAYERS, "qwen3_next", "kimi_linear"))
def test_a_layer_of_transformers(kind):
    """A text of more than a chunk after another, of which a row's part is padded; then a tree in two blocks, and its path."""
    _, _, config, run = layer(kind)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 85, 24)).astype(np.float32)
    wanted, sums = one_by_one(kind, x)
    state, size = config.init(24, 2, jnp.bfloat16), 5
    for lo, hi in ((0, size), (size, 85)):
        out, delta = run(x[:, lo:hi], block(2, hi - lo, lo), state, None, None)
        np.testing.assert_allclose(out, wanted[:, lo:hi], atol=3e-5)
        before, state = (
            state,
            committed(config, state, delta, None, jnp.full(2, lo), jnp.asarray([hi - lo, size if lo == 0 else 0])),
        )
    np.testing.assert_array_equal(state.sums[1], before.sums[1])  # a row without a real token
    np.testing.assert_array_equal(state.window[1], before.window[1])
    np.testing.assert_allclose(state.sums[0].reshape(sums[0].shape), sums[0], atol=1e-5 * np.abs(sums).max())
    tree = rng.normal(size=(2, 9, 24)).astype(np.float32)
    tree[:, 4] = 1e6  # which no node follows
    parents, path = (-1, 0, 0, 1, 2, 2, -1, 3, 6), np.array([0, 1, 3, 7])
    seen = np.broadcast_to(visible(parents), (2, 9, 9))
    whole, delta = run(tree, block(2, 9, 85, jnp.asarray(seen)), state, None, None)
    first, past = run(tree[:, :4], block(2, 4, 85, jnp.asarray(seen[:, :4, :4])), state, None, None)
    second, _ = run(tree[:, 4:], block(2, 5, 85, jnp.asarray(seen[:, 4:])), state, past, None)
    np.testing.assert_allclose(
        np.concatenate([first, second], axis=1)[:, [0, 1, 2, 3, 5, 6, 7, 8]],
        whole[:, [0, 1, 2, 3, 5, 6, 7, 8]],
        atol=3e-5,
    )
    for nodes in ([0, 1, 3, 7], [0, 2, 5], [6, 8]):
        for row, text in enumerate((x[0], x[1, :size])):
            theirs, _ = one_by_one(kind, np.concatenate([text, tree[row, nodes]])[None])
            np.testing.assert_allclose(whole[row, np.array(nodes)], theirs[0, -len(nodes) :], atol=3e-5)
    state = committed(config, state, delta, jnp.tile(path[None], (2, 1)), jnp.full(2, 85), jnp.asarray([4, 2]))
    for row, text in enumerate(
        (np.concatenate([x[0], tree[0, path]]), np.concatenate([x[1, :size], tree[1, path[:2]]]))
    ):
        _, sums = one_by_one(kind, text[None])
        np.testing.assert_allclose(state.sums[row].reshape(sums[0].shape), sums[0], atol=1e-5 * np.abs(sums).max())
        more = rng.normal(size=(1, 2, 24)).astype(np.float32)
        theirs, _ = one_by_one(kind, np.concatenate([text[None], more], axis=1))
        out, _ = run(more, block(1, 2, 0), jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], state), None, None)
        np.testing.assert_allclose(out, theirs[:, -2:], atol=3e-5)


@pytest.mark.parametrize("config", (GatedDeltaConfig(1, 2, 4, 3, 1), KimiDeltaConfig(2, 2, 4, 4, 1)), ids=str)
def test_a_convolution_of_one_token(config):
    """It has no window; a text in two passes is that in one."""
    mixer = config.build(6, jnp.float32, nnx.Rngs(0))
    x, state = jax.random.normal(jax.random.key(0), (1, 4, 6)), config.init(6, 1, jnp.float32)
    whole, _ = mixer(x, None, block(1, 4, 0), None, None, None)
    first, delta = mixer(x[:, :3], None, block(1, 3, 0), state, None, None)
    state = config.commit(state, delta, jnp.asarray([3]))
    last, _ = mixer(x[:, 3:], None, block(1, 1, 3), state, None, None)
    np.testing.assert_allclose(jnp.concatenate([first, last], axis=1), whole, atol=1e-6)


def test_a_mask_of_numpy():
    """Is one of JAX; passes over the same slots again have none."""
    seen = np.asarray(visible(PARENT))[None]
    found = paths.ancestors(block(1, 4, 0, seen), 0)
    np.testing.assert_array_equal(found.seen, seen)
    with pytest.raises(ValueError, match="reads a text from left to right"):
        paths.ancestors(block(1, 4, 0, Unrolled(seen, seen)), 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_a_text_that_goes_on_from_uncommitted_tokens(kind):
    run = layer(kind)[3]
    x = np.random.default_rng(2).normal(size=(1, 80, 24)).astype(np.float32)
    _, past = run(x[:, :7], block(1, 7, 0), None, None, None)
    out, _ = run(x[:, 7:], block(1, 73, 0), None, past, None)
    np.testing.assert_allclose(out, one_by_one(kind, x)[0][:, 7:], atol=3e-5)
