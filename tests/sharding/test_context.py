"""Caches split by their slots: the text stays, the cache lies apart, and nothing of it travels in a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_diffusion as small
from support.conformance import DRAFTERS, MIXED, TARGET, Rows, complete, params, plain, same, start, texts
from support.mesh_cases import SHALLOW, decoder_on, placed, weights

import specjax
from specjax.diffusion import CanvasDiffusion, Prefix, Threshold, diffusion
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.gemma_config import DiffusionGemmaConfig, Heads
from specjax.plan import fit, hlo
from specjax.sharding import make_mesh
from specjax.speculative import PREFILL_WIDTHS, prefill_columns, prefill_width

MESHES = {
    "context=8": "none",
    "context=4,model=2": "draft-top_k",
    "data=2,context=2,model=2": "eagle2",
}
CAPACITY = 500
WIDTH = 256  # of a prefill chunk: the second one is cut where the buffer ends


def _prompt(length):
    return tuple(np.resize(np.random.default_rng(length).integers(1, 96, 11), length).tolist())


LONG = Rows(
    tuple(map(_prompt, (430, 5, 301, 120))),
    ("a", "b", "c", "d"),
    ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.8}, {"repetition_penalty": 1.3}),
    new_tokens=16,
)
"""Greedy and sampled, long and short."""


def test_a_mesh_gets_the_axes_that_it_lacks():
    devices = np.asarray(jax.devices()).reshape(2, 4)
    for names, shape in (
        (("model", "data"), {"model": 2, "data": 4}),
        (("context", "data"), {"context": 2, "data": 4}),
    ):
        mesh = make_mesh(jax.sharding.Mesh(devices, names))
        assert {**dict.fromkeys(("data", "model", "context"), 1), **shape} == dict(mesh.shape)
        assert (mesh.devices.reshape(2, 4) == devices).all()
    assert make_mesh("context=2,data=4").shape == {"data": 4, "model": 1, "context": 2}


def test_a_decoder_takes_a_mesh_as_jax_makes_it():
    """`jax.make_mesh` makes Explicit axes."""
    mesh = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Explicit,))
    for decoder in (specjax.speculative(TARGET, mesh=mesh), diffusion(TARGET, 95, Threshold(), mesh=mesh)):
        assert decoder.mesh == make_mesh(mesh)
    with pytest.raises(ValueError, match="'rows' is none of these"):
        specjax.speculative(TARGET, mesh=jax.make_mesh((8,), ("rows",)))


def test_a_capacity_is_rounded_up():
    mesh = make_mesh("context=8")
    abstract = jax.eval_shape(lambda: TARGET.init(jax.random.key(0)))
    for decoder in (
        specjax.speculative(TARGET, mesh=mesh),
        diffusion(TARGET, 95, Threshold(), cache=Prefix(), mesh=mesh),
    ):
        state = jax.eval_shape(lambda decoder=decoder: decoder.empty({"target": abstract}, 2, 90))
        assert state.tokens.shape == (2, 96) and state.cache.key[0].shape[2] == 96


def test_layers_with_kv_heads_of_their_own_lie_as_the_kernels_take_them():
    """Four kv-heads over four devices, and two that stay whole: else the four would be gathered after every write."""
    sizes = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    experts = dict(num_experts=2, top_k_experts=1, moe_intermediate_size=12)
    config = DiffusionGemmaConfig(
        **sizes, **experts, sliding_layers=(True, False), sliding_window=5, sliding=Heads(8, 4, 1e4, 4),
        full=Heads(16, 2, 1e6, 2),
    )  # fmt: skip
    decoder = CanvasDiffusion(DiffusionGemmaLM(config), block_length=6, mesh=make_mesh("model=4,context=2"))
    model = jax.eval_shape(lambda: {"target": decoder.target.init(jax.random.key(0))})
    state = jax.jit(lambda: decoder.empty(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model), 2, 48))()
    assert [x.addressable_shards[0].data.shape for x in state.cache.key] == [(2, 1, 24, 8), (2, 2, 24, 16)]


def test_a_split_chunk_is_as_wide_for_every_device():
    assert [prefill_width(n, 4) for n in (1, 65, 66, 1025, 9999)] == [64, 64, 128, 1024, 1024]
    assert [prefill_width(n) for n in (1, 17, 18, 257, 9999)] == [16, 16, 32, 256, 256]


def test_chunks_leave_little_padding_and_their_number_is_a_power_of_two():
    """As few chunks as of the widest, each with less than a step of padding; what a buffer cannot hold is not rounded up."""
    for length in range(2, 3000, 7):
        width = prefill_width(length)
        chunks = -(-(length - 1) // width)
        assert chunks == -(-(length - 1) // PREFILL_WIDTHS[-1])
        assert length < 130 or chunks * width - (length - 1) < 32 * chunks
        for begin in (1, min(9, length - 1)):
            columns = prefill_columns(length, width, 1 << 20, begin)
            count, rest = divmod(columns - begin, width)
            assert rest == 0 and count.bit_count() == 1 and count // 2 * width < length - begin <= count * width
            exact = prefill_columns(length, width, length, begin)
            assert length <= exact < length + width


@pytest.mark.slow
def test_ragged_rows_on_eight_devices():
    mesh = make_mesh("context=8")
    model = placed(specjax.speculative(TARGET, mesh=mesh), params("none"))
    got, state = complete(DRAFTERS["none"], MIXED, model=model, mesh=mesh)
    same(got, plain())
    assert state.cache.key[0].addressable_shards[0].data.shape == (8, 4, 12, 8)


def alone(decoder, name):
    """One device's text, and what the prefill needs beside its arguments."""
    decoder = dataclasses.replace(decoder, mesh=None)
    state, spare = filled(decoder, weights(name))
    return texts(specjax.decoder.run(decoder, weights(name), state)), spare


