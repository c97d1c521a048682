"""Folders of packed weights, in every format that is read: bit for bit the numbers that the format's definition gives, whatever
part of them is read; and what is not read is named."""

import copy
import functools
import json
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from support import packing
from support.conformance import but_slow
from support.shapes import changed, small

from specjax import models
from specjax.models import ModelError, byte_ranges, hf_config, keeping, weights
from specjax.models.experts import ExpertsConfig
from specjax.models.few_bits import is_quantised
from specjax.models.packed import base, table
from specjax.models.tensors import read_header
from specjax.sharding import make_mesh

safetensors = pytest.importorskip("safetensors.numpy")
IGNORED = "layers.1.mlp.down_proj"
SMALL = small(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, qkv_bias=True,
)  # fmt: skip


def compressed(form, bits=8, kind="int", strategy="channel", symmetric=True, **more):
    scheme = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": {"num_bits": 8}}},
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def packs(bits, block, symmetric, ordered=False, kind=ml_dtypes.bfloat16):
    """A case of words: its config, its writer, the slow unpacker."""
    strategy, group = ("channel", {}) if block is None else ("group", {"group_size": block})
    order = {"actorder": "group"} if ordered else {}
    return (
        compressed("pack-quantized", bits, "int", strategy, symmetric, **group, **order),
        functools.partial(
            packing.write_pack_quantized, bits=bits, block=block, symmetric=symmetric, ordered=ordered, kind=kind
        ),
        functools.partial(packing.slow_pack_quantized, bits=bits, block=block),
    )


def stores(form, strategy, block, symmetric=True, kind=np.int8):
    """A case of numbers that are stored as they are."""
    said = {"group": {"group_size": block[1]}, "block": {"block_structure": block}}.get(strategy, {})
    return (
        compressed(form, 8, "int" if kind == np.int8 else "float", strategy, symmetric, **said),
        functools.partial(packing.write_stored, strategy=strategy, block=block, symmetric=symmetric, kind=kind),
        functools.partial(packing.slow_stored, block=block),
    )


def fp8(block, **more):
    """A case of float8 in DeepSeek's layout."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block, "activation_scheme": "dynamic"}
    block = block or (None, None)
    return (
        config | {"modules_to_not_convert": [f"model.{IGNORED}", "lm_head"]},
        functools.partial(packing.write_fp8, block=block, **more),
        functools.partial(packing.slow_stored, block=block, scale=more.get("name", "weight_scale_inv")),
    )


def awq(group):
    """A case of AWQ's words."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return (
        config | {"modules_to_not_convert": [IGNORED]},
        functools.partial(packing.write_awq, group=group),
        functools.partial(packing.slow_awq, group=group),
    )


def gptq(bits, group, form, symmetric, g_idx):
    """A case of GPTQ's words; the first format may go without a name."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": g_idx == "mixed",
    }
    named = {} if bits == 8 else {"checkpoint_format": form}
    return (
        config | named | {"modules_to_not_convert": [IGNORED], "damp_percent": 0.1, "model_file_base_name": "model"},
        functools.partial(packing.write_gptq, bits=bits, group=group, form=form, symmetric=symmetric, g_idx=g_idx),
        functools.partial(packing.slow_gptq, bits=bits, group=group, form=form),
    )


def float4(form, group):
    """A case of numbers in e2m1."""
    strategy = "tensor_group" if form.startswith("nv") else "group"
    return (
        compressed(form, 4, "float", strategy, True, group_size=group),
        functools.partial(packing.write_float4, group=group),
        functools.partial(packing.slow_float4, group=group),
    )


def nf4(block, nested):
    """A case of bitsandbytes' places in a table."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return config, functools.partial(packing.write_nf4, block=block, nested=nested), packing.slow_nf4


