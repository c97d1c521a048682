"""Experts in two precisions: a plain loop over tokens, what is not read, the host's memory, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import small_target as small
from support.conformance import but_slow, texts

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.draft import MainExperts, NoDrafter
from specjax.lm import Block, Wants
from specjax.models import ExpertsConfig, Model, ModelError
from specjax.models.few_bits import plain
from specjax.models.formats import read_format
from specjax.models.hobbit import hosted
from specjax.models.hobbit.tiers import Tiered, Tiers, unimportance
from specjax.sharding import make_mesh

LM = small.with_experts()
KINDS = {
    "softmax": ExpertsConfig(5, 3, 12, norm_topk_prob=False),
    "sigmoid": ExpertsConfig(5, 3, 12, scoring="sigmoid", routed_scaling_factor=2.5),
    "clamped": ExpertsConfig(5, 3, 12, scoring="chosen", swiglu_limit=7.0),
    "inputs": ExpertsConfig(5, 3, 12, scoring="inputs"),
    "ungated": ExpertsConfig(5, 3, 12, ungated="relu"),
}


def made(config, line):
    """A layer's experts with random weights and biases, and the same in two precisions."""
    own = config.build(16, jnp.float32, nnx.Rngs(3))
    graph, state = nnx.split(own)
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32) * 0.4, nnx.to_pure_dict(state))
    return params, graph, read_format(line).params(params)


def one_expert(config, experts, i, x, few):
    """An expert of a token `[E]`, in float64."""
    matrix = lambda kernel: np.asarray(plain(kernel.few) if few else kernel.many, np.float64)[i]
    if config.swiglu_limit is None:
        inner = x @ matrix(experts["up"]["kernel"])
        if config.ungated:
            return np.maximum(inner, 0) @ matrix(experts["down"]["kernel"])
        gate = x @ matrix(experts["gate"]["kernel"])
        return (gate / (1 + np.exp(-gate)) * inner) @ matrix(experts["down"]["kernel"])
    both = x @ matrix(experts["gate_up"]["kernel"]) + np.asarray(experts["gate_up"]["bias"], np.float64)[i]
    gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
    inner = (up + 1) * gate / (1 + np.exp(-config.swiglu_alpha * gate))
    return inner @ matrix(experts["down"]["kernel"]) + np.asarray(experts["down"]["bias"], np.float64)[i]


