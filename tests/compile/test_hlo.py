"""The traffic reader: on programs compiled for a CPU, and on lines as the TPU compiler writes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.plan.hlo import Buffer, parse, traffic
from specjax.plan.pallas import kernels


def moved(function, *shapes, **options):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return traffic(jax.jit(function, **options).lower(*args).compile().as_text())


def test_a_product_reads_its_operands_and_writes_its_result():
    found = moved(lambda x, w: x @ w, (64, 256), (256, 512))
    assert found.bytes == 4 * (64 * 256 + 256 * 512 + 64 * 512)
    assert found.collectives == {} and found.flops == 2 * 64 * 256 * 512


def test_products_of_a_gpu_library_are_counted():
    call = """HloModule call

ENTRY %main (x: bf16[64,256], w: bf16[256,512]) -> (bf16[64,512], s8[1024]) {
  %x = bf16[64,256]{1,0} parameter(0)
  %w = bf16[256,512]{1,0} parameter(1)
  ROOT %g = (bf16[64,512]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""
    assert traffic(call).flops == 2 * 64 * 256 * 512


def test_a_fusion_is_one_operation():
    found = moved(lambda x, y: jnp.tanh(x * 2 + y).sum(axis=1), (128, 256), (128, 256))
    assert found.bytes == 4 * (2 * 128 * 256 + 128)


def test_an_update_in_place_counts_its_slice():
    def write(buffer, new):
        return jax.lax.dynamic_update_slice(buffer, new, (3, 0))

    assert moved(write, (1024, 64), (2, 64), donate_argnums=0).bytes <= 4 * 3 * 2 * 64
    copied = moved(write, (1024, 64), (2, 64))  # without donation the buffer is copied first
    assert copied.bytes >= 4 * 2 * 1024 * 64
    assert copied.written((1024, 64)) and not moved(write, (1024, 64), (2, 64), donate_argnums=0).written((1024, 64))


def test_slices_and_gathers_read_what_they_take():
    assert moved(lambda x: jax.lax.dynamic_slice(x, (5, 0), (4, 64)) * 2, (4096, 64)).bytes == 4 * 2 * 4 * 64
    ids = jnp.asarray([3, 1, 4, 1])
    assert moved(lambda table: table[ids], (4096, 64)).bytes < 4 * 3 * 4 * 64


LOOP = """HloModule loop

%body (p: (s32[], f32[256])) -> (s32[], f32[256]) {
  %p = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %y = f32[256]{0} negate(%x)
  ROOT %t = (s32[], f32[256]{0}) tuple(%i, %y)
}

%condition (p.1: (s32[], f32[256])) -> pred[] {
  %p.1 = (s32[], f32[256]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[256])) -> (s32[], f32[256]) {
  %a = (s32[], f32[256]{0}) parameter(0)
  ROOT %w = (s32[], f32[256]{0}) while(%a), condition=%condition, body=%body%TRIPS
}
"""


@pytest.mark.parametrize(
    ("known", "times"), (("", 1), (', backend_config={"known_trip_count":{"n":"7"}}', 7)), ids=("unknown", "known")
)
def test_a_loop_counts_as_often_as_it_is_known_to_run(known, times):
    assert traffic(LOOP.replace("%TRIPS", known)).bytes == times * 2 * 1024


@pytest.mark.parametrize(("start", "step", "end"), ((0, 1, 8), (3, 4, 30), (9, 1, 9)))
def test_the_bound_of_a_loop_is_read_where_the_compiler_gives_none(start, step, end):
    """As many trips as XLA itself says, whose words are taken away."""

    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < end, lambda c: (c[0] + step, jnp.sin(c[1])), (start, x))[1]

    text = jax.jit(loop).lower(jax.ShapeDtypeStruct((256,), jnp.float32)).compile().as_text()
    known = re.search(r',"known_trip_count":\{"n":"(\d+)"\}', text)
    if known is None:  # a loop of no trips is no loop
        assert end <= start and "while(" not in text
        return
    silent = traffic(text.replace(known[0], ""))
    assert silent.bytes == traffic(text).bytes and silent.unbounded == ()
    assert {access.times for access in silent.accesses if "body" in access.op.source} == {int(known[1])}


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    def loop(x):
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 30, lambda y: y + 1, x)

    found = traffic(jax.jit(loop).lower(jax.ShapeDtypeStruct((256,), jnp.float32)).compile().as_text())
    assert [name.rsplit("/", 1)[-1] for name in found.unbounded] == ["while"]