CASES = {
    "nvfp4": float4("nvfp4-pack-quantized", 16),
    "mxfp4": float4("mxfp4-pack-quantized", 32),
    "nf4": nf4(32, True),
    "nf4_across": nf4(64, False),
    "pack4": packs(4, 32, True),
    "pack4_zeros": packs(4, 16, False, kind=np.float16),
    "pack4_rows": packs(4, None, False),
    "pack4_ordered": packs(4, 16, True, ordered=True),
    "pack8": packs(8, 32, True, kind=np.float32),
    "pack3": packs(3, 32, False),
    "pack5": packs(5, None, True),
    "int8": stores("int-quantized", "channel", (1, None)),
    "int8_zeros": stores("int-quantized", "group", [1, 24], symmetric=False),
    "int8_tensor": stores("naive-quantized", "tensor", (None, None)),
    "float8": stores("float-quantized", "channel", (1, None), kind=packing.E4M3),
    "float8_tensor": stores("float-quantized", "tensor", (None, None), kind=packing.E4M3),
    "float8_block": stores("float-quantized", "block", [24, 40], kind=packing.E4M3),
    "fp8": fp8([24, 40]),
    "fp8_powers": fp8([32, 32], kind=ml_dtypes.float8_e8m0fnu),
    "fp8_tensor": fp8(None, kind=ml_dtypes.bfloat16, name="weight_scale"),
    "awq": awq(32),
    "awq_rows": awq(None),
    "gptq4": gptq(4, 32, "gptq", True, "plain"),
    "gptq4_ordered": gptq(4, 16, "gptq", False, "mixed"),
    "gptq4_new": gptq(4, 32, "gptq_v2", False, "absent"),
    "gptq2": gptq(2, 16, "gptq_v2", True, "plain"),
    "gptq3": gptq(3, 32, "gptq", True, "mixed"),
    "gptq8": gptq(8, None, "gptq", False, "plain"),
}


def folder_of(source, to, tensors, config):
    shutil.copytree(source, to)
    said = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
    packing.write_file(to / "model.safetensors", tensors)
    return to


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """`source(config)`: a plain folder of random numbers."""
    done = {}

    def get(config=SMALL):
        if config not in done:
            lm, rng = models.LlamaLM(config), np.random.default_rng(0)
            params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), lm.abstract())
            done[config] = tmp_path_factory.mktemp("plain") / "it"
            models.save(done[config], lm, params)
        return done[config]

    return get


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """`made(case)`: a folder whose linear layers are packed, its tensors, and the numbers that a plain file would have."""
    done = {}

    def get(case, shape=SMALL):
        if (case, shape) not in done:
            config, write, slow = CASES[case]
            plain, rng = source(shape), np.random.default_rng(len(case))
            own, numbers = {}, {}
            for name, array in safetensors.load_file(plain / "model.safetensors").items():
                module = name.removesuffix(".weight")
                numbers[name] = array
                if module.endswith(IGNORED) or "_proj" not in module or array.ndim < 2:
                    own[name] = array
                    continue
                parts = write(rng, array.shape)
                own |= {f"{module}.{part}": x for part, x in parts.items()}
                numbers[name] = slow(parts)
            path = tmp_path_factory.mktemp(case) / case
            done[case, shape] = folder_of(plain, path, own, config), own, numbers
        return done[case, shape]

    return get


