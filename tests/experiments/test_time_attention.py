"""The command that times tree attention: its bytes against arrays, its shares, its program for a GPU, its refusal here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import time_attention
from experiments.kernels.time_attention import (
    CASES,
    HEADS,
    IMPLEMENTATIONS,
    NODES,
    Case,
    Row,
    attend,
    operands,
    table,
    timed,
)


@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_bytes_are_those_of_the_filled_slots_and_the_block(cache):
    case = Case(3, True, 16, cache, slots=64)
    key, value, *caches = operands(case, 0)
    filled = [
        np.asarray(leaf)[row, :, :used].nbytes for leaf in jax.tree.leaves(caches) for row, used in enumerate(case.used)
    ]
    assert case.bytes == sum(filled) + key.nbytes + value.nbytes
    assert len(set(case.used)) == 3 and max(case.used) <= 64 - NODES


def test_a_share_is_bytes_over_time_over_the_copys():
    """On a CPU the kernels' rows say why there is none."""
    case = Case(1, False, 8, "bfloat16", slots=32)
    rows = [timed(case, name, 1e9, repeats=2, calls=2) for name in IMPLEMENTATIONS]
    *kernels, xla = rows
    assert xla.why is None and xla.share == pytest.approx(case.bytes / xla.microseconds / 1e3, rel=0.01)
    assert all(row.share is None and "another platform" in row.why for row in kernels)
    assert "| 1 | 8 | bfloat16 | - | - | " in table(rows) and "Mosaic GPU: the Mosaic GPU kernel" in table(rows)


def test_the_table_has_a_line_a_case_and_the_goal():
    rows = [Row(case, name, 10.0, 0.814) for case in CASES for name in IMPLEMENTATIONS]
    lines = table(rows).splitlines()
    assert sum("| 81% | 81% | 81% | 80% |" in line for line in lines) == len(CASES) == len(set(CASES))
    assert any(line.startswith("| 8, ragged | 128 | int8 |") for line in lines)


@pytest.mark.parametrize("implementation", ["pallas", "mosaic_gpu"])
def test_its_program_is_one_for_a_gpu(implementation):
    case = Case(2, True, 128, "bfloat16", slots=256)
    shapes = jax.eval_shape(functools.partial(operands, case), 0)
    query = jax.ShapeDtypeStruct((2, NODES, HEADS, 128), jnp.bfloat16)
    program = jax.jit(functools.partial(attend, implementation=implementation))
    text = program.trace(query, jax.ShapeDtypeStruct((2,), jnp.int32), shapes, shapes).lower(
        lowering_platforms=("cuda",)
    )
    called = {"pallas": "__gpu$xla.gpu.triton", "mosaic_gpu": "mosaic_gpu_v2"}[implementation]
    assert called in text.as_text()


def test_without_a_gpu_it_says_so(capsys):
    assert time_attention.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "needs an NVIDIA GPU, and JAX found cpu" in err
