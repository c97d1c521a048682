"""Numbers with coded exponents: every bit pattern of bfloat16, whichever way they are decoded."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specjax.kernels.exponents import numbers
from specjax.models.dfloat11 import code_lengths, encoded
from specjax.sharding import make_mesh

WAYS = ("xla", "pallas_gpu_interpreted", "pallas_tpu_interpreted")


def normal(*shape):
    return (0.02 * np.random.default_rng(0).normal(size=shape)).astype(ml_dtypes.bfloat16)


CASES = {
    "every bit pattern": (np.arange(2**16, dtype=np.uint16).reshape(128, 512).T.view(ml_dtypes.bfloat16), 32),
    "outputs and runs that fill no tile": (normal(9 * 32, 130), 32),
    "one exponent": (np.full((16, 3), 1.5, ml_dtypes.bfloat16), 8),
    "a run that four does not divide": (normal(14, 5), 7),
    "several matrices": (normal(3, 256, 128), 32),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_way_gives_back_every_bit(case):
    matrix, run = CASES[case]
    coded = jax.tree.map(jnp.asarray, encoded(matrix, -2, run, np.float32))
    parts = coded.rest, coded.codes, coded.table
    for way in WAYS:
        found = jax.jit(lambda *parts, way=way: numbers(*parts, implementation=way))(*parts)
        found, want = np.asarray(found).view(np.uint16), matrix.view(np.uint16)
        if (
            way == "pallas_tpu_interpreted"
        ):  # a CPU carries blocks of bfloat16 as float32, which makes every NaN a quiet one
            found, want = (np.where((x & 0x7FFF) > 0x7F80, 0x7FFF, x) for x in (found, want))
        np.testing.assert_array_equal(found, want, err_msg=way)
    table = jax.tree.map(jnp.asarray, encoded(matrix.swapaxes(-1, -2), -1, run, np.float32))
    np.testing.assert_array_equal(np.asarray(table.T.numbers()).view(np.uint16), matrix.view(np.uint16))


def test_codes_are_read_from_the_high_bit_on():
    """By hand: the code of 1 (exponent 127, four times) is 0, those of 2 (128, twice) and 0.5 (126, once) are 10 and 11."""
    coded = encoded(np.array([[1, 2, 1, 1, 0.5, 1, -2]], ml_dtypes.bfloat16).T, -2, 0, np.float32)
    half = coded.table[0xC0, 0, 0] == (126 | 2 << 8)  # which of them has which is open
    assert f"{coded.codes[0, 0, 0]:032b}" == ("0100011010" if half else "0110010011").ljust(32, "0")
    assert {coded.table[i, 0, 0] for i in range(128)} == {127 | 1 << 8}
    assert coded.rest.ravel().tolist() == [0, 0, 0, 0, 0, 0, 128]


def full_codes(count, shortest=1, room=256):
    """The lengths of every prefix code of so many symbols and at most 8 bits that leaves no room, the shortest first."""
    if count == 0:
        return [()] if room == 0 else []
    fits = [length for length in range(shortest, 9) if count <= room <= count * 2 ** (8 - length)]
    return [(n, *rest) for n in fits for rest in full_codes(count - 1, n, room - 2 ** (8 - n))]


def test_no_code_of_eight_bits_is_shorter():
    """Also where Huffman's has eleven; and there is one for all exponents."""
    codes = full_codes(12)
    for counts in (2 ** np.arange(12), np.random.default_rng(0).integers(1, 99, 12), np.ones(12, int)):
        lengths = code_lengths(np.append(counts, [0, 0]))
        assert sorted(lengths) in [[0, 0, *code] for code in codes]
        assert lengths[:12] @ counts == min(np.array(code) @ np.sort(counts)[::-1] for code in codes)
    assert code_lengths(np.arange(1, 257)).tolist() == [8] * 256


def test_a_mesh_and_a_map_have_xla():
    """Which partitions it; and a name that is none is an error."""
    coded = encoded(normal(64, 8), -2, 32, np.float32)
    given = coded.rest, coded.codes, coded.table
    text = lambda: str(jax.make_jaxpr(numbers)(*given))
    assert "coded_exponents" in text()
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        assert "coded_exponents" not in text()
    several = encoded(normal(2, 64, 8), -2, 32, np.float32)
    found = jax.vmap(numbers)(several.rest, several.codes, several.table)
    np.testing.assert_array_equal(found, normal(2, 64, 8))
    with pytest.raises(ValueError, match="no implementation 'pallas'; choose 'xla' or None"):
        numbers(*given, implementation="pallas")


@pytest.mark.parametrize(
    "platform", (MARKS := {"cpu": "stablehlo.while", "tpu": "tpu_custom_call", "cuda": "xla.gpu.triton"})
)
@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
def test_every_platform_has_its_own(platform):
    coded = encoded(normal(256, 128), -2, 32, np.float32)
    program = (
        jax.jit(numbers).trace(coded.rest, coded.codes, coded.table).lower(lowering_platforms=(platform,)).as_text()
    )
    assert [mark for mark in MARKS.values() if mark in program] == [MARKS[platform]]