def assert_holds(params, numbers):
    """Every parameter, bit for bit."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name, transposed = weights.hf_name(path)
        want = np.asarray(numbers[name]).astype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), want.T if transposed else want, err_msg=name)


RARE = (
    "nf4_across", "pack4_rows", "pack8", "pack3", "pack5", "int8_tensor", "float8_tensor", "fp8_powers", "fp8_tensor",
    "awq_rows", "gptq2", "gptq8", "gptq4_new",
)  # fmt: skip
"""Cases that differ little from others."""


@pytest.mark.parametrize("case", but_slow(CASES, *RARE))
def test_a_folder_is_what_its_format_says(made, case):
    """On a mesh that cuts words and groups too, where a device reads its own part; rounded once to bfloat16."""
    folder, _, numbers = made(case)
    assert_holds(models.load(folder, dtype="bfloat16").params, numbers)
    split = models.load(folder, dtype="float32", mesh=make_mesh("model=4", jax.devices()[:4]))
    down = split.params["layers"][0]["mlp"]["down"]["kernel"]
    assert down.addressable_shards[0].data.shape == (24, 64)
    assert_holds(split.params, numbers)


@pytest.mark.parametrize("case", CASES)
def test_any_box_is_that_of_the_whole(tmp_path, case, monkeypatch):
    """Also by small pieces, and of some rows of it, where a file has one matrix for several."""
    config, write, slow = CASES[case]
    rng = np.random.default_rng(7)
    shape = (96, 160) if case.startswith(("awq", "gptq")) else (70, 144)
    parts = write(rng, shape)
    packing.write_file(tmp_path / "it.safetensors", {f"it.{name}": x for name, x in parts.items()})
    whole, tensor = (
        slow(parts),
        table.unpacked({"quantization_config": config}, read_header(tmp_path / "it.safetensors"))["it.weight"],
    )
    assert tensor.shape == shape == whole.shape
    monkeypatch.setattr(base, "PIECE", 700)
    boxes = [tuple(tuple(sorted(rng.choice(size + 1, 2, replace=False))) for size in shape) for _ in range(8)]
    got = [np.full([b - a for a, b in box], np.nan, np.float32) for box in boxes]
    byte_ranges.fill(tensor, [*zip(boxes, got, strict=True)])
    for box, own in zip(boxes, got, strict=True):
        np.testing.assert_array_equal(own, whole[tuple(slice(*span) for span in box)])
    some = np.empty((9, shape[1]), np.float32)
    byte_ranges.fill(tensor.rows(30, 60), [(((5, 14), (0, shape[1])), some)])
    np.testing.assert_array_equal(some, whole[35:44])


PLAIN = ("pack4_ordered", "gptq4_ordered", "gptq3", "float8_block", "fp8")
"""Cases whose groups are no neighbours, or divide no inputs: nothing of them can be kept as it is packed."""
CUT = ("int8_zeros", "nf4_across")
"""Cases whose groups do not divide the inputs of every matrix: those are made plain."""
ROUNDED = ("nvfp4",)
"""Cases of scales in two levels, one of which is a quotient."""


@pytest.mark.parametrize("case", but_slow(CASES, *(CASES.keys() - {"nvfp4", "nf4", "pack4_zeros", "gptq4", "fp8"})))
def test_packed_weights_stay_packed(made, case):
    """Their codes and scales make the same numbers, on a mesh too."""
    folder, _, numbers = made(case)
    if case in PLAIN:
        with pytest.raises(ModelError, match="no packed matrices that can be kept"):
            models.load(folder, dtype="float32", weights="packed")
        return
    shape = jax.tree.structure(models.load(folder, dtype="float32").params)
    for mesh in (None, make_mesh("model=2", jax.devices()[:2])):
        model = models.load(folder, dtype="float32", weights="packed", mesh=mesh)
        kept = [x for x in jax.tree.leaves(model.params, is_leaf=is_quantised) if is_quantised(x)]
        assert model.weights == "packed" and (len(kept) == 13 or case in CUT)
        unpacked = keeping.unpacked(model.params)
        assert jax.tree.structure(unpacked) == shape
        if case in ROUNDED:
            near = models.load(folder, dtype="float32").params
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-7), unpacked, near)
        else:
            assert_holds(unpacked, numbers)


CHANGED = (  # a flag of a file that is turned alone, and what is said
    ("pack4", {"num_bits": 8}, "weight_packed is I32 .* not I32"),
    ("pack4", {"num_bits": 16}, "num_bits 16 are not read"),
    ("pack4", {"type": "float"}, "in pack-quantized of type 'float'"),
    ("pack4", {"group_size": 64}, r"down_proj.weight_scale is BF16 \[64, 3\], not F32 or F16 or BF16 \[64, 2\]"),
    ("pack4", {"group_size": 0}, "group_size 0 are not read"),
    ("pack4", {"strategy": "channel"}, "weight_scale is"),
    ("pack4", {"strategy": "tensor_group"}, "strategy 'tensor_group' are not read"),
    ("pack4", {"symmetric": False}, "missing .*weight_zero_point I32"),
    ("pack4_zeros", {"symmetric": True}, "unused .*weight_zero_point"),
    ("pack4", {"actorder": "group"}, "missing .*weight_g_idx"),
    ("pack4_ordered", {"actorder": None}, "unused .*weight_g_idx"),
    ("pack4", {"is_mx": True}, "is_mx True are not read"),
    ("pack4", {"format": "int-quantized"}, "missing .*down_proj.weight$"),
    ("pack4", {"format": "nvfp4-pack-quantized"}, "with type 'int' are not read"),
    ("pack4", {"format": "sparse-bitmask"}, "format 'sparse-bitmask' are not read"),
    ("nvfp4", {"format": "mxfp4-pack-quantized"}, "strategy 'tensor_group' are not read"),
    ("nvfp4", {"symmetric": False}, "symmetric False are not read"),
    ("mxfp4", {"group_size": 16}, "group_size 16 are not read"),
    ("nf4", {"load_in_8bit": True}, "bitsandbytes weights of 8 bits are not read"),
    ("pack4", {"format": None}, "format None are not read"),
    ("pack4", {"ignore": ["model.layers.0.mlp.up_proj"]}, "layers.0.mlp.up_proj is packed, but ignore"),
    ("pack4", {"ignore": ["re:("]}, r"quantization_config has 're:\('"),
    ("pack4", {"ignore": "lm_head"}, "ignore must be a list of names, not 'lm_head'"),
    ("pack4", {"targets": ["re:.*mlp.*"]}, "self_attn.*_proj is packed, but no target"),
    ("pack4", {"transform_config": {"r1": {}}}, "transform_config .* are not read"),
    ("pack4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity format 'sparse-24-bitmask'"),
    ("pack4", {"quant_method": "fp6"}, "quant_method 'fp6'; weights are read in float32"),
    ("int8", {"format": "pack-quantized"}, "weight_shape is not two integers"),
    ("int8", {"type": "float"}, "in int-quantized of type 'float'"),
    ("int8", {"strategy": "tensor"}, "weight_scale is"),
    ("float8", {"format": "naive-quantized", "type": "int"}, "weight is F8_E4M3 .* not a matrix in I8"),
    ("float8_block", {"block_structure": [40, 24]}, "weight_scale is"),
    ("float8_block", {"block_structure": 24}, "block_structure 24 are not read"),
    ("fp8", {"weight_block_size": [40, 24]}, r"weight_scale_inv is F32 \[3, 3\], not .* \[2, 4\]"),
    ("fp8", {"weight_block_size": None}, r"weight_scale_inv is F32 \[3, 3\], not .* \[1\]"),
    ("fp8_tensor", {"weight_block_size": [32, 32]}, r"weight_scale is BF16 \[\], not"),
    ("fp8", {"weight_block_size": [0, 24]}, r"weight_block_size \[0, 24\] are not read"),
    ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2' are not read"),
    ("fp8", {"expert_dtype": "fp4"}, "expert_dtype 'fp4' are not read"),
    ("fp8", {"modules_to_not_convert": ["model.layers.1"]}, "layers.1.* is packed, but modules_to_not_convert"),
    ("fp8", {"ignored_layers": ["model.layers.0"]}, "layers.0.* is packed, but ignored_layers"),
    ("awq", {"bits": 8}, "AWQ weights with bits 8 are not read"),
    ("awq", {"zero_point": False}, "zero_point False are not read"),
    ("awq", {"version": "GEMV"}, "version 'gemv' are not read"),
    ("awq", {"backend": "llm-awq"}, "version 'llm-awq' are not read"),
    ("awq", {"group_size": 16}, "qzeros is I32 .*, not I32"),
    ("awq", {"group_size": "all"}, "group_size 'all' are not read"),
    ("awq", {"modules_to_not_convert": ["up_proj"]}, "up_proj is packed, but modules_to_not_convert"),
    ("awq", {"modules_to_not_convert": ["("]}, r"has modules_to_not_convert \['\('\]"),
    ("awq", {"quant_method": "gptq"}, "qzeros is I32 .*, not I32"),
    ("gptq4", {"quant_method": "awq", "zero_point": True}, "qzeros is I32 .*, not I32"),
    ("gptq4", {"bits": 8}, "qzeros is I32 .*, not I32"),
    ("gptq4", {"bits": 5}, "GPTQ weights with bits 5 are not read"),
    ("gptq4", {"group_size": 16}, "qzeros is I32 .*, not I32"),
    ("gptq4", {"checkpoint_format": "gptq_v2"}, "qzeros is not symmetric in checkpoint_format gptq_v2"),
    ("gptq2", {"checkpoint_format": "gptq"}, "qzeros is not symmetric in checkpoint_format gptq,"),
    ("gptq4_ordered", {"sym": True}, "qzeros is not symmetric in checkpoint_format gptq,"),
    ("gptq4_new", {"checkpoint_format": "gptq"}, "qzeros has zero points that did not fit the format gptq"),
    ("gptq4", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' are not read"),
    ("gptq4_new", {"desc_act": True}, "missing .*g_idx I32 or I64"),
    ("gptq4", {"dynamic": {"-:.*mlp.*": {}}}, "dynamic .* are not read"),
)  # fmt: skip


def turned(config, change):
    """A copy with fields set wherever they are."""
    config = copy.deepcopy(config)
    scheme = config.get("config_groups", {}).get("group_0")
    for name, value in change.items():
        within = scheme is not None and (name in scheme["weights"] or name in ("actorder", "is_mx"))
        place = scheme["weights"] if within else scheme if name == "targets" else config
        place[name] = value
    return config


@pytest.mark.parametrize(("case", "change", "said"), CHANGED, ids=lambda one: str(one)[:40])
def test_a_flag_that_is_turned_is_named(made, tmp_path, case, change, said):
    folder, own, _ = made(case)
    with pytest.raises(ModelError, match=said):
        models.load(folder_of(folder, tmp_path / "it", own, turned(CASES[case][0], change)))


def test_tensors_that_are_wrong_are_named(made, tmp_path):
    name = "model.layers.0.self_attn.q_proj"
    for i, (case, part, change, said) in enumerate((
        ("pack4", "weight", np.zeros((64, 64), np.float32), f"{name} has a plain weight beside weight_packed"),
        ("pack4", "weight_shape", np.array([64, 0]), "weight_shape says"),
        ("pack4", "weight_shape", np.array([64.0, 64.0], np.float32), "weight_shape is not two integers"),
        ("pack4", "weight_shape", np.array([64, 60]), "has shape .* config.json says"),
        ("pack4_ordered", "weight_g_idx", np.full(64, 4, np.int32), "names groups from 4 to 4, and there are 4"),
        ("int8", "weight", np.zeros((64, 64), np.float32), f"{name}.weight is F32 .* not a matrix in I8"),
        ("int8", "weight_scale", None, f"{name}.weight has type I8; supported are"),
    )):  # fmt: skip
        folder, own, _ = made(case)
        own = {key: x for key, x in (own | {f"{name}.{part}": change}).items() if x is not None}
        with pytest.raises(ModelError, match=said):
            models.load(folder_of(folder, tmp_path / str(i), own, CASES[case][0]))


def test_what_is_said_of_activations_is_passed_over(made, tmp_path):
    folder, own, numbers = made("float8")
    name = "model.layers.0.self_attn"
    extra = {f"{name}.{part}": np.ones(1, np.float32) for part in ("q_proj.input_scale", "k_scale", "v_scale")}
    assert_holds(models.load(folder_of(folder, tmp_path / "it", own | extra, CASES["float8"][0])).params, numbers)


def test_each_group_of_modules_has_its_own_scheme(source, tmp_path):
    """A name goes before an expression, and that before the class."""
    (words, write, slow), (whole, write_8, slow_8) = CASES["pack4"], CASES["int8"]
    layer = "model.layers.0.mlp."
    groups = [
        copy.deepcopy(one["config_groups"]["group_0"]) | {"format": one["format"]} for one in (words, words, whole)
    ]
    groups[0]["targets"], groups[1]["targets"] = ["Linear"], [f"{layer}up_proj"]
    groups[2]["targets"] = [r"re:.*layers\.0\.mlp\.(gate|up)"]
    config = words | {"format": "mixed-precision", "config_groups": {str(i): one for i, one in enumerate(groups)}}
    rng, own = np.random.default_rng(0), safetensors.load_file(source() / "model.safetensors")
    numbers = dict(own)
    for name, makes, reads in (("gate_proj", write_8, slow_8), ("up_proj", write, slow), ("down_proj", write, slow)):
        parts = makes(rng, own.pop(f"{layer}{name}.weight").shape)
        own |= {f"{layer}{name}.{part}": x for part, x in parts.items()}
        numbers[f"{layer}{name}.weight"] = reads(parts)
    assert_holds(models.load(folder_of(source(), tmp_path / "it", own, config)).params, numbers)


def test_matrices_that_a_file_joins(made):
    """Phi-3's q, k and v, and gate and up, are rows of one packed matrix."""
    shape = changed(SMALL, qkv_bias=False, partial_rotary_factor=0.75)
    folder, own, numbers = made("pack4_zeros", shape)
    assert "model.layers.0.self_attn.qkv_proj.weight_packed" in own
    params = models.load(folder, dtype="float32").params["layers"][0]
    joined = np.concatenate([params["attention"][name]["kernel"] for name in "qkv"], 1)
    np.testing.assert_array_equal(joined.T, numbers["model.layers.0.self_attn.qkv_proj.weight"])
    joined = np.concatenate([params["mlp"][name]["kernel"] for name in ("gate", "up")], 1)
    np.testing.assert_array_equal(joined.T, numbers["model.layers.0.mlp.gate_up_proj.weight"])


