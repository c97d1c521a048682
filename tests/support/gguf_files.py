"""GGUF files of small models with random weights, written by llama.cpp's own package: names, order of rows and keys are those
that its conversion gives to a Hugging Face model of each architecture."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "rope_theta": 500.0,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 96,
}  # fmt: skip
GEMMA = {
    "head_dim": 24, "sliding_window": 7, "attn_implementation": "eager", "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}  # fmt: skip
PHI3 = {
    "sliding_window": 8, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 1,  # long factors for all texts
    "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.1, 1.3, 1.9, 2.5, 4.0, 5.5],
        "rope_theta": 100.0, "attention_factor": 1.2,
    },
}  # fmt: skip
GLM = {
    "head_dim": 12, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.11,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: its class in transformers, its architecture in files, its configuration, and keys beyond those all have."""

    kind: str
    architecture: str
    options: dict[str, Any]
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)


def _yarn(rope):
    return {
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }  # fmt: skip


CASES = {
    "llama": Case("Llama", "llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama_biases": Case(
        "Llama", "llama",
        {
            "attention_bias": True, "mlp_bias": True, "head_dim": 24,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        },
        {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    ),
    "mistral": Case("Mistral", "llama", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "mixtral": Case(
        "Mixtral", "llama", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 5, "expert_used_count": 2},
    ),
    "qwen2": Case(
        "Qwen2", "qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 500.0}}, _yarn(YARN)
    ),
    "qwen3": Case("Qwen3", "qwen3", {"head_dim": 32}),
    "qwen3moe": Case(
        "Qwen3Moe", "qwen3moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16,
            "num_hidden_layers": 2,
        },
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24},
    ),
    "gemma2": Case(
        "Gemma2", "gemma2", GEMMA | {"num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 7},
    ),
    "gemma3": Case(
        "Gemma3Text", "gemma3",
        GEMMA | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
            },
        },
        {"attention.sliding_window": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    ),
    "phi3": Case(
        "Phi3", "phi3", PHI3,
        {
            "rope.dimension_count": 12, "attention.sliding_window": 8, "rope.scaling.original_context_length": 1,
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "granite": Case(
        "Granite", "granite", MULTIPLIERS | {"tie_word_embeddings": True},
        {"embedding_scale": 3.0, "logit_scale": 2.5, "residual_scale": 0.4, "attention.scale": 0.11},
    ),
    "olmo2": Case("Olmo2", "olmo2", {}),
    "olmo3": Case(
        "Olmo3", "olmo2",
        {
            "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 7,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 100.0}, FULL: YARN | {"rope_theta": 500.0},
            },
        },
        {
            "attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 100.0,
        } | _yarn(YARN),
    ),
    "smollm3": Case("SmolLM3", "smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "glm4moe": Case(
        "Glm4Moe", "glm4moe", GLM,
        {
            "block_count": 4, "nextn_predict_layers": 1, "expert_count": 8, "expert_used_count": 3,
            "expert_feed_forward_length": 20, "expert_shared_count": 2, "leading_dense_block_count": 1,
            "expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_group_count": 4,
            "expert_group_used_count": 2, "rope.dimension_count": 6,
        },
    ),
    "gpt-oss": Case(
        "GptOss", "gpt-oss",
        {
            "num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
            "rope_parameters": YARN | {"rope_theta": 500.0, "truncate": False}, "attn_implementation": "eager",
        },
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "attention.sliding_window": 7,
        } | _yarn(YARN),
    ),
}  # fmt: skip
PERMUTED = ("llama", "granite", "smollm3")


