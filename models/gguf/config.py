"""The metadata of a GGUF file as the `config.json` of its family; missing values are llama.cpp's by architecture."""

from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import FULL, SLIDING, shown
from specjax.models.gguf import ropes
from specjax.models.gguf.header import Header
from specjax.models.gguf.keys import Fields

ROOM = 8192
"""The number of positions if a file does not state it."""


def config(header: Header) -> dict[str, Any]:
    """The fields of a `config.json`.

    Raises:
      ModelError: on an unsupported architecture, and on missing or unsupported fields.
    """
    own = _ARCHITECTURES.get(header.architecture)
    if own is None:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{header.file} has the architecture {shown(header.architecture)}; supported are {known}")
    fields = Fields(header)
    _check_known(fields)
    shared = _shared(fields)
    return shared | ropes.read(fields, shared) | own(fields, shared)


def _shared(fields: Fields) -> dict[str, Any]:
    header = fields.header
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{header.file} has no token_embd.weight: it holds no whole language model")
    heads, width = fields.size("attention.head_count"), fields.size("embedding_length")
    head = fields.size("attention.key_length", max(1, width // heads))
    if (value := fields.size("attention.value_length", head)) != head:
        raise ModelError(f"{header.file}: heads have keys of {head} numbers and values of {value}, which is not read")
    return {
        "vocab_size": table.shape[0], "hidden_size": width, "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": fields.size("attention.head_count_kv", heads), "head_dim": head,
        "max_position_embeddings": fields.size("context_length", ROOM),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not fields.has("output.weight"),
    }  # fmt: skip


_COMMON = {
    *"""
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count attention.head_count_kv
    attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    """.split(),
    *ropes.KEYS,
}
_WINDOWS = "attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa "
_EXPERTS = "expert_count expert_used_count expert_feed_forward_length "
_OWN = {
    "llama": _EXPERTS + "attention.sliding_window",
    "qwen3moe": _EXPERTS,
    "gemma2": _WINDOWS + "attn_logit_softcapping final_logit_softcapping",
    "gemma3": _WINDOWS + "final_logit_softcapping",
    "phi3": "attention.sliding_window",
    "granite": "attention.scale embedding_scale residual_scale logit_scale",
    "olmo2": _WINDOWS,
    "glm4moe": _EXPERTS + """
        expert_shared_count expert_weights_scale expert_weights_norm expert_gating_func expert_group_count
        expert_group_used_count leading_dense_block_count nextn_predict_layers
    """,
    "gpt-oss": _EXPERTS + _WINDOWS,
}  # fmt: skip
"""Keys of some architectures, beyond the common ones."""
_IDLE: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "rope.scaling.finetuned": (True, False), "use_parallel_residual": (False,),
    "attention.layer_norm_epsilon": (), "tensor_data_layout": (), "expert_shared_feed_forward_length": (),
    "expert_gating_func": (1,), "expert_weights_scale": (1.0,), "interleave_moe_layer_step": (1,),
}  # fmt: skip
"""Keys that do not change the computation, with the values for which that holds; empty: for all values."""


def _check_known(fields: Fields) -> None:
    """Raises ModelError on keys of the architecture that are not supported; a value of 0 means off."""
    architecture = fields.header.architecture
    read = _COMMON | {*_OWN.get(architecture, "").split()}
    for key, value in fields.header.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        off = value == 0 and not isinstance(value, bool)
        if name == key or name in read or off or (name in _IDLE and (not _IDLE[name] or value in _IDLE[name])):
            continue
        raise ModelError(f"{fields.header.file}: {key} is {shown(value)}, which is not read: texts might differ")


def _named(architecture: str, kind: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind}


def _llama(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """Llama, Mistral and, with experts, Mixtral. llama.cpp's converter does not store the window of Mistral's first
    model."""
    width, window = fields.size("feed_forward_length"), fields.get("attention.sliding_window") or None
    if fields.get("expert_count"):
        return _named("MixtralForCausalLM", "mixtral") | {
            "intermediate_size": fields.size("expert_feed_forward_length", width), "sliding_window": window,
            "num_local_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count"),
        }  # fmt: skip
    if window is not None:
        return _named("MistralForCausalLM", "mistral") | {"intermediate_size": width, "sliding_window": window}
    biases = {"attention_bias": fields.has("blk.0.attn_q.bias"), "mlp_bias": fields.has("blk.0.ffn_gate.bias")}
    return _named("LlamaForCausalLM", "llama") | biases | {"intermediate_size": width}


def _qwen2(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    return _named("Qwen2ForCausalLM", "qwen2") | {
        "intermediate_size": fields.size("feed_forward_length"), "use_sliding_window": False,
    }  # fmt: skip


def _qwen3(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    return _named("Qwen3ForCausalLM", "qwen3") | {
        "intermediate_size": fields.size("feed_forward_length"), "use_sliding_window": False,
        "attention_bias": fields.has("blk.0.attn_q.bias"),
    }  # fmt: skip


def _qwen3moe(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-MoE: weights of experts are divided by their sum, which files do not state."""
    width = fields.size("expert_feed_forward_length")
    return _named("Qwen3MoeForCausalLM", "qwen3_moe") | {
        "intermediate_size": fields.size("feed_forward_length", width), "moe_intermediate_size": width,
        "num_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count"),
        "norm_topk_prob": True, "use_sliding_window": False,
        "mlp_only_layers": [i for i in range(shared["num_hidden_layers"]) if fields.has(f"blk.{i}.ffn_gate.weight")],
    }  # fmt: skip


def _types(fields: Fields, layers: int, every: int) -> list[str]:
    """The layers with a window: if a file names a period, all layers of it except the last."""
    pattern = fields.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        windowed = [bool(one) for one in pattern]
    else:
        every = fields.size("attention.sliding_window_pattern", every)
        windowed = [i % every < every - 1 for i in range(layers)]
    if len(windowed) < layers:
        raise ModelError(
            f"{fields.header.file}: attention.sliding_window_pattern has {len(windowed)} of {layers} layers"
        )
    return [SLIDING if one else FULL for one in windowed[:layers]]


def _gemma(fields: Fields, shared: dict[str, Any], biggest: int, every: int, usual: int) -> dict[str, Any]:
    """Gemma: the scale of queries follows the width of a head, except in the largest model of each generation."""
    layers, heads = shared["num_hidden_layers"], shared["num_attention_heads"]
    window = fields.get("attention.sliding_window", usual)
    scaled = shared["hidden_size"] // heads if layers == biggest else shared["head_dim"]
    return {
        "intermediate_size": fields.size("feed_forward_length"), "query_pre_attn_scalar": scaled,
        "sliding_window": fields.size("attention.sliding_window", usual) if window else None,
        "layer_types": _types(fields, layers, every) if window else [FULL] * layers,
        "final_logit_softcapping": fields.get("final_logit_softcapping") or None,
    }  # fmt: skip


def _gemma2(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    own = _gemma(fields, shared, 46, 2, 4096)
    caps = {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }
    return _named("Gemma2ForCausalLM", "gemma2") | own | caps


def _gemma3(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    near = {"rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0)}
    return _named("Gemma3ForCausalLM", "gemma3_text") | _gemma(fields, shared, 62, 6, 0) | near


def _phi3(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    return _named("Phi3ForCausalLM", "phi3") | {
        "intermediate_size": fields.size("feed_forward_length"),
        "sliding_window": fields.get("attention.sliding_window") or None,
        "original_max_position_embeddings": fields.size(
            "rope.scaling.original_context_length", shared["max_position_embeddings"]
        ),
    }  # fmt: skip


def _granite(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    if fields.get("expert_count"):
        raise ModelError(f"{fields.header.file}: a Granite with experts is not read")
    return _named("GraniteForCausalLM", "granite") | {
        "intermediate_size": fields.size("feed_forward_length"),
        "attention_multiplier": fields.number("attention.scale", shared["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0), "logits_scaling": fields.number("logit_scale", 1.0),
        "attention_bias": fields.has("blk.0.attn_q.bias"), "mlp_bias": fields.has("blk.0.ffn_gate.bias"),
    }  # fmt: skip


def _olmo2(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """OLMo 2 and, with a window, OLMo 3."""
    own = {"intermediate_size": fields.size("feed_forward_length"), "attention_bias": fields.has("blk.0.attn_q.bias")}
    if not fields.get("attention.sliding_window"):
        return _named("Olmo2ForCausalLM", "olmo2") | own
    near = fields.number("rope.freq_base_swa", fields.number("rope.freq_base", 10000.0))
    return _named("Olmo3ForCausalLM", "olmo3") | own | {
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": _types(fields, shared["num_hidden_layers"], 4),
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": near}},
    }  # fmt: skip


def _smollm3(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    return _named("SmolLM3ForCausalLM", "smollm3") | {
        "intermediate_size": fields.size("feed_forward_length"), "no_rope_layer_interval": 4, "use_sliding_window": False,
        "attention_bias": fields.has("blk.0.attn_q.bias"), "mlp_bias": fields.has("blk.0.ffn_gate.bias"),
    }  # fmt: skip


def _glm4moe(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    if fields.get("expert_gating_func", 2) not in (0, 2):
        raise ModelError(f"{fields.header.file}: experts are not chosen by sigmoids, as they are in GLM-4.5")
    extra = fields.get("nextn_predict_layers", 0)
    layers = shared["num_hidden_layers"] - extra
    return _named("Glm4MoeForCausalLM", "glm4_moe") | {
        "num_hidden_layers": layers, "num_nextn_predict_layers": extra,
        "intermediate_size": fields.size("feed_forward_length"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "n_routed_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count"),
        "n_shared_experts": fields.get("expert_shared_count", 0), "n_group": fields.get("expert_group_count") or 1,
        "topk_group": fields.get("expert_group_used_count") or 1,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": fields.get("expert_weights_norm", False),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "use_qk_norm": fields.has("blk.0.attn_q_norm.weight"), "attention_bias": fields.has("blk.0.attn_q.bias"),
    }  # fmt: skip


def _gpt_oss(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    window = fields.get("attention.sliding_window", 0)
    layers = shared["num_hidden_layers"]
    return _named("GptOssForCausalLM", "gpt_oss") | {
        "intermediate_size": fields.size("expert_feed_forward_length"), "num_local_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"), "attention_bias": True, "sliding_window": window or None,
        "layer_types": _types(fields, layers, 2) if window else [FULL] * layers,
    }  # fmt: skip


_ARCHITECTURES: dict[str, Callable[[Fields, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "gemma2": _gemma2, "gemma3": _gemma3,
    "phi3": _phi3, "granite": _granite, "olmo2": _olmo2, "smollm3": _smollm3, "glm4moe": _glm4moe, "gpt-oss": _gpt_oss,
}  # fmt: skip
ARCHITECTURES = tuple(_ARCHITECTURES)
"""The supported architectures, by `general.architecture`."""