def test_experts_each_have_a_matrix(made):
    """Of a layer's experts a parameter holds all."""
    shape = changed(SMALL, qkv_bias=False, qk_norm=True, experts=ExpertsConfig(3, 2, 32))
    folder, own, numbers = made("fp8", shape)
    assert "model.layers.1.mlp.experts.2.down_proj.weight_scale_inv" in own
    experts = models.load(folder, dtype="float32").params["layers"][1]["mlp"]["experts"]
    for name in ("gate", "up", "down"):
        for i, kernel in enumerate(experts[name]["kernel"]):
            np.testing.assert_array_equal(kernel.T, numbers[f"model.layers.1.mlp.experts.{i}.{name}_proj.weight"])


@pytest.mark.parametrize("case", ["pack4_zeros", "gptq4", "awq"])
def test_some_numbers_are_made_at_a_time(tmp_path, case, monkeypatch):
    """Beside the array that is filled there is a small part of it."""
    config, write, _ = CASES[case]
    parts = write(np.random.default_rng(0), (512, 1024))
    packing.write_file(tmp_path / "it.safetensors", {f"it.{name}": x for name, x in parts.items()})
    tensor = table.unpacked({"quantization_config": config}, read_header(tmp_path / "it.safetensors"))["it.weight"]
    monkeypatch.setattr(base, "PIECE", 1 << 14)
    monkeypatch.setattr(byte_ranges, "PIECE", 1 << 14)
    own = np.empty(tensor.shape, np.float32)
    tracemalloc.start()
    byte_ranges.fill(tensor, [(((0, 512), (0, 1024)), own)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1 << 14 < peak < own.nbytes / 4


def test_a_packed_head_is_compared_with_the_table_it_is_tied_to(tmp_path):
    """Where an old file stores both."""
    config, write, slow = CASES["pack4"]
    parts = write(np.random.default_rng(0), (128, 64))
    numbers = slow(parts)
    for i, wrong in enumerate((0, 1)):
        numbers[100, 3] += wrong
        own = {f"it.{name}": x for name, x in parts.items()} | {"that": numbers}
        packing.write_file(tmp_path / str(i), own)
        tensors = table.unpacked({"quantization_config": config}, read_header(tmp_path / str(i)))
        assert byte_ranges.equal(tensors["it.weight"], tensors["that"]) is (not wrong)


def test_published_words():
    """Known ones of AWQ, and of both formats of GPTQ."""
    assert [hex(word) for word in packing.awq_words(np.arange(8)[None])[0]] == ["0x75316420"]
    old, new = (
        packing.write_gptq(np.random.default_rng(0), (32, 32), form=form)["qzeros"] for form in ("gptq", "gptq_v2")
    )
    assert {hex(word) for word in old.ravel()} == {"0x77777777"}
    assert {hex(int(word) % 2**32) for word in new.ravel()} == {"0x88888888"}


def test_transformers_makes_the_same_of_blocks():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    for case in ("fp8_powers", "fp8_tensor"):
        _, write, slow = CASES[case]
        parts = write(np.random.default_rng(3), (64, 96))
        scale = next(x for name, x in parts.items() if name != "weight")
        kind = {"bfloat16": torch.bfloat16, "float8_e8m0fnu": torch.float8_e8m0fnu}[scale.dtype.name]
        scales = torch.from_numpy(scale.reshape(-1, 1).view(np.uint8).copy()).view(kind).reshape(scale.shape)
        weight = torch.from_numpy(parts["weight"].view(np.uint8)).view(torch.float8_e4m3fn)
        got = theirs._dequantize_one(weight, scales, torch.float32)
        np.testing.assert_array_equal(got.numpy(), slow(parts), err_msg=case)


def test_compressed_tensors_makes_the_same_of_it():
    """Its own unpacker, where it is installed; products are rounded to the type of scales there."""
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for case in (
        "pack4",
        "pack4_zeros",
        "pack4_rows",
        "pack8",
        "pack3",
        "pack5",
        "int8",
        "float8",
        "float8_tensor",
        "nvfp4",
        "mxfp4",
    ):
        config, write, slow = CASES[case]
        parts, group = write(np.random.default_rng(3), (64, 96)), config["config_groups"]["group_0"]

        def torched(array):
            kind = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}.get(array.dtype.name)
            raw = array if kind is None else array.view(f"i{array.dtype.itemsize}")
            own = torch.from_numpy(raw.copy())
            return own if kind is None else own.view(kind)

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
        known = BaseCompressor.get_value_from_registry(config["format"])
        got = known.decompress({name: torched(x) for name, x in parts.items()}, scheme)["weight"]
        if case in ("nvfp4", "mxfp4"):  # made in bfloat16 there
            np.testing.assert_allclose(got.float().numpy(), slow(parts), rtol=2**-7, err_msg=case)
            continue
        want = slow(parts).astype(parts["weight_scale"].dtype)
        np.testing.assert_array_equal(got.float().numpy(), want.astype(np.float32), err_msg=case)


def test_the_part_with_the_text_says_it_too():
    (config, *_), said = CASES["pack4"], {"quant_method": "gguf"}
    text = {"model_type": "gemma3_text", "vocab_size": 96}
    assert table.found({"text_config": {"quantization_config": config}}) is not None
    with pytest.raises(ModelError, match="quant_method 'gguf'"):
        hf_config.from_hf({"model_type": "gemma3", "text_config": text | {"quantization_config": said}})