def build(name: str, folder: Path) -> Any:
    """A model of transformers with random weights, norms and biases too, saved in a folder."""
    import torch
    import transformers

    case = CASES[name]
    config = getattr(transformers, f"{case.kind}Config")(**(SIZES | case.options))
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{case.kind.removesuffix('Text')}ForCausalLM")(config).eval()
    around = 0.0 if case.kind in ("Gemma2", "Gemma3Text") else 1.0
    with torch.no_grad():
        for parameter, tensor in (*model.named_parameters(), *model.named_buffers()):
            if parameter in model.state_dict() and (tensor.ndim == 1 or parameter.endswith("bias")):
                tensor.normal_(around if parameter.endswith("norm.weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    return model


def write(name: str, folder: Path, file: Path, kind: str = "F32", **more: Any) -> None:
    """Writes the model of a folder.

    Args:
      name: of the case.
      folder: that `build` wrote.
      file: to write.
      kind: in which matrices are stored whose rows it divides; all else is float32.
      **more: of the writer, such as `split_max_tensors`.
    """
    import gguf

    case, config = CASES[name], _config(folder)
    writer = gguf.GGUFWriter(file, case.architecture, **more)
    for key, value in (_keys(case, config) | case.keys).items():
        _add(writer, f"{case.architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    for tensor, numbers in tensors(name, folder).items():
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        narrow = tensor.endswith(".weight") and numbers.ndim > 1 and numbers.shape[-1] % block == 0
        own = gguf.GGMLQuantizationType[kind if narrow else "F32"]
        writer.add_tensor(tensor, gguf.quants.quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _config(folder):
    import json

    return json.loads((folder / "config.json").read_text())


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)


def _keys(case, config):
    """Those that all files have; the base of layers without a window, where there are two."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get(FULL, rope)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head, "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": rope["rope_theta"],
    }  # fmt: skip


def tensors(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The tensors that a file of the model has."""
    import gguf
    from safetensors.numpy import load_file

    case, config, stored = CASES[name], _config(folder), load_file(folder / "model.safetensors")
    architecture = next(arch for arch, said in gguf.MODEL_ARCH_NAMES.items() if said == case.architecture)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for tensor, numbers in _joined(stored).items():
        tensor = tensor.replace("e_score_correction_bias", "e_score_correction.bias")
        if case.kind == "GptOss" and ".experts." in tensor:
            found |= _gpt_oss(tensor, numbers)
            continue
        if tensor.endswith("sinks"):
            tensor += ".weight"
        if case.architecture in PERMUTED and re.search(r"[qk]_proj\.", tensor):
            numbers = _permuted(numbers, config["num_attention_heads" if "q_proj" in tensor else "num_key_value_heads"])
        if case.kind in ("Gemma2", "Gemma3Text") and tensor.endswith("norm.weight"):
            numbers = numbers + 1
        found[names.get_name(tensor, (".weight", ".bias"))] = numbers
    found |= _ropes(case, config)
    if name == "glm4moe":  # a layer that drafts
        found["blk.3.attn_norm.weight"] = found["blk.3.nextn.eh_proj.weight"] = np.ones(64, np.float32)
    return found


def _joined(stored):
    """Experts of a layer as one tensor."""
    found, experts = {}, {}
    for name, numbers in stored.items():
        part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if part is None:
            found[name] = numbers
        else:
            experts.setdefault(f"{part[1]}.{part[3]}", {})[int(part[2])] = numbers
    return found | {name: np.stack([own[i] for i in range(len(own))]) for name, own in experts.items()}


def _permuted(numbers, heads):
    """In every head the rows of its halves take turns."""
    return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def _gpt_oss(name, numbers):
    block, part = re.search(r"layers\.(\d+)\.mlp\.experts\.(.*)", name).groups()
    kind = "bias" if part.endswith("_bias") else "weight"
    numbers = np.ascontiguousarray(numbers if kind == "bias" else numbers.swapaxes(1, 2))
    if part.startswith("down"):
        return {f"blk.{block}.ffn_down_exps.{kind}": numbers}
    halves = {"gate": numbers[:, ::2], "up": numbers[:, 1::2]}
    return {f"blk.{block}.ffn_{half}_exps.{kind}": np.ascontiguousarray(own) for half, own in halves.items()}


def _ropes(case, config):
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    width, original = config["head_dim"], rope["original_max_position_embeddings"]
    divisors = []
    for frequency in 1 / rope["rope_theta"] ** (np.arange(0, width, 2) / width):
        wavelength, low, high = 2 * math.pi / frequency, rope["low_freq_factor"], rope["high_freq_factor"]
        part = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - part) / rope["factor"] + part)
        divisors.append(
            1 if wavelength < original / high else rope["factor"] if wavelength > original / low else between
        )
    return {"rope_freqs.weight": np.array(divisors, np.float32)}
