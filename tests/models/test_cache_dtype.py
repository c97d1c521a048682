"""Caches in eight bits: what a slot holds, that a block reads itself as the cache will return it, and texts over drafters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import AHEAD, DRAFTERS, MODELS, ON_MODELS, TARGET, but_slow, ended, model_of, params
from support.table_lm import Table

import specjax
from specjax import models
from specjax.kernels.kv_commit import kv_commit
from specjax.lm import Block, Source, Wants, encodes
from specjax.models import kv_bits
from specjax.plan.held import chip_bytes
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh

EIGHT = ("int8", "float8_e4m3fn")
ALL = {"": TARGET, **MODELS}


def kept(lm, dtype, **options):
    return dataclasses.replace(lm, cache_dtype=dtype, **options)


def weights_of(model):
    return params(next(name for name in (*ON_MODELS, "none") if model_of(name) == model))["target"]


@pytest.mark.parametrize("dtype", EIGHT)
def test_a_number_comes_back_within_half_a_step(dtype):
    """Of int8 a step is the greatest magnitude of its slot over 127; of float8 (three bits after the leading one) half
    of one is a sixteenth of the number or, where those run out, of a 64th of a 448th of the greatest. Slots do not know
    of each other.
    """
    x = jax.random.normal(jax.random.key(0), (3, 5, 2, 16)) * jnp.exp(
        jax.random.normal(jax.random.key(1), (3, 5, 2, 1)) * 4
    )
    x = x.at[0, 0, 0].set(0.0)
    held = kv_bits.stored(x, kv_bits.empty((1, 16), dtype))
    assert held.values.dtype == dtype and held.scale.shape == x.shape[:-1]
    most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    bound = most / 254 if dtype == "int8" else jnp.maximum(jnp.abs(x) / 16, most / 448 / 1024)
    error = jnp.abs(kv_bits.read(held, jnp.float32) - x)
    assert (error <= bound * 1.001).all() and float(jnp.max(error / jnp.maximum(bound, 1e-30))) > 0.9
    one = kv_bits.stored(x[1, 2:3], held)
    np.testing.assert_array_equal(one.values, held.values[1, 2:3])


@pytest.mark.parametrize("model", but_slow(ALL, "experts", "shared"), ids=lambda name: name or "plain")
def test_a_block_reads_itself_as_the_cache_will_return_it(model):
    """In one block or in two, of which the second finds the first in the cache: the logits are the same but for rounding, and
    not those of a float32 cache; a number that rounding brings over an edge counts as a step of int8."""
    lm = kept(ALL[model], "int8", ahead=16 if ALL[model].has_windows else None)
    weights = weights_of(model)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 96, (2, 14)), jnp.int32)

    def fresh(lm):
        cache = lm.init_cache(2, 32)
        return lm.encode(weights, cache, Source(ids, jnp.full((2,), 14))) if encodes(lm) else cache

    @jax.jit
    def logits(ids):
        def read(cache, start, end):
            at = jnp.broadcast_to(jnp.arange(start, end)[None], (2, end - start))
            block = Block(ids[:, start:end], at, jnp.full((2,), start, jnp.int32))
            out = lm(weights, block, cache, wants=Wants(logits=True))
            return lm.commit(cache, out.delta, None, block.length), out.logits

        whole = read(fresh(lm), 0, 14)[1]
        cache, first = read(fresh(lm), 0, 8)
        every = Block(ids, jnp.broadcast_to(jnp.arange(14), (2, 14)), jnp.zeros((2,), jnp.int32))
        exact = ALL[model]
        bare = exact(weights, every, fresh(exact) if encodes(exact) else None, wants=Wants(logits=True)).logits
        return whole, jnp.concatenate([first, read(cache, 8, 14)[1]], axis=1), bare

    whole, parts, bare = logits(ids)
    lossy = float(jnp.abs(whole - bare).max())
    assert (
        float(jnp.abs(whole - parts).max()) < 0.05 * lossy and float(jnp.median(jnp.abs(whole - parts))) < 1e-5 < lossy
    )


TEXTS = [
    (name, "int8") for name in ("draft-static", "eagle3", "draft@sinks", "gemma4_assistant@shared", "swift@experts")
]
TEXTS += [("draft-static", "float8_e4m3fn")]


@functools.cache
def plain(model, dtype):
    """Plain decoding's text with whole caches of a type."""
    return ended(specjax.speculative(kept(ALL[model], dtype)), {"target": weights_of(model), "draft": None})[0]