CHIP = """HloModule chip, is_scheduled=true

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%fused (q: f32[8,128], u: f32[1,128], at: s32[]) -> f32[8,128] {
  %q = f32[8,128]{1,0:T(8,128)} parameter(0)
  %u = f32[1,128]{1,0:T(1,128)} parameter(1)
  %at = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %d = f32[8,128]{1,0:T(8,128)} dynamic-update-slice(%q, %u, %at, %zero)
}

%small (v: f32[8,128]) -> f32[8,128] {
  %v = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %r = f32[8,128]{1,0:T(8,128)} all-reduce(%v), replica_groups={{0,1}}, to_apply=%sum
}

%large (v.1: f32[8,128]) -> f32[8,128] {
  %v.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %n = f32[8,128]{1,0:T(8,128)} negate(%v.1)
  ROOT %m = f32[8,128]{1,0:T(8,128)} negate(%n)
}

ENTRY %main (w: f32[8,128], new: f32[1,128], i: s32[]) -> f32[8,128] {
  %w = f32[8,128]{1,0:T(8,128)} parameter(0)
  %new = f32[1,128]{1,0:T(1,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %part = ((f32[8,128]{1,0:T(8,128)}), f32[2,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:2], [0:128]}
  %parted = f32[2,128]{1,0:T(8,128)S(1)} slice-done(%part)
  %inside = f32[8,128]{1,0:T(8,128)S(1)} negate(%done)
  %written = f32[8,128]{1,0:T(8,128)} fusion(%w, %new, %i), kind=kLoop, calls=%fused
  ROOT %chosen = f32[8,128]{1,0:T(8,128)} conditional(%i, %written, %written), branch_computations={%small, %large}
}
"""


def test_an_all_reduce_writes_once_however_it_is_started():
    program = """HloModule sums

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  LINES
}
"""
    at_once = "ROOT %r = f32[1024]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum"
    begun = at_once.replace("ROOT %r", "%s").replace("all-reduce(", "all-reduce-start(")
    ended = "ROOT %r = f32[1024]{0} all-reduce-done(%s)"
    found = [traffic(program.replace("LINES", lines)) for lines in (at_once, f"{begun}\n  {ended}")]
    assert [f.bytes for f in found] == [8192, 8192] and found[0].collectives == found[1].collectives


def test_what_stays_on_the_chip_costs_nothing():
    """A prefetch reads once; what reads the prefetched copy does not. Of a conditional the costlier branch counts."""
    whole, row, scalar = 8 * 128 * 4, 128 * 4, 4
    found = traffic(CHIP)
    by_name = {access.op.name: (access.read, access.written) for access in found.accesses}
    assert by_name["start"] == (whole, 0) and by_name["part"] == (2 * row, 0) and by_name["inside"] == (0, 0)
    assert by_name["written"] == (row + scalar, row)
    assert "m" in by_name and "r" not in by_name and found.collectives == {}
    assert found.bytes == whole + 2 * row + 2 * row + scalar + 2 * 2 * whole


def test_collectives_are_counted_by_kind():
    cheaper = CHIP.replace(
        "ROOT %m = f32[8,128]{1,0:T(8,128)} negate(%n)", "ROOT %m = f32[8,128]{1,0:T(8,128)} bitcast(%v.1)"
    )
    cheaper = cheaper.replace("  %n = f32[8,128]{1,0:T(8,128)} negate(%v.1)\n", "")
    assert traffic(cheaper).collectives == {"all-reduce": {"count": 1, "bytes": 8 * 128 * 4}}


def test_main_memory_counts_whole_tiles():
    """64 channels take the lanes of 128, and 3 rows those of 8; an array of bytes has tiles of 32 rows."""
    shapes = "bf16[4,3,64]{2,1,0:T(8,128)(2,1)}", "bf16[64,256]{0,1:T(8,128)(2,1)}", "s8[40,128]{1,0:T(32,128)(4,1)}"
    found = [parse(CHIP.replace("f32[8,128]{1,0:T(8,128)} param", f"{shape} param")) for shape in shapes]
    sizes = [program.computations["main"].ops["w"].value[0] for program in found]
    assert [b.size for b in sizes] == [2 * 4 * 3 * 64, 2 * 64 * 256, 40 * 128]
    assert [b.hbm for b in sizes] == [2 * 4 * 8 * 128, 2 * 128 * 256, 64 * 128]
    assert parse(CHIP).computations["main"].ops["i"].value[0].hbm == 4  # a number


