"""Experts that lie whole on the devices of a mesh: the numbers, derivatives and texts of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.conformance import MIXED, same, start, texts
from support.shapes import changed, small

import specjax
from specjax.draft import ModelDrafter
from specjax.expand import Chain
from specjax.models import LlamaLM, gemma_experts
from specjax.models.experts import ClampedExperts, Experts, ExpertsConfig
from specjax.models.param_axes import param_axes
from specjax.plan.moved import moved_weights
from specjax.sharding import make_mesh, shardings
from specjax.sharding.rules import whole_experts

SHAPE = ExpertsConfig(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10)
LM = LlamaLM(small(96, 32, 48, 2, 4, 2, 8, experts=dataclasses.replace(SHAPE, num_experts=8)))
HEATS = (0.0, 0.5, 2.0, 0.0, 1.0, 1.0, 0.7, 1.0)
ROWS = dataclasses.replace(MIXED, options=tuple({"temperature": heat} for heat in HEATS), new_tokens=12)
WIDTH, TOKENS = 16, 40


def mesh_of(line):
    sizes = [int(part.partition("=")[2]) for part in line.split(",")]
    return make_mesh(line, jax.devices()[: int(np.prod(sizes))])


@pytest.mark.parametrize(
    ("parts", "count", "inner", "whole"),
    (
        (8, 128, 1536, True),  # Qwen3-235B-A22B: 192 columns per chip
        (4, 128, 1536, False),  # 384
        (8, 60, 1408, False),  # the mesh does not divide the experts
        (8, 8, 14336, False),
        (1, 128, 700, False),
    ),
)
def test_experts_stay_whole_where_parts_fill_no_lanes(parts, count, inner, whole):
    mesh = jax.sharding.AbstractMesh((1, parts, 1), ("data", "model", "context"))
    assert whole_experts(mesh, count, inner) == whole


def test_an_expert_lies_on_one_device():
    """Kernels and biases alike; five experts over two devices, or counts that are not given, leave parts."""
    mesh = mesh_of("data=2,model=2")
    limited = dataclasses.replace(SHAPE, swiglu_limit=7.0, scoring="chosen")
    spec = lambda leaf: tuple(leaf.spec)

    def lie(config, counts):
        lm = LlamaLM(changed(LM.config, experts=config))
        shapes = lm.abstract()
        found = shardings(mesh, lm.axes(shapes), shapes, lm.axis_counts() if counts else {})
        experts = found["layers"][0]["mlp"]["experts"]
        return [spec(experts[name][kind]) for name in ("gate_up", "down") for kind in ("kernel", "bias")]

    assert lie(limited, True) == [("model", None, None), ("model", None)] * 2
    within = [(None, None, "model"), (None, "model"), (None, "model", None), (None, None)]
    assert lie(dataclasses.replace(limited, num_experts=5), True) == within == lie(limited, False)


KINDS = {
    "silu": lambda rngs: Experts(SHAPE, WIDTH, jnp.float32, rngs),
    "clamped": lambda rngs: ClampedExperts(dataclasses.replace(SHAPE, swiglu_limit=2.0), WIDTH, jnp.float32, rngs),
    "gemma": lambda rngs: gemma_experts.Experts(WIDTH, 6, 10, jnp.float32, rngs),
}
CHOICES = {
    "evenly": np.random.default_rng(0).permuted(np.tile(np.arange(6), (TOKENS, 1)), axis=1)[:, :2],
    "all the same": np.tile([4, 1], (TOKENS, 1)),
    "all of the last device": np.tile([5, 4], (TOKENS, 1)),  # of three: more than it has room for in a turn
    "none of the first device": 3
    + np.random.default_rng(1).permuted(np.tile(np.arange(3), (TOKENS, 1)), axis=1)[:, :2],
}


def of_all(kind, pure, x):
    """What every expert gives to every token, `[M, X, E]`."""
    product = lambda name, x: jnp.einsum("mxi,xio->mxo", x, pure[name]["kernel"])
    x = jnp.broadcast_to(x[:, None], (len(x), 6, x.shape[-1]))
    if kind == "silu":
        return product("down", jax.nn.silu(product("gate", x)) * product("up", x))
    if kind == "gemma":
        both = product("gate_up", x)
        return product("down", jax.nn.gelu(both[..., :10]) * both[..., 10:])
    both = product("gate_up", x) + pure["gate_up"]["bias"][None]
    gate, up = jnp.minimum(both[..., ::2], 2.0), jnp.clip(both[..., 1::2], -2.0, 2.0)
    return product("down", (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)) + pure["down"]["bias"][None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_derivatives_are_those_of_all_experts(kind):
    """The chosen ones of what every expert gives to every token: none is dropped, whoever chooses what."""
    graph, params = nnx.split(KINDS[kind](nnx.Rngs(0)))
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)
    pure = jax.tree.map(noise, nnx.to_pure_dict(params))
    keys = jax.random.split(jax.random.key(1), 2)
    x, weights = jax.random.normal(keys[0], (TOKENS, WIDTH)), jax.random.uniform(keys[1], (TOKENS, 2))

    def chosen(pure, x, weights, experts):
        each = jnp.take_along_axis(of_all(kind, pure, x), experts[:, :, None], axis=1)
        return jnp.sum(each * weights[:, :, None], axis=1)

    def loss(apply, *given):
        out = apply(*given)
        return jnp.sum(jnp.sin(out)), out

    both = lambda apply: jax.jit(jax.value_and_grad(functools.partial(loss, apply), (0, 1, 2), has_aux=True))
    wants = {name: both(chosen)(pure, x, weights, jnp.asarray(experts)) for name, experts in CHOICES.items()}
    for line in ("model=2", "data=2,model=3"):
        mesh = mesh_of(line)
        places = shardings(mesh, param_axes({"experts": pure}), {"experts": pure}, SHAPE.axis_counts)["experts"]
        assert all(place.spec[0] == "model" for place in jax.tree.leaves(places))
        here, got = jax.device_put(pure, places), both(lambda own, *given: nnx.merge(graph, own)(*given))
        for name, experts in CHOICES.items():
            with jax.sharding.set_mesh(mesh):
                found = got(here, x, weights, jnp.asarray(experts))
            close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4)
            jax.tree.map(close, jax.device_get(found), jax.device_get(wants[name]))


@functools.cache
def params():
    noise = lambda x: x * (1 + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape))
    target = LM.init(jax.random.key(0))
    return {"target": target, "draft": jax.tree.map(noise, target)}


def written(line):
    """Texts, and the compiled steps' text where there is a mesh."""
    mesh = None if line is None else mesh_of(line)
    decoder = specjax.speculative(LM, ModelDrafter(LM, Chain(3)), mesh=mesh)
    model = params() if mesh is None else jax.device_put(params(), decoder.param_shardings(params()))
    state = start(decoder, ROWS, model=model)
    step = None if mesh is None else jax.jit(decoder.step).lower(model, state).compile().as_text()
    state = specjax.decoder.run(decoder, model, state)
    assert state.stats.accepted.sum() > 10
    return texts(state), step, model


@pytest.fixture(scope="module")
def alone():
    return written(None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("line", ("model=2", "data=2,model=2"))
def test_texts_are_those_of_one_device(line, alone):
    """Greedy rows beside sampled ones, after a draft model that has experts too; no weight crosses."""
    got, step, model = written(line)
    same(got, alone)
    for own in model.values():
        up = own["layers"][0]["mlp"]["experts"]["up"]["kernel"]
        assert up.sharding.spec == P("model", None, None) and up.addressable_shards[0].data.shape == (4, 32, 10)
    assert [one for one in moved_weights(step) if len(one.op.value[0].dims) > 1] == []
