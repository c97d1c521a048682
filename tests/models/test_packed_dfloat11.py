"""Folders in DFloat11's published layout: bit for bit the numbers that their codes say, read one after the other."""

import copy
import heapq
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from support import packing

from specjax import models
from specjax.models import ModelError, byte_ranges, weights
from specjax.models.packed import table
from specjax.models.tensors import read_header, shaped
from specjax.sharding import make_mesh

safetensors = pytest.importorskip("safetensors.numpy")
SMALL = models.llama_config(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16,
)  # fmt: skip
NAMES = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
CONFIG = {
    "version": "0.5.0", "threads_per_block": [512], "bytes_per_thread": 8,
    "pattern_dict": {r"model\.layers\.\d+": NAMES, "lm_head": [], r"model\.embed_tokens": []},
}  # fmt: skip


def huffman(frequencies):
    """The code of each symbol as a text of 0 and 1."""
    trees = [(count, symbol, {symbol: ""}) for symbol, count in frequencies.items()]
    heapq.heapify(trees)
    while len(trees) > 1:
        (a, _, low), (b, n, high) = heapq.heappop(trees), heapq.heappop(trees)
        codes = {symbol: "0" + code for symbol, code in low.items()} | {s: "1" + code for s, code in high.items()}
        heapq.heappush(trees, (a + b, n, codes))
    return trees[0][2]


