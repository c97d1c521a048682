"""What a GPU's second-level cache spares, on programs of a few lines."""

import functools

import pytest

from specjax.plan.cached import through
from specjax.plan.hlo import traffic

TEXT = """HloModule small

ENTRY %main (x: f32[1000], big: f32[100000], kept: f32[1000,10]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %big = f32[100000]{0} parameter(1)
  %kept = f32[1000,10]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %a = f32[1000]{0} negate(%x)
  %same = f32[1000,1]{1,0} bitcast(%a)
  %soon = f32[1000,1]{1,0} negate(%same)
  %place = f32[1000,10]{1,0} dynamic-update-slice(%kept, %soon, %zero, %zero)
  %cache = f32[1000,10]{1,0} negate(%place)
  %again = f32[1000]{0} negate(%x)
  %long = f32[100000]{0} negate(%big)
  %late = f32[1000]{0} negate(%a)
  ROOT %last = f32[1000]{0} negate(%a)
}
"""


@pytest.mark.parametrize(
    ("cache", "free"),
    [
        (7_999, set()),
        (8_000, {"soon"}),  # half of it is what was just made
        (16_000, {"soon", "last"}),  # and what was made since it was last read
        (2_000_000, {"soon", "late", "last"}),
    ],
)
def test_what_was_made_or_read_a_moment_ago_is_read_for_nothing(cache, free):
    """Arguments always count, and what is written in place into one of them; and so does every write."""
    whole, found = traffic(TEXT), traffic(TEXT, cached=functools.partial(through, cache=cache))
    names = ("soon", "cache", "again", "long", "late", "last")
    reads = {access.op.name: access.read for access in found.accesses}
    before = {access.op.name: access.read for access in whole.accesses}
    assert {name: reads[name] for name in names} == {name: 0 if name in free else before[name] for name in names}
    assert [access.written for access in found.accesses] == [access.written for access in whole.accesses]
    assert found.bytes == whole.bytes - 4000 * len(free)


def test_a_fusion_that_sums_parts_reads_those_that_it_keeps():
    """Of sixteen parts of a product, a third of the columns; and all of them where the sum is kept whole as well."""
    text = """HloModule sums

%fused (p: f32[16,8,768]) -> f32[8,256] {
  %p = f32[16,8,768]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %sum = f32[8,768]{1,0} reduce(%p, %zero), dimensions={0}, to_apply=%add
  ROOT %part = f32[8,256]{1,0} slice(%sum), slice={[0:8], [512:768]}
}

ENTRY %main (x: f32[16,8,768]) -> f32[8,256] {
  %x = f32[16,8,768]{2,1,0} parameter(0)
  ROOT %f = f32[8,256]{1,0} fusion(%x), kind=kLoop, calls=%fused
}
"""
    assert traffic(text).accesses[0].read == 4 * 16 * 8 * 256
    kept = text.replace("ROOT %part", "%part").replace(
        "[512:768]}\n", "[512:768]}\n  ROOT %two = (f32[8,256]{1,0}, f32[8,768]{1,0}) tuple(%part, %sum)\n"
    )
    assert traffic(kept).accesses[0].read == 4 * 16 * 8 * 768
