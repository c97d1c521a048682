"""The model of the kernel's pipeline, and the table that follows from it."""

import pathlib

import jax.numpy as jnp
import pytest

from experiments.costs import attention_blocks
from specjax.kernels.tree_attention import block_sizes, blocks, tpu
from specjax.kernels.tree_attention.blocks import Tiles

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def simulated(fetch, latency, work, steps=2000):
    """Seconds a step, event by event: a step starts the next one's fetch, waits for its own, and computes."""
    now, arrived = 0.0, latency + fetch
    for _ in range(steps):
        started = now
        now = max(now, arrived) + work
        arrived = max(started + latency, arrived) + fetch
    return now / steps


@pytest.mark.parametrize(
    "tiles", [Tiles(256, 1), Tiles(512, 1), Tiles(1024, 2), Tiles(2048, 2), Tiles(4096, 1)], ids=str
)
@pytest.mark.parametrize("chip", attention_blocks.CORES)
def test_the_period_is_that_of_a_simulation(chip, tiles):
    for queries in attention_blocks.QUERIES:
        step, head, slot = attention_blocks.CYCLES[chip, queries]
        pieces = tiles.slots // blocks.chunk(tiles.slots)
        cycles = step + tiles.heads * (pieces * head + slot * tiles.slots)
        fetch = tiles.heads * tiles.slots * 2 * 128 * 2 / attention_blocks.bandwidth(chip)
        want = simulated(fetch, attention_blocks.LATENCY, cycles / attention_blocks.CLOCK[chip])
        assert attention_blocks.period(chip, queries, tiles) == pytest.approx(want, rel=2e-3)


def test_the_smallest_size_that_is_as_fast_as_the_fastest():
    cost = lambda best: lambda chip, heads, queries, capacity, tiles: abs(tiles.slots - best) + 10000
    assert attention_blocks.best(cost(2048), "v5e", 1, 8, 8192) == 2048
    assert attention_blocks.best(cost(1000), "v5e", 1, 8, 8192) == 1024
    assert attention_blocks.best(lambda *call: 1.0, "v5e", 1, 8, 8192) == 256
    assert attention_blocks.best(cost(4096), "v5e", 1, 8, 1024) == 1024  # no more than there are


def test_the_written_table_reads_back():
    space = {}
    exec(attention_blocks.source(block_sizes.SLOTS), space)
    assert space["SLOTS"] == block_sizes.SLOTS and space["CAPACITIES"] == block_sizes.CAPACITIES
    keys = {(c, h, q) for c in blocks.VMEM for h in attention_blocks.HEADS for q in attention_blocks.QUERIES}
    assert set(block_sizes.SLOTS) == keys


def test_the_page_has_what_the_command_prints(capsys):
    assert attention_blocks.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") > 8 and out in (DOCS / "kernels.md").read_text()


def test_a_chip_is_timed_where_there_is_one(capsys, monkeypatch):
    assert attention_blocks.main(["--source", "time"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "needs one of v5e, v5p, v6e, and JAX runs on cpu: use --source model" in err
    options = {"scale": 128**-0.5, "window": None, "soft_cap": None, "interpret": True}
    monkeypatch.setattr(
        attention_blocks, "attend", lambda operands, tiles: tpu.attend(operands, tiles=tiles, **options)
    )
    ran = []
    monkeypatch.setattr(
        attention_blocks, "seconds", lambda call, state, rest, **_: ran.append(call(state, *rest)) or 1.0
    )
    assert attention_blocks.timed("v5e", 1, 8, 256, Tiles(128, 1)) == 1.0
    assert ran[0].shape == (8, 1, 8, 128) and bool(jnp.allclose(ran[0], 1, atol=0.01))  # all values are one


SCHEDULE = """
= control target key start
LB: loop body
= control target key end
     0   :  { %s1 = smov 0 }
   0x4 LB: > { %s2 = sld [smem:[#allocation5]] } /* Start region 3 */
   0x8   : > { %3 = sbr.rel (%p1) target = $region9 } /* Start region 4 */
  0x10   : > { %4 = sbr.rel (%p2) target = $region5 }
  0x18   : > { %5 = vmatmul.bf16.gmra.mxu0 %v1 }
  0x30 PF: > { %6 = smov 0 } /* Start/End empty region 5 */
  0x32   : > { %7 = sbr.rel (%p3) target = $region6 }
  0x40   : > { %8 = vmatmul.bf16.gmra.mxu0 %v2 }
  0x90 PF: > { %9 = smov 0 } /* Start/End empty region 6 */
  0x91   : > { %10 = sbr.rel (%p4) target = $region7 }
  0xa1 PF: > { %11 = smov 0 } /* Start/End empty region 7 :: Start/End empty region 9 */
  0xa6   : > { %12 = sbr.rel (!%p5) target = $region3 }
  0xaa   :  { %13 = vsyncpa [#allocation5], 1 }
"""


def test_cycles_are_counted_by_the_words_of_the_schedule():
    """All of the loop but a row's first step (0x10 to 0x30), the work (0x32 to 0x90) and a row's last (0x91 to 0xa1)."""
    assert attention_blocks.cycles(SCHEDULE.splitlines()) == (0xAA - 0x4 - 0x20 - 0x5E - 0x10, 0x5E)
