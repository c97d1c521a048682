"""Time where operations run one after the other: by hand, on lines as a TPU compiler writes them; the clock of its cycles."""

import jax
import jax.numpy as jnp
import pytest
from support.planned import needs_libtpu

from specjax.plan.hlo import traffic
from specjax.plan.serial import serial
from specjax.sharding import aot

STEP = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8,128]{1,0:T(8,128)S(1)} negate(%x), backend_config={"estimated_cycles":"1500"}
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) tuple(%next, %y)
}

%condition (q: (s32[], f32[8,128])) -> pred[] {
  %q = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant(4)
  ROOT %more = pred[] compare(%j, %end), direction=LT
}

ENTRY %main (w: f32[8192,1024], v: f32[8,128], table: f32[1024,1024]) -> f32[8,128] {
  %w = f32[8192,1024]{1,0:T(8,128)} parameter(0)
  %v = f32[8,128]{1,0:T(8,128)} parameter(1)
  %table = f32[1024,1024]{1,0:T(8,128)} parameter(2)
  %start = (f32[1024,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%table)
  %read = f32[8,128]{1,0:T(8,128)S(1)} fusion(%w), kind=kLoop, calls=%sum, backend_config={"estimated_cycles":"CYCLES"}
  %done = f32[1024,1024]{1,0:T(8,128)S(1)} copy-done(%start)
  %zero = s32[] constant(0)
  %begun = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) tuple(%zero, %read)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) while(%begun), condition=%condition, body=%body
  %state = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%loop), index=1
  %turned = f32[8,128]{0,1:T(8,128)S(1)} reverse(%state), dimensions={0}
  ROOT %all = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%turned), replica_groups={{0,1,2,3}}, to_apply=%sum
}
""".replace("fusion(%w), kind=kLoop, calls=%sum", "reduce(%w)")


@pytest.mark.parametrize("cycles", (75000, 120000))
def test_the_parts_of_a_step_by_hand(cycles):
    """On four chips of v5e at 1.5 GHz. A read at the expected rate leaves the copy beside it nothing of the memory."""
    chip = aot.chip_of("v5e:2x2")
    found = serial(traffic(STEP.replace("CYCLES", str(cycles))), chip, "v5e:2x2", 4, 2**20)
    read, copied, sent = 4 * 8192 * 1024, 4 * 1024 * 1024, 4 * 8 * 128
    rate = chip.reads
    assert found.kernels == pytest.approx(max(cycles / 1.5e9, read / 819e9))
    assert found.loops == pytest.approx(4 * 1e-6)
    assert found.waits == pytest.approx(max(copied / rate - max(found.kernels - read / rate, 0), 0))
    assert found.least == pytest.approx((cycles + 1500) / 2 / 1.5e9) and found.assumed == pytest.approx(found.least)
    assert found.code == pytest.approx(2**20 / rate)
    assert found.collectives == pytest.approx(4 * sent * 3 / 4 / 200e9 + 2 * 2 * 1e-6)
    assert sum(found.parts.values()) == pytest.approx(
        found.kernels + found.loops + found.waits + found.assumed + found.code + found.collectives
    )
    assert found.launches == 1 + 4 + 1


def test_a_copy_runs_beside_what_leaves_it_the_memory():
    """A kernel that stays on the chip hides as much of a copy as it takes."""
    beside = STEP.replace("reduce(%w)", "negate(%v)").replace("CYCLES", "3000")
    chip = aot.chip_of("v5e:2x2")
    found = serial(traffic(beside), chip, "v5e:2x2", 4, 0)
    kept = 2e-6 - 4 * 8 * 128 / chip.reads
    assert found.waits == pytest.approx(4 * 1024 * 1024 / chip.reads - kept)


def test_a_gpu_counts_launches():
    """No kernel has an estimate: each takes its bytes at the published speed and is started."""
    bare = STEP.replace(', backend_config={"estimated_cycles":"CYCLES"}', "").replace(
        ', backend_config={"estimated_cycles":"1500"}', ""
    )
    chip = aot.chip_of("h100:8")
    found = serial(traffic(bare), chip, "h100:8", 8, 0)
    read = 4 * 8192 * 1024 / chip.hbm_bandwidth
    small = chip.launch + 2 * 4 / chip.hbm_bandwidth  # of two in the loop, the counter lies in main memory here
    assert found.kernels == pytest.approx(read + 2 * chip.launch)
    assert found.loops == pytest.approx(4 * (chip.launch + small), rel=1e-4)
    assert found.assumed == 0 and found.collectives > chip.launch + 2 * chip.latency


@needs_libtpu
@pytest.mark.parametrize("topology", ("v5e:1x1", "v5p:1x1x1", "v6e:1x1"))
def test_the_clock_and_the_expected_reads_are_the_compilers(topology):
    """At that clock a large product is near the published peak, and one of 8 rows reads its matrix as fast as we say."""
    (device,), chip = aot.devices(topology), aot.chip_of(topology)

    def seconds(rows, width, out):
        place = jax.sharding.SingleDeviceSharding(device)
        given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in ((rows, width), (width, out))]
        with jax.default_matmul_precision("default"):
            found = traffic(aot.compiled(jax.jit(jnp.matmul).lower(*given)).as_text())
        (cycles,) = [access.op.cycles for access in found.accesses if access.op.cycles]
        return cycles / chip.clock

    assert 0.65 < 2 * 8192**3 / seconds(8192, 8192, 8192) / chip.flops < 1
    assert 2 * 8192 * 65536 / seconds(8, 8192, 65536) == pytest.approx(chip.reads, rel=0.03)