@pytest.mark.parametrize("kind", but_slow([*KINDS], "ungated"))
@pytest.mark.parametrize("renormalised", [False, True])
def test_a_loop_over_tokens(kind, renormalised):
    """Each expert of each token by itself: in many bits, in few, or left out, as its gates say."""
    config = KINDS[kind]
    params, graph, two = made(config, f"hobbit:bits=int8,high=0.35,low=0.7,renormalised={renormalised}".lower())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 20, 16)), jnp.float32)
    weights, experts = map(np.asarray, nnx.merge(graph, params).router(x[0]))
    want, seen = np.zeros((20, 16)), {"many": 0, "few": 0, "none": 0}
    for t in range(20):
        total, taken = float(weights[t].sum()), []
        for own, expert in zip(weights[t], experts[t], strict=True):
            before = float(sum(w for w in weights[t] if w > own)) / total
            how = "many" if before <= 0.35 else "few" if before <= 0.7 else "none"
            seen[how] += 1
            taken += [(float(own), expert, how == "few")] if how != "none" else []
        factor = total / sum(own for own, _, _ in taken) if renormalised else 1
        for own, expert, few in taken:
            read = np.asarray(x[0, t], np.float64)
            if config.scoring == "inputs":
                want[t] += one_expert(config, two["experts"], expert, factor * own * read, few)
            else:
                want[t] += factor * own * one_expert(config, two["experts"], expert, read, few)
    assert min(seen.values()) > 4, f"the thresholds are not between the gates: {seen}"
    got = jax.jit(lambda params: nnx.merge(graph, params)(x))(two)[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_unimportance_by_hand():
    """The share of larger gates, whatever the order; of equal ones the earlier is the larger."""
    rows = jnp.asarray([[0.5, 0.3, 0.2], [1.0, 4.0, 5.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    want = [[0, 0.5, 0.8], [0.9, 0.5, 0], [0, 0.5, 1], [0, 0, 0]]
    np.testing.assert_allclose(unimportance(rows), want, atol=1e-6)
    assert Tiers(high=0.5, low=0.8).of(rows).tolist() == [[0, 0, 1], [2, 0, 0], [0, 0, 2], [0, 0, 0]]
    random = jnp.asarray(np.random.default_rng(0).uniform(size=(1000, 7)), jnp.float32)
    assert float(unimportance(random).max()) <= 1 and not Tiers(1, 1).of(random).any()


@pytest.mark.parametrize("host", [False, True])
def test_what_no_token_takes_is_not_read(host):
    """Matrices of experts that no token chose, or has in the other precision, hold NaN."""
    params, graph, two = made(KINDS["softmax"], f"hobbit:bits=int8,high=0.35,low=0.7,host={host}".lower())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 16)), jnp.float32)
    weights, experts = nnx.merge(graph, params).router(x[0])
    tiers = Tiers(0.35, 0.7).of(weights)
    unread = [jnp.asarray([not bool(((experts == i) & (tiers == t)).any()) for i in range(5)]) for t in range(2)]
    assert unread[0].any() and unread[1].any() and not (unread[0].all() or unread[1].all())

    def poisoned(kernel):
        nan = lambda x, which: jnp.where(which[:, None, None], jnp.nan, jax.device_put(x, jax.memory.Space.Device))
        few = dataclasses.replace(kernel.few, scale=nan(kernel.few.scale, unread[1]))
        bad = nan(kernel.many, unread[0]), few
        return dataclasses.replace(
            kernel, many=hosted.moved(bad[0]) if host else bad[0], few=hosted.moved(few) if host else few
        )

    bad = jax.tree.map(
        lambda x: poisoned(x) if isinstance(x, Tiered) else x, two, is_leaf=lambda x: isinstance(x, Tiered)
    )
    assert ("pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(bad)}) == host
    run = jax.jit(lambda params: nnx.merge(graph, params)(x))
    got = run(bad)
    assert jnp.isfinite(got).all()
    np.testing.assert_array_equal(got, run(two))


def decoded(line, drafter):
    """Texts of three rows under weights of this line."""
    params = read_format(line).params(small.weights(LM))
    decoder = dataclasses.replace(specjax.speculative(LM, drafter), whole=True)
    model = {"target": params, "draft": None}
    state = decoding.run(decoder, model, small.begin(decoder, model))
    return texts(state)


def test_logits_of_whole_experts():
    """With all experts in many bits they are the plain model's, from the host's memory too; with others they are not."""
    ids = jnp.asarray([[3, 1, 4, 1, 5]])
    block = Block(ids, jnp.arange(5)[None], jnp.zeros(1, jnp.int32), None, causal=True)
    logits = jax.jit(lambda params: LM(params, block, None, wants=Wants(logits=True)).logits)
    params = small.weights(LM)
    line = lambda text: logits(read_format(text).params(params))
    want = logits(params)
    np.testing.assert_array_equal(line("hobbit:high=1,low=1,bits=int8,host=true"), want)
    assert float(jnp.abs(line("hobbit:high=0,low=1,bits=int8") - want).max()) > 1e-3


@pytest.mark.slow
def test_texts_of_every_drafter():
    """Whole experts write the plain model's text. Others write another one, which a drafter leaves as it is, and which does not
    depend on where experts lie."""
    whole = [list(text) for text in small.free_texts(LM)]
    assert decoded("hobbit:high=1,low=1,bits=int8,host=true", NoDrafter()) == whole
    line = "hobbit:high=0,low=0.5,bits=int8"
    other = decoded(line, MainExperts())
    assert other != whole
    assert other == decoded(line, NoDrafter()) == decoded(f"{line},host=true", MainExperts())


def test_a_folder_is_read_into_both_precisions(tmp_path):
    """As a loaded model is converted; a loaded one may be in another type afterwards."""
    models.save(tmp_path, LM, small.weights(LM))
    line = "hobbit:high=0.3,low=0.6,bits=int8,host=true"
    read = models.load(tmp_path, "float32", weights=line)
    same = models.load(Model(LM, small.weights(LM), dtype=jnp.dtype("float32")), weights=line)
    assert read.weights == same.weights == "hobbit:high=0.3,low=0.6,bits=int8,host=true"
    jax.tree.map(np.testing.assert_array_equal, read.params, same.params)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(read.params["layers"][0]["mlp"]["experts"])}
    assert kinds == {"pinned_host"} and read.params["embed"]["embedding"].sharding.memory_kind == "device"
    narrow = models.load(read, "bfloat16").params["layers"][0]["mlp"]["experts"]["up"]["kernel"]
    assert narrow.dtype == jnp.bfloat16 and narrow.many.sharding.memory_kind == "pinned_host"
    with pytest.raises(ModelError, match="kept in few bits"):
        models.save(tmp_path / "again", read.lm, read.params)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hobbit:high=0.8,low=0.5", "0 <= high <= low <= 1, got high=0.8 and low=0.5"),
        ("hobbit:low=2", "0 <= high <= low <= 1"),
        ("hobbit:high=much", "'high=much' is not a setting; hobbit takes high, low, renormalised, bits, host, group"),
        ("hobbit:bits=dfloat11", "'bits=dfloat11' is not a setting"),
        ("hobbit:vocab=true", "'vocab=true' is not a setting"),
        ("hobbit:group=7", "groups of 7 inputs do not divide every matrix"),
    ],
)
def test_wrong_lines(line, said):
    with pytest.raises(ModelError, match=said):
        read_format(line).check(jax.eval_shape(lambda: small.weights(LM)))


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="keep experts in two precisions, and this model has none"):
        models.load(Model(small.TARGET, small.weights(small.TARGET), dtype=jnp.dtype("float32")), weights="hobbit")
    models.save(tmp_path / "model", LM, small.weights(LM))
    mesh = make_mesh("data=1,model=2", jax.devices()[:2])
    with pytest.raises(ModelError, match="weights 'hobbit' are for one device: leave the mesh out"):
        models.load(tmp_path / "model", mesh=mesh, weights="hobbit")
    with pytest.raises(ValueError, match="are for one device: leave the mesh out"):
        decoder = specjax.speculative(LM, NoDrafter(), mesh=mesh)
        model = {"target": read_format("hobbit:group=8").params(small.weights(LM)), "draft": None}
        decoding.run(decoder, model, small.begin(decoder, model))
    (tmp_path / "bits.txt").write_text("model.layers.0.mlp.up_proj: hobbit\n")
    with pytest.raises(ModelError, match="line 1: hobbit is for all experts at once"):
        read_format(str(tmp_path / "bits.txt"))
    monkeypatch.setattr(hosted, "KIND", "pinned_elsewhere")
    with pytest.raises(
        ModelError, match=r"reads no memory of its host .pinned_elsewhere; it has .*: leave host=true out"
    ):
        read_format("hobbit:host=true")
