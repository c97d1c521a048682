"""Every kernel for NVIDIA's GPUs lowers for one, on this version of JAX and on one that has no Triton under Pallas."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from support.attention import world

from specjax.kernels.delta_rule import delta_rule
from specjax.kernels.exponents import numbers
from specjax.kernels.gpu import has_triton
from specjax.kernels.grouped_dot import grouped_dot
from specjax.kernels.kv_commit import kv_commit
from specjax.kernels.scaled_dot import scaled_dot
from specjax.kernels.tree_attention import tree_attention
from specjax.kernels.union_mlp import union_mlp
from specjax.kernels.verify import gumbel_argmax
from specjax.sharding.aot import made_for

TRITON, MOSAIC = "xla.gpu.triton", "mosaic_gpu_v2"


def attention(width, **settings):
    operands, options = world(128, (0, 37, 128), dtype=jnp.bfloat16, width=width)
    return lambda *operands: tree_attention(*operands, **options, scale=1.0, **settings), operands


def given(*shapes):
    return [jax.ShapeDtypeStruct(shape, kind) for kind, *shape in shapes]


def argmax(scores, words, which, noisy):
    return gumbel_argmax(scores, jax.random.wrap_key_data(words, impl="threefry2x32"), which, noisy)


half, single, whole, byte = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8
rule = (*((single, 2, 3, *each) for each in ((2, 32), (2, 32), (2, 1, 32), (2, 1), (2, 1))), (bool, 2, 3, 3))
rule += ((single, 2, 2, 1, 32, 32),)
CASES = {
    "attention": (*attention(64), TRITON, MOSAIC),
    "attention, 80 wide": (*attention(80), TRITON, ""),
    "attention for Hopper": (*attention(64, implementation="mosaic_gpu"), MOSAIC, MOSAIC),
    "grouped": (grouped_dot, given((half, 9, 32), (half, 3, 32, 64), (whole, 3)), TRITON, ""),
    "scaled": (scaled_dot, given((half, 3, 64), (jnp.int4, 64, 32), (half, 2, 32)), TRITON, ""),
    "exponents": (numbers, given((byte, 64, 32), (jnp.uint32, 9, 2, 32), (jnp.uint16, 256, 1, 1)), TRITON, ""),
    "union": (union_mlp, given((half, 9, 32), (single, 9, 4), (half, 32, 256), (half, 256, 32)), TRITON, ""),
    "delta rule": (delta_rule, given(*rule), TRITON, ""),
    "write": (
        lambda cache, new, at: kv_commit([cache], [new], None, at),
        given((half, 2, 2, 64, 64), (half, 2, 3, 2, 64), (whole, 2)), "", "",
    ),
    "argmax": (argmax, given((single, 2, 3, 50), (jnp.uint32, 2, 2, 2), (whole, 2, 3), (bool, 2)), "", ""),
}  # fmt: skip
"""Of every operation, its operands and what it is lowered to, with Triton and without."""


def lowered(name):
    operation, operands, *_ = CASES[name]
    with made_for("NVIDIA H100 80GB HBM3", "gpu"):
        return jax.jit(operation).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_a_gpu(name):
    text, wanted = lowered(name), CASES[name][2]
    assert [mark for mark in (TRITON, MOSAIC) if mark in text] == [wanted] * bool(wanted)


@pytest.mark.parametrize("name", CASES)
def test_it_lowers_without_triton(name, monkeypatch):
    find = importlib.util.find_spec
    gone = lambda name, *more: None if name == "jax.experimental.pallas.triton" else find(name, *more)
    monkeypatch.setattr(importlib.util, "find_spec", gone)
    has_triton.cache_clear()
    jax.clear_caches()
    try:
        text, wanted = lowered(name), CASES[name][3]
    finally:
        has_triton.cache_clear()
        jax.clear_caches()
    assert [mark for mark in (TRITON, MOSAIC) if mark in text] == [wanted] * bool(wanted)


def test_a_named_kernel_that_is_gone_says_so(monkeypatch):
    monkeypatch.setattr("specjax.kernels.tree_attention.lowered.has_triton", lambda: False)
    operation, operands = attention(64, implementation="pallas")
    with pytest.raises(ValueError, match="no Triton under Pallas; choose 'mosaic_gpu', 'xla' or None"):
        jax.jit(operation).trace(*operands).lower(lowering_platforms=("cuda",))