def test_sizes_and_spaces():
    value = parse(CHIP).computations["main"].ops["start"].value
    assert value[:2] == (Buffer("f32", (8, 128), 1), Buffer("f32", (8, 128), 0))
    assert [Buffer(kind, (16,)).size for kind in ("bf16", "s4", "pred", "f8e4m3fn", "token")] == [32, 8, 16, 16, 0]
    with pytest.raises(ValueError, match="ENTRY"):
        parse("nothing")


def ragged(x, length):
    """Sums the filled blocks of every row."""
    count = pl.cdiv(length, 128)

    def kernel(count, x, out):
        @pl.when(pl.program_id(1) == 0)
        def _():
            out[...] = jnp.zeros_like(out)

        out[...] += x[...].sum(axis=0, keepdims=True)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0], jnp.max(count)),
            in_specs=[pl.BlockSpec((None, 128, 128), lambda b, j, count: (b, jnp.minimum(j, count[b] - 1), 0))],
            out_specs=pl.BlockSpec((None, 1, 128), lambda b, j, count: (b, 0, 0)),
        ),
    )(count, x)


CALL = """HloModule call

ENTRY %main (g: s32[], c: s32[4], x: f32[4,1024,128]) -> f32[4,1,128] {
  %g = s32[] parameter(0)
  %c = s32[4]{0} parameter(1)
  %x = f32[4,1024,128]{2,1,0} parameter(2)
  ROOT %k = f32[4,1,128]{2,1,0} custom-call(%g, %c, %x), custom_call_target="tpu_custom_call"
}
"""


def test_a_kernel_counts_the_blocks_that_it_fetches():
    """Rows of 100, 200, 1000 and 512 slots have 1, 2, 8 and 4 blocks of 128."""
    x = jax.ShapeDtypeStruct((4, 1024, 128), jnp.float32)
    kernel = kernels(ragged, (x, np.asarray([100, 200, 1000, 512], np.int32)))
    block = 128 * 128 * 4
    assert traffic(CALL, kernel).bytes == (1 + 2 + 8 + 4) * block + 4 * 128 * 4 + 4 * 4 + 4
    assert traffic(CALL).bytes == 4 * 1024 * 128 * 4 + 4 * 128 * 4 + 4 * 4 + 4  # whole, without knowing it


def test_values_are_followed_through_control_flow_and_meshes():
    """A kernel in a branch and in a mapped function is found, with its own part of what is known."""
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("rows")

    def step(x, length):
        mapped = jax.shard_map(ragged, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
        return jax.lax.cond(x[0, 0, 0] > 0, lambda: mapped(x, length), lambda: jnp.zeros((8, 1, 128)))

    kernel = kernels(step, (jax.ShapeDtypeStruct((8, 1024, 128), jnp.float32), np.full(8, 300, np.int32)))
    assert traffic(CALL, kernel).bytes == 4 * 3 * 128 * 128 * 4 + 4 * 128 * 4 + 4 * 4 + 4


SLICED = """
%retiled (a: u4[8,64,128]) -> u4[8,64,128] {
  %a = u4[8,64,128]{2,1,0} parameter(0)
  ROOT %c = u4[8,64,128]{2,1,0} copy(%a)
}

%part (a: u4[8,64,128], i: s32[]) -> u4[1,64,128] {
  %a = u4[8,64,128]{2,1,0} parameter(0)
  %same = u4[8,64,128]{2,1,0} fusion(%a), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retiled
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = u4[1,64,128]{2,1,0:S(1)} dynamic-slice(%same, %i, %zero, %zero), dynamic_slice_sizes={1,64,128}
}

ENTRY main (a: u4[8,64,128], i: s32[]) -> u4[1,64,128] {
  %a = u4[8,64,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = u4[1,64,128]{2,1,0:S(1)} fusion(%a, %i), kind=kLoop, calls=%part
}
"""


def test_a_slice_of_four_bit_numbers_in_other_tiles_is_read_alone():
    """A TPU's compiler names the tiles of such a type anew inside the fusion that slices it."""
    assert traffic(SLICED).bytes == 64 * 128 // 2 + 4
    assert traffic(SLICED.replace("output_to_operand_aliasing={{}: (0, {})}, ", "")).bytes == 8 * 64 * 128 // 2 + 4