@pytest.mark.parametrize(
    "line",
    but_slow(TEXTS, *TEXTS[1:]),
    ids="-".join,
)
def test_texts_are_plain_decodings_of_the_same_cache(line):
    """Where layers have windows, with rings. A float32 cache has other texts."""
    name, dtype = line
    target = kept(ALL[model_of(name)], dtype)
    decoder = specjax.speculative(target, (DRAFTERS | ON_MODELS)[name])
    if target.has_windows:
        ahead = AHEAD + int(decoder.drafter.looks_back)
        decoder = dataclasses.replace(decoder, target=dataclasses.replace(target, ahead=ahead))
    got, state = ended(decoder, params(name))
    assert state.cache.key[0].values.dtype == dtype
    assert got == plain(model_of(name), dtype) and (name != "draft-static" or got != plain("", None))


@pytest.mark.slow
def test_texts_on_a_mesh():
    """Scales lie where their slots and heads do, those of split slots among them."""
    mesh = make_mesh("data=2,model=2,context=2")
    decoder = specjax.speculative(kept(TARGET, "int8"), DRAFTERS["draft-static"], mesh=mesh)
    model = jax.device_put(params("draft-static"), decoder.param_shardings(params("draft-static")))
    got, state = ended(decoder, model)
    held = state.cache.value[1]
    assert held.scale.sharding.shard_shape(held.scale.shape) == (4, 2, 48)
    assert held.values.sharding.shard_shape(held.values.shape) == (4, 2, 48, 8)
    assert got == plain("", "int8")


def test_scales_are_written_like_their_slots():
    """In runs and by name, whole and split, some of them off the end."""
    caches, news = jnp.zeros((2, 2, 16)), jnp.arange(20.0).reshape(2, 5, 2) + 1
    for dst in ([3, 9], [[4, 16, 0, 15, 2], [1, 7, 6, 5, 4]]):
        dst = jnp.asarray(dst, jnp.int32)
        want = kv_commit([caches[..., None]], [news[..., None]], None, dst)[0][..., 0]
        np.testing.assert_array_equal(kv_commit([caches], [news], None, dst)[0], want)
        with jax.set_mesh(make_mesh("context=4,model=2")):
            np.testing.assert_array_equal(kv_commit([caches], [news], None, dst)[0], want)


def test_bytes():
    """Of eight heads of 128 numbers, a byte per number and four per head and slot; rings and layers that share keys as
    ever."""
    model = models.abstract("meta-llama/Llama-3.1-8B", cache_dtype="int8")
    size = lambda lm, slots: chip_bytes(jax.eval_shape(lambda: lm.init_cache(1, slots, jnp.bfloat16)))
    assert size(model.lm, 8192) == 32 * 2 * 8 * 8192 * (128 + 4)
    assert size(models.cached(model, None).lm, 8192) == 32 * 2 * 8 * 8192 * 256
    lm = kept(MODELS["shared"], "float8_e4m3fn", ahead=8)
    assert size(lm, 64) == 2 * (2 * 64 * (16 + 4) + 4 * 13 * (8 + 4))


def test_who_has_such_caches(tmp_path):
    """The engine's model and a draft beside it; a model that is loaded says so."""
    engine = Engine(models.load("tiny", cache_dtype="int8"), drafter="draft")
    assert engine.decoder.target.cache_dtype == engine.decoder.drafter.lm.cache_dtype == "int8"
    assert "cache in int8" in repr(engine.model)
    assert models.cached(engine.model, "bfloat16").cache_dtype == "bfloat16"
    assert models.cached(engine.model, None).cache_dtype is None
    with pytest.raises(
        ValueError, match="unknown cache_dtype 'int3'; choose float32, bfloat16, float16, int8, float8_e4m3fn"
    ):
        models.load("tiny", cache_dtype="int3")
    with pytest.raises(
        ValueError, match="cache_dtype 'int8' is for autoregressive .* not for tiny-diffusion, a diffusion model"
    ):
        Engine(models.load("tiny-diffusion", cache_dtype="int8"))
    with pytest.raises(ValueError, match="not for your model, a Table: leave it out"):
        Engine(models.load((Table(), {"table": jnp.zeros((3, 3))}), cache_dtype="int8"))