def write(matrices, skewed=False):
    """A module's tensors; with `skewed` codes of up to 30 bits, which go through several tables."""
    bits = np.concatenate([np.asarray(m).reshape(-1) for m in matrices]).view(np.uint16)
    exponents = ((bits >> 7) & 255).tolist()
    kinds, counts = np.unique(exponents, return_counts=True)
    order = kinds[np.argsort(counts)].tolist()
    frequencies = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    if skewed:
        frequencies = {symbol: 2 ** max(0, i - max(0, len(order) - 30)) for i, symbol in enumerate(order)}
    codes = huffman(frequencies) if len(kinds) > 1 else {order[0]: "0"}
    stream, starts = [], [0]
    for exponent in exponents:
        stream.append(codes[exponent])
        starts.append(starts[-1] + len(codes[exponent]))
    text, total = "".join(stream), starts.pop()
    text += "1" * (-total % 8)  # what is behind the last code says nothing
    chunks = 512 * -(-len(text) // (8 * 8 * 512))
    at = np.searchsorted(starts, 64 * np.arange(chunks + 1))  # the first code that begins in a chunk
    gaps = [starts[i] - 64 * chunk if i < len(starts) else 0 for chunk, i in enumerate(at[:-1])]
    prefixes = {""} | {code[:i] for code in codes.values() for i in range(8, len(code), 8)}
    numbered = {prefix: i for i, prefix in enumerate(sorted(prefixes, key=lambda prefix: (len(prefix), prefix)))}
    luts = np.zeros((len(numbered) + 1, 256), np.uint8)
    for symbol, code in codes.items():
        luts[-1, symbol] = len(code)
        cut = (len(code) - 1) // 8 * 8
        for byte in range(256):
            if f"{byte:08b}".startswith(code[cut:]):
                luts[numbered[code[:cut]], byte] = symbol
    for prefix, i in numbered.items():
        if prefix:
            luts[numbered[prefix[:-8]], int(prefix[-8:], 2)] = 256 - i
    sizes = [np.asarray(m).size for m in matrices]
    return {
        "encoded_exponent": np.array([int(text[i : i + 8], 2) for i in range(0, len(text), 8)], np.uint8),
        "sign_mantissa": ((bits >> 8) & 128 | bits & 127).astype(np.uint8),
        "luts": luts,
        "output_positions": np.array([*at[:-1:512], len(starts)], np.uint32).view(np.uint8),
        "gaps": np.packbits([int(bit) for gap in gaps for bit in f"{gap:05b}"]),
        "split_positions": np.cumsum(sizes)[:-1].astype(np.int64),
    }


def slow(parts):
    """All numbers of a module, from the first bit on, in one go: chunks and blocks are not looked at."""
    stream = "".join(f"{byte:08b}" for byte in parts["encoded_exponent"]) + "0" * 32
    at, bits = 0, []
    for rest in parts["sign_mantissa"].tolist():
        lut, byte = 0, at
        while (entry := int(parts["luts"][lut, int(stream[byte : byte + 8], 2)])) >= 240:
            lut, byte = 256 - entry, byte + 8
        at += int(parts["luts"][-1, entry])
        bits.append((rest >> 7) << 15 | entry << 7 | rest & 127)
    return np.array(bits, np.uint16).view(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, its tensors, and the numbers that a plain one would have."""
    lm, path = models.LlamaLM(SMALL), tmp_path_factory.mktemp("dfloat11") / "it"
    models.save(path, lm, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), lm.init(jax.random.key(0))))
    numbers = safetensors.load_file(path / "model.safetensors")
    own = dict(numbers)
    for i in range(2):
        layer = f"model.layers.{i}"
        parts = write([own.pop(f"{layer}.{name}.weight") for name in NAMES], skewed=i == 1)
        assert parts["luts"].shape[0] > 3 - (i == 0) and len(parts["output_positions"]) > 8
        np.testing.assert_array_equal(
            slow(parts), np.concatenate([numbers[f"{layer}.{n}.weight"].ravel() for n in NAMES])
        )
        own |= {f"{layer}.{part}": x for part, x in parts.items()}
    for module in ("lm_head", "model.embed_tokens"):
        own |= {f"{module}.{part}": x for part, x in write([own.pop(f"{module}.weight")]).items()}
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(said | {"dfloat11_config": CONFIG}))
    packing.write_file(path / "model.safetensors", own)
    return path, own, numbers


@pytest.mark.slow
def test_a_folder_is_what_its_codes_say(made):
    """On a mesh too, where a device reads its own part; and kept with coded exponents, in our own lanes."""
    folder, _, numbers = made
    read = models.load(folder, "bfloat16")
    split = models.load(folder, "float32", mesh=make_mesh("model=4", jax.devices()[:4]))
    coded = models.load(folder, "bfloat16", weights="dfloat11:group=32,vocab=true")
    plain = jax.tree.map(models.few_bits.plain, coded.params, is_leaf=models.few_bits.is_quantised)
    for params in (read.params, split.params, plain):
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            name, transposed = weights.hf_name(path)
            want = numbers[name].astype(leaf.dtype)
            np.testing.assert_array_equal(np.asarray(leaf), want.T if transposed else want, err_msg=name)


def test_what_is_saved_is_read(made, tmp_path):
    """By ourselves, and by the first unpacker; a module whose exponents the layout cannot say stays plain."""
    model = models.load(made[0], "bfloat16")
    params = jax.tree.map(lambda x: x, model.params)
    params["layers"][1]["mlp"]["up"]["kernel"] = params["layers"][1]["mlp"]["up"]["kernel"].at[3, 5].set(np.inf)
    models.save(tmp_path / "it", model.lm, params, layout="dfloat11")
    read = models.load(tmp_path / "it", "bfloat16")
    for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    own = safetensors.load_file(tmp_path / "it" / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight" in own and "model.layers.1.luts" not in own
    names = json.loads((tmp_path / "it" / "config.json").read_text())["dfloat11_config"]["pattern_dict"][
        r"model\.layers\.0"
    ]
    parts = {name.removeprefix("model.layers.0."): x for name, x in own.items() if name.startswith("model.layers.0.")}
    want = np.concatenate([made[2][f"model.layers.0.{name}.weight"].ravel() for name in names])
    np.testing.assert_array_equal(slow(parts), want)
    for part in (
        "gaps",
        "output_positions",
    ):  # those of another writer, to the bit, if its codes are of the same lengths
        assert parts[part].shape == made[1][f"model.layers.0.{part}"].shape
    with pytest.raises(ModelError, match="dfloat11 is for models of the Llama family in bfloat16"):
        models.save(tmp_path / "no", model.lm, params, dtype="float32", layout="dfloat11")


def test_every_number_there_is_and_any_box(tmp_path):
    """All bit patterns with an exponent below 240, and some rows and columns of them; one block or many at a time."""
    every = np.arange(2**16, dtype=np.uint16)
    every = (
        np.random.default_rng(0).permutation(every[(every >> 7 & 255) < 240]).view(ml_dtypes.bfloat16).reshape(240, 256)
    )
    packing.write_file(tmp_path / "it.safetensors", {f"it.{name}": x for name, x in write([every]).items()})
    config = {"dfloat11_config": CONFIG | {"pattern_dict": {"it": []}}}
    tensor = shaped(table.unpacked(config, read_header(tmp_path / "it.safetensors"))["it.weight"], every.shape)
    for (a, b), (c, d) in (((0, 240), (0, 256)), ((100, 133), (7, 250)), ((239, 240), (255, 256)), ((5, 5), (0, 3))):
        own = np.zeros((b - a, d - c), ml_dtypes.bfloat16)
        byte_ranges.fill(tensor, [(((a, b), (c, d)), own)])
        np.testing.assert_array_equal(own.view(np.uint16), every[a:b, c:d].view(np.uint16))


def test_gaps_may_end_with_the_codes_and_a_code_must_be_in_a_table(tmp_path):
    matrix = np.full((8, 8), 1.5, ml_dtypes.bfloat16)
    parts = {f"it.{name}": x for name, x in write([matrix]).items()}
    config = {"dfloat11_config": CONFIG | {"pattern_dict": {"it": []}}}

    def read(changed):
        packing.write_file(tmp_path / "it.safetensors", parts | changed)
        tensor = shaped(table.unpacked(config, read_header(tmp_path / "it.safetensors"))["it.weight"], matrix.shape)
        byte_ranges.fill(tensor, [(((0, 8), (0, 8)), own := np.zeros_like(matrix))])
        return own

    np.testing.assert_array_equal(read({"it.gaps": parts["it.gaps"][:1]}), matrix)
    for size in (0, 321):
        with pytest.raises(ModelError, match="gaps is U8"):
            read({"it.gaps": np.zeros(size, np.uint8)})
    for nowhere in (240, 255):  # a table that there is not, and that of lengths
        with pytest.raises(ModelError, match="other codes than luts"):
            read({"it.luts": np.stack([np.full(256, nowhere, np.uint8), parts["it.luts"][1]])})


LAYER = "model.layers.0"
WRONG = (  # fields of the config, or tensors, that are not what they were; and what is said
    ({"bytes_per_thread": 16}, {}, "DFloat11 weights with bytes_per_thread 16 are not read; bytes_per_thread may be 8"),
    ({"threads_per_block": [256]}, {}, r"threads_per_block \[256\] are not read"),
    ({"pattern_dict": {"(": []}}, {}, "dfloat11_config has pattern_dict"),
    ({"pattern_dict": {"lm_head": "all"}}, {}, "lm_head must be a list of names, not 'all'"),
    ({"pattern_dict": {"lm_head": []}}, {}, "is packed, but no pattern of dfloat11_config matches its name"),
    ({"pattern_dict": CONFIG["pattern_dict"] | {r"model\.layers\.\d+": NAMES[:6]}}, {}, r"split_positions is I64 \[6\], not"),
    ({"pattern_dict": CONFIG["pattern_dict"] | {r"model\.layers\.\d+": NAMES[::-1]}}, {}, "has shape .* config.json says"),
    ({}, {"gaps": None}, f"missing {LAYER}.gaps"),
    ({}, {"gaps": lambda x: np.r_[x[:9], x[9] ^ 32, x[10:]]}, "luts, gaps and output_positions say, in blocks 0"),
    ({}, {"output_positions": lambda x: np.r_[x[:4], x[4] ^ 1, x[5:]]}, "luts, gaps and output_positions say"),
    ({}, {"output_positions": lambda x: np.r_[x[:-1], 1]}, "output_positions do not rise from 0 to the 34816"),
    ({}, {"encoded_exponent": lambda x: x[:-4096]}, "output_positions is U8"),
    ({}, {"split_positions": lambda x: x[::-1]}, "split_positions .* do not rise"),
    ({}, {"luts": lambda x: x.reshape(-1)}, "luts is U8"),
    ({}, {"mlp.up_proj.weight": lambda x: np.zeros((2, 2), np.float32)}, "mlp.up_proj.weight"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "parts", "said"), WRONG, ids=lambda one: str(one)[:30])
def test_what_is_wrong_is_named(made, tmp_path, change, parts, said):
    folder, own, _ = made
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dfloat11_config": copy.deepcopy(CONFIG) | change}))
    changed = {
        f"{LAYER}.{name}": None if make is None else np.ascontiguousarray(make(own.get(f"{LAYER}.{name}")))
        for name, make in parts.items()
    }
    packing.write_file(tmp_path / "model.safetensors", {n: x for n, x in (own | changed).items() if x is not None})
    with pytest.raises(ModelError, match=said) as error:
        models.load(tmp_path, "bfloat16")
    assert "\n" not in str(error.value)