def filled(decoder, model):
    """A state of long prompts, and the bytes of temporaries a device that their prefill takes."""
    insert, seen = specjax.decoder.insert_program, []

    def watched(*args, **kwargs):
        program = insert.lower(*args, **kwargs).compile()
        seen.append(program.memory_analysis().temp_size_in_bytes)
        return program(*args[1:], **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specjax.decoder, "insert_program", watched)
        return start(decoder, LONG, model=model, capacity=CAPACITY, width=WIDTH), seen[0]


def exchanged(text):
    """The shapes of what a compiled program's collectives exchange."""
    ops = [op for part in hlo.parse(text).computations.values() for op in part.ops.values()]
    return {b.dims for op in ops if op.opcode.removesuffix("-start") in hlo.COLLECTIVES for b in op.value}


@pytest.mark.slow
@pytest.mark.parametrize("spec", MESHES)
def test_long_prompts_go_round_and_the_cache_stays(spec):
    name, mesh = MESHES[spec], make_mesh(spec)
    decoder = decoder_on(spec, name)
    model = placed(decoder, weights(name))
    want, spare = alone(decoder, name)
    state, split_spare = filled(decoder, model)
    count = mesh.shape["context"]
    slots = -(-CAPACITY // count)
    share = (4 // mesh.shape["data"], 4 // mesh.shape["model"], slots, 8)
    assert {x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.cache)} == {share}
    assert split_spare < 1.5 * spare / count  # one part in n, and what travels

    steps = jnp.int32(2**31 - 1), jnp.int32(1)
    program = specjax.decoder.run_program.lower(decoder, model, state, *steps).compile()
    held = (x for x in jax.tree.leaves((model, state.cache)) if x.ndim > 1)
    parts = {shape for x in held for shape in (x.shape, x.addressable_shards[0].data.shape)}
    messages = exchanged(program.as_text())
    assert messages and not parts & messages
    assert not any(set(shape[2:]) & {slots, count * slots} for shape in messages)  # nor by a few heads or rows
    same(texts(program(model, state, *steps)), want)


@pytest.mark.slow
def test_generate_rounds_and_splits():
    """Three devices divide no power of two: the engine's buffers are rounded up, and prompts split all the same."""
    model = specjax.models.Model(SHALLOW, weights("none")["target"], None, (), "toy", None, np.dtype("float32"))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:3]), ("context",))
    prompts = [list(range(1, 90)), list(range(80, 2, -1))]
    asked = {"prompts": prompts, "drafter": None, "max_new_tokens": 12}
    assert [r.tokens for r in specjax.generate(model, mesh=mesh, **asked)] == [
        r.tokens for r in specjax.generate(model, **asked)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("prefix", "blocks"))
def test_a_diffusion_models_text(kind):
    """A canvas whose keys are all in a split cache, and blocks after a growing one."""
    mesh = make_mesh("data=2,context=4")
    decoder = small.make(Threshold(0.5))
    decoder = dataclasses.replace(decoder, cache=Prefix())
    if kind == "blocks":
        decoder = diffusion(small.LM, small.MASK, Threshold(0.4), block_length=4, causal_blocks=True)
    rows = range(3) if kind == "blocks" else range(4)
    want = small.texts(specjax.run(decoder, small.params(), small.begin(decoder, rows)))
    state = specjax.run(split := dataclasses.replace(decoder, mesh=mesh), small.params(), small.begin(split, rows))
    assert small.texts(state) == want
    assert state.cache.key[0].addressable_shards[0].data.shape[2] == small.L // 4


def test_a_plan_takes_the_axis():
    assert fit.check_mesh("context=4,model=4", "v5e:4x4", 32, 8) == "context=4,model=4"
    with pytest.raises(ValueError, match=r"has 8 chips and v5e:4x4 has 16: give data=2,model=2,context=4"):
        fit.check_mesh("context=4,model=2", "v5e:4x4", 32, 8)
