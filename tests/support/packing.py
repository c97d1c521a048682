"""Packed weights by the rules of their formats, written and read an element at a time in Python's own integers.

Every `write_*` makes the tensors of a layer from codes, scales and zero points; every `slow_*` makes numbers of such tensors,
from what the format says and nothing of ours.
"""

import json

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_CODES = {
    np.dtype(kind): name
    for kind, name in (
        (np.float32, "F32"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16"), (np.int8, "I8"), (np.int32, "I32"),
        (np.int64, "I64"), (np.uint8, "U8"), (E4M3, "F8_E4M3"), (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    )
}  # fmt: skip


def write_file(file, tensors):
    """A safetensors file."""
    header, offset = {}, 0
    for name, array in tensors.items():
        stop = offset + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in tensors.values()))


def packed_rows(numbers, bits):
    """Unsigned numbers `[rows, n]` in int32 words, dense, low bits first."""
    rows = []
    for row in numbers.tolist():
        whole = sum(number << i * bits for i, number in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append(np.frombuffer(whole.to_bytes(4 * count, "little"), "<i4"))
    return np.stack(rows)


def field(words, i, bits):
    """Number i of a row of words."""
    whole = int.from_bytes(np.ascontiguousarray(words, "<i4").tobytes(), "little")
    return whole >> i * bits & (1 << bits) - 1


def scales_of(rng, shape, kind):
    """Scales of both signs, which a reader may not rely on."""
    return (rng.uniform(0.01, 0.1, shape) * rng.choice([-1, 1], shape)).astype(kind)


def _all(shape, number):
    return np.array([[number(i, k) for k in range(shape[1])] for i in range(shape[0])], np.float32)


def write_pack_quantized(rng, shape, bits=4, block=32, symmetric=True, ordered=False, kind=ml_dtypes.bfloat16):
    """compressed-tensors' integers in words, with a scale for `block` neighbours; None: for a row."""
    out, wide = shape
    groups = 1 if block is None else -(-wide // block)
    codes = rng.integers(0, 2**bits, shape)
    parts = {
        "weight_packed": packed_rows(codes, bits), "weight_scale": scales_of(rng, (out, groups), kind),
        "weight_shape": np.array(shape, np.int64),
    }  # fmt: skip
    if not symmetric:
        zeros = rng.integers(0, 2**bits, (out, groups))
        parts["weight_zero_point"] = np.ascontiguousarray(packed_rows(zeros.T, bits).T)
    if ordered:
        parts["weight_g_idx"] = rng.permutation(np.arange(wide) // block).astype(np.int32)
    return parts


def slow_pack_quantized(parts, bits=4, block=32):
    """Its numbers."""
    out, wide = map(int, parts["weight_shape"])
    offset = 2 ** (bits - 1)

    def number(i, k):
        group = 0 if block is None else int(parts["weight_g_idx"][k]) if "weight_g_idx" in parts else k // block
        q = field(parts["weight_packed"][i, k * bits // 32 :][:2], 0, 32 * 2) >> k * bits % 32 & (1 << bits) - 1
        z = offset if "weight_zero_point" not in parts else field(parts["weight_zero_point"][:, group], i, bits)
        return np.float32((q - offset) - (z - offset)) * np.float32(parts["weight_scale"][i, group])

    return _all((out, wide), number)


def _grid(shape, block):
    """How many blocks there are; a block's None is the whole axis."""
    return tuple(1 if one is None else -(-size // one) for size, one in zip(shape, block, strict=True))


def write_stored(rng, shape, strategy, block, symmetric=True, kind=np.int8, scale=ml_dtypes.bfloat16):
    """compressed-tensors' int8 or e4m3 numbers as they are."""
    grid = (1,) if strategy == "tensor" else _grid(shape, block)
    numbers = rng.integers(-128, 128, shape) if kind == np.int8 else rng.normal(0, 40, shape)
    parts = {"weight": numbers.astype(kind), "weight_scale": scales_of(rng, grid, scale)}
    return parts if symmetric else parts | {"weight_zero_point": rng.integers(-128, 128, grid).astype(np.int8)}


def slow_stored(parts, block, scale="weight_scale"):
    """Numbers `weight * scale` of blocks `[rows, columns]`; None: all of them."""
    weight, scales = parts["weight"], parts[scale]
    tall, wide = (size if one is None else one for size, one in zip(weight.shape, block, strict=True))
    grid = _grid(weight.shape, block)
    scales = scales.reshape(grid)
    zeros = parts.get("weight_zero_point", np.zeros(grid, np.int8)).reshape(grid)

    def number(i, k):
        at = i // tall, k // wide
        return (np.float32(weight[i, k]) - np.float32(zeros[at])) * np.float32(scales[at])

    return _all(weight.shape, number)


def write_fp8(rng, shape, block=(None, None), kind=np.float32, name="weight_scale_inv"):
    """DeepSeek's blocks; one scale, no array of one, where there are none."""
    grid = _grid(shape, block)
    powers = kind == ml_dtypes.float8_e8m0fnu
    scales = (2.0 ** rng.integers(-9, 0, grid)).astype(kind) if powers else scales_of(rng, grid, kind)
    return {
        "weight": rng.normal(0, 40, shape).astype(E4M3), name: scales if any(block) else scales.reshape(())
    }  # fmt: skip


COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight columns the one that each nibble of AWQ's words has, from the low end."""


def awq_words(numbers):
    """Nibbles `[rows, columns]` as AWQ packs them."""
    words = numbers.reshape(len(numbers), -1, 8)[..., list(COLUMNS)]
    return packed_rows(words.reshape(len(numbers), -1), 4)


def write_awq(rng, shape, group=32):
    """AutoAWQ's tensors for `gemm`."""
    out, wide = shape
    groups = 1 if group is None else wide // group
    return {
        "qweight": awq_words(rng.integers(0, 16, (wide, out))), "qzeros": awq_words(rng.integers(0, 16, (groups, out))),
        "scales": scales_of(rng, (groups, out), np.float16),
    }  # fmt: skip


def slow_awq(parts, group=32):
    """Its numbers `[out, in]`."""
    wide, out = parts["qweight"].shape[0], parts["scales"].shape[1]

    def nibble(row, n):
        return int(row[n // 8]) >> 4 * COLUMNS.index(n % 8) & 15

    def number(n, k):
        g = 0 if group is None else k // group
        q, z = nibble(parts["qweight"][k], n), nibble(parts["qzeros"][g], n)
        return np.float32(q - z) * np.float32(parts["scales"][g, n])

    return _all((out, wide), number)


def write_gptq(rng, shape, bits=4, group=32, form="gptq", symmetric=True, g_idx="plain"):
    """AutoGPTQ's tensors; `form` is `checkpoint_format`, and `g_idx` may be plain, mixed or absent."""
    out, wide = shape
    groups = 1 if group is None else wide // group
    zeros = np.full((groups, out), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (groups, out))
    parts = {
        "qweight": np.ascontiguousarray(packed_rows(rng.integers(0, 2**bits, (out, wide)), bits).T),
        "qzeros": packed_rows(zeros - (form == "gptq"), bits), "scales": scales_of(rng, (groups, out), np.float16),
    }  # fmt: skip
    of = np.arange(wide) // (group or wide)
    order = {"plain": {"g_idx": of}, "mixed": {"g_idx": rng.permutation(of)}, "absent": {}}[g_idx]
    return parts | {name: x.astype(np.int32) for name, x in order.items()}


def slow_gptq(parts, bits=4, group=32, form="gptq"):
    """Its numbers `[out, in]`."""
    wide, out = parts["qweight"].shape[0] * 32 // bits, parts["scales"].shape[1]

    def number(n, k):
        g = int(parts["g_idx"][k]) if "g_idx" in parts else 0 if group is None else k // group
        at = k * bits // 32
        q = field(parts["qweight"][at : at + 2, n], 0, 64) >> k * bits % 32 & (1 << bits) - 1
        z = field(parts["qzeros"][g], n, bits) + (form == "gptq")
        return np.float32(q - z) * np.float32(parts["scales"][g, n])

    return _all((out, wide), number)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write_float4(rng, shape, group=16):
    """compressed-tensors' e2m1: NVFP4 in groups of 16, MXFP4 in groups of 32."""
    out, wide = shape
    grid = out, -(-wide // group)
    parts = {"weight_packed": rng.integers(0, 256, (out, wide // 2)).astype(np.uint8)}
    if group == 32:
        return parts | {"weight_scale": rng.integers(110, 130, grid).astype(np.uint8)}
    scales = rng.uniform(1, 400, grid).astype(E4M3)
    return parts | {"weight_scale": scales, "weight_global_scale": np.array([3000.5], np.float32)}


def slow_float4(parts, group=16):
    """Its numbers."""
    out, wide = parts["weight_packed"].shape[0], 2 * parts["weight_packed"].shape[1]

    def number(i, k):
        code = int(parts["weight_packed"][i, k // 2]) >> 4 * (k % 2) & 15
        scale = parts["weight_scale"][i, k // group]
        power = np.float32(2.0 ** (int(scale) - 127)) if group == 32 else None
        real = np.float32(scale) / parts["weight_global_scale"][0] if power is None else power
        return np.float32(E2M1[code & 7] * (-1 if code > 7 else 1)) * real

    return _all((out, wide), number)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def write_nf4(rng, shape, block=64, nested=True):
    """bitsandbytes' nf4, with coded scales."""
    count = shape[0] * shape[1]
    blocks = -(-count // block)
    said = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    parts = {
        "weight": rng.integers(0, 256, (-(-count // 2), 1)).astype(np.uint8), "weight.quant_map": np.array(NF4, np.float32),
    }  # fmt: skip
    if nested:
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        parts |= {
            "weight.absmax": rng.integers(0, 256, blocks).astype(np.uint8),
            "weight.nested_absmax": rng.uniform(0.01, 0.05, -(-blocks // 256)).astype(np.float32),
            "weight.nested_quant_map": np.sort(rng.uniform(-1, 1, 256)).astype(np.float32),
        }
    else:
        parts["weight.absmax"] = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
    octets = np.frombuffer(json.dumps(said).encode(), np.uint8)
    return parts | {"weight.quant_state.bitsandbytes__nf4": octets}


def slow_nf4(parts):
    """Its numbers."""
    said = json.loads(parts["weight.quant_state.bitsandbytes__nf4"].tobytes())
    (out, wide), block = said["shape"], said["blocksize"]

    def number(i, k):
        at = i * wide + k
        code = int(parts["weight"][at // 2, 0]) >> 4 * (1 - at % 2) & 15
        scale = parts["weight.absmax"][at // block]
        if "nested_blocksize" in said:
            own = parts["weight.nested_absmax"][at // block // said["nested_blocksize"]]
            scale = parts["weight.nested_quant_map"][scale] * own + np.float32(said["nested_offset"])
        return np.float32(parts["weight.quant_map"][code]) * scale

    return _all((out, wide), number)
