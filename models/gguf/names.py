"""Tensors of GGUF files under the Hugging Face names of their family."""

import re

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OLD_EXPERT = re.compile(r"(ffn_gate|ffn_up|ffn_down)\.(\d+)")
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become part of the configuration."""

_LLAMA = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = _LLAMA | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_MODULES: dict[str, dict[str, str]] = {
    "mixtral": _LLAMA | {
        "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3_moe": _LLAMA | _EXPERTS,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "olmo2": _LLAMA | _POST_NORMS,
    "olmo3": _LLAMA | _POST_NORMS,
    "glm4_moe": _LLAMA | _EXPERTS | {
        "post_attention_norm": "post_attention_layernorm", "exp_probs_b": "mlp.gate.e_score_correction_bias",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "gpt_oss": _LLAMA | {
        "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps": "mlp.experts.gate_up_proj#0", "ffn_up_exps": "mlp.experts.gate_up_proj#1",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
}  # fmt: skip
"""Names of a layer's modules by `model_type`; model types not listed here have Llama's names."""
_BARE = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")
"""Names without `.weight` or `.bias`."""

INTERLEAVED = ("llama", "mistral", "mixtral", "granite", "smollm3")
"""Model types whose files have the rows of q and k in the order of llama.cpp's first rope: two rows that are rotated
together are adjacent. In a Hugging Face folder they are half a head apart."""
PLUS_ONE = ("gemma2", "gemma3_text")
"""Model types whose files store the norms' weights plus 1."""


def hf_name(name: str, kind: str) -> tuple[str, int | None]:
    """The Hugging Face name of a file's tensor, and its layer.

    A name with `{}` stands for one tensor per index of the first axis (experts). A name with `#0` or `#1` stands for
    every second output of a tensor that consists of two of the file's. Unknown tensors keep their names.

    Args:
      name: its name in the file.
      kind: the `model_type`.

    >>> hf_name("blk.3.ffn_up.weight", "llama")
    ('model.layers.3.mlp.up_proj.weight', 3)
    >>> hf_name("blk.3.ffn_up.5.weight", "mixtral")  # as old files have experts
    ('model.layers.3.block_sparse_moe.experts.5.w3.weight', 3)
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        module, _, part = name.rpartition(".")
        return (f"{_OUTSIDE[module]}.{part}", None) if module in _OUTSIDE else (name, None)
    layer, module, part = found.groups()
    modules = _MODULES.get(kind, _LLAMA)
    old = _OLD_EXPERT.fullmatch(module)
    ours = modules.get(module) if old is None else modules.get(f"{old[1]}_exps", "").format(old[2])
    if not ours:
        return name, int(layer)
    whole = f"model.layers.{layer}.{ours}"
    if ours in _BARE:
        return whole, int(layer)
    if kind == "gpt_oss" and "experts" in ours:
        before, mark, place = whole.partition("#")
        return f"{before}{'' if part == 'weight' else '_bias'}{mark}{place}", int(layer)
    return f"{whole}.{part}", int(layer)
