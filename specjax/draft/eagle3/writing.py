"""EAGLE-3 heads as other engines read them: the flat layout of SafeAILab and SpecForge, and speculators' layout.

The readers' rules, from their code of 2026:

- vLLM counts layers by the boundaries at which they begin, and looks at the top level of `config.json` before
  `eagle_config`.
- SGLang looks only at `eagle_config`, where ids that begin with 1 are outputs and others boundaries. It always needs
  `draft_vocab_size` and `lm_head.weight`.
- Both have a single switch for the biases of all four projections, so missing biases are written as zeros.
- vLLM treats a missing `norm_before_residual` of speculators as true.
"""

import dataclasses
import os
from typing import Any

import numpy as np

from specjax.draft.eagle3 import Eagle3
from specjax.draft.head import head_kernel
from specjax.draft.heads.files import write_files
from specjax.draft.heads.layout import FAMILIES
from specjax.draft.heads.taps import IDS
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.hf_config import to_hf
from specjax.models.model import resolve_dtype
from specjax.models.model_config import HeadConfig, ModelConfig
from specjax.sharding.distributed import to_host

FORMATS = ("eagle3", "speculators")
_ROWS = 8192  # rows of the target's embedding that are read at a time
_ATTENTION, _MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write_head(
    folder: str | os.PathLike[str], layout: str, drafter: Eagle3, params: Any, target: Any, dtype: Any = None
) -> tuple[str, ...]:
    """Writes a head as `config.json` and `model.safetensors`; older ones in the folder are replaced.

    Args:
      folder: created if needed.
      layout: one of `FORMATS`.
      drafter: bound to its target.
      params: its own.
      target: from `specjax.models.load`.
      dtype: the type to write; None keeps the parameters' own.

    Returns:
      What other engines may not do with it, one sentence each.

    Raises:
      ModelError: for layers that no configuration of the family can describe.
    """
    kind = resolve_dtype(params["fc"]["kernel"].dtype if dtype is None else dtype)
    host = to_host(params)
    kernel = host["head"]["kernel"] if "head" in host else to_host(head_kernel(target.lm, target.params))
    tensors = _tensors(host, drafter, "midlayer" if layout == "eagle3" else "layers.0")
    tensors["lm_head.weight"] = np.asarray(kernel).T
    if "embed" in host or layout == "speculators":
        tensors["embed_tokens.weight"] = host["embed"]["embedding"] if "embed" in host else _table(target)
    cast = lambda x: np.ascontiguousarray(np.asarray(x).astype(kind))
    written = {name: cast(x) for name, x in tensors.items()}
    written |= _vocabulary(host.get("ids"), target.lm.vocab_size)
    describe = _flat if layout == "eagle3" else _speculators
    config = describe(drafter, target, kernel.shape[1], "embed" in host)
    config["torch_dtype" if layout == "eagle3" else "dtype"] = kind.name
    write_files(folder, config, written)
    return _notes(layout, drafter)


def _tensors(params: Any, drafter: Eagle3, first: str) -> dict[str, Any]:
    """All tensors except those of the vocabulary; `first` is the first layer's name."""
    biased = drafter.config.near.qkv_bias or drafter.config.near.o_bias
    tensors = {
        "fc.weight": params["fc"]["kernel"].T,
        "norm.weight": params["norm"]["scale"],
        f"{first}.input_layernorm.weight": params["input_norm"]["scale"],
        f"{first}.hidden_norm.weight": params["hidden_norm"]["scale"],
        **_layer(first, params, biased),
    }
    for i, layer in _items(params.get("more")):
        tensors[f"layers.{i + 1}.input_layernorm.weight"] = layer["attention_norm"]["scale"]
        tensors |= _layer(f"layers.{i + 1}", layer, biased)
    if "fc_norm" in params:
        tensors["input_norm.weight"] = params["fc_norm"]["scale"]
    return tensors | {f"fc_norm.{j}.weight": norm["scale"] for j, norm in _items(params.get("tap_norms"))}


def _layer(at: str, layer: Any, biased: bool) -> dict[str, Any]:
    """A decoder layer without its norms before attention."""
    attention, tensors = layer["attention"], {f"{at}.post_attention_layernorm.weight": layer["mlp_norm"]["scale"]}
    for name in _ATTENTION:
        kernel = attention[name]["kernel"]
        tensors[f"{at}.self_attn.{name}_proj.weight"] = kernel.T
        if biased:
            tensors[f"{at}.self_attn.{name}_proj.bias"] = attention[name].get("bias", np.zeros(kernel.shape[1]))
    for name in ("q_norm", "k_norm"):
        if name in attention:
            tensors[f"{at}.self_attn.{name}.weight"] = attention[name]["scale"]
    for name in _MLP:
        tensors[f"{at}.mlp.{name}_proj.weight"] = layer["mlp"][name]["kernel"].T
        if "bias" in layer["mlp"][name]:
            tensors[f"{at}.mlp.{name}_proj.bias"] = layer["mlp"][name]["bias"]
    return tensors


def _items(modules: Any) -> list[tuple[int, Any]]:
    """The entry of a list of modules, or of the dict by number into which flax turns one."""
    if isinstance(modules, dict):
        return sorted((int(i), module) for i, module in modules.items())
    return list(enumerate(modules or ()))


def _vocabulary(ids: Any, vocab: int) -> dict[str, np.ndarray]:
    """The map between the draft's ids and the target's: offsets, and a mask. None if the head knows all tokens."""
    if ids is None:
        return {}
    ids = np.asarray(ids, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}


def _table(target: Any) -> np.ndarray:
    """`[V, E]`, the target's embedding."""
    vocab = target.lm.vocab_size
    blocks = (np.arange(first, min(first + _ROWS, vocab), dtype=np.int32) for first in range(0, vocab, _ROWS))
    return np.concatenate([to_host(target.lm.embed(target.params, ids[None])[0]) for ids in blocks])


def _layers(config: ModelConfig) -> dict[str, Any]:
    """The fields of a head's layers, with windows as `layer_types`."""
    biased = config.near.qkv_bias or config.near.o_bias
    plain = config.every(AttentionConfig, qkv_bias=biased, o_bias=biased, window=None).every(HeadConfig, tied=False)
    fields = to_hf(dataclasses.replace(plain, family=""))
    if fields["model_type"] not in FAMILIES:
        raise ModelError(
            f"a head is written with layers of {', '.join(FAMILIES)}, and these are {fields['model_type']}'s: "
            "their rope or their logits are not those"
        )
    windows = [config.window(i) for i in range(config.num_hidden_layers)]
    if any(windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        fields |= {"layer_types": kinds, "sliding_window": config.near.window, "use_sliding_window": True}
    return fields


def _flat(drafter: Eagle3, target: Any, tokens: int, own_table: bool) -> dict[str, Any]:
    boundaries = [tap + 1 for tap in drafter.taps]
    fields = {
        **_layers(drafter.config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": tokens,
        IDS: boundaries,
        "eagle_config": {
            IDS: list(drafter.taps) if drafter.taps[0] == 1 else boundaries,
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": drafter.norm_before_residual,
        **{flag: True for flag in _FLAGS if getattr(drafter, flag)},  # some readers know a flag only by its name
    }
    wide = target.lm.config.hidden_size
    return fields if wide == drafter.config.hidden_size else {**fields, "target_hidden_size": wide}


def _speculators(drafter: Eagle3, target: Any, tokens: int, own_table: bool) -> dict[str, Any]:
    layer = _layers(drafter.config)
    del layer["architectures"]
    wide = target.lm.config.hidden_size
    ahead = drafter.depth if drafter.is_chain else 3
    greedy = {"proposal_type": "greedy", "speculative_tokens": ahead, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": target.name, "architectures": to_hf(target.lm.config)["architectures"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": tokens,
        IDS: [tap + 1 for tap in drafter.taps],
        **{flag: getattr(drafter, flag) for flag in _FLAGS},
        "target_hidden_size": None if wide == drafter.config.hidden_size else wide,
        "embed_requires_grad": own_table,
        "tie_word_embeddings": False,
    }


def _notes(layout: str, drafter: Eagle3) -> tuple[str, ...]:
    notes = []
    if len(drafter.taps) != 3:
        notes.append(f"it reads {len(drafter.taps)} of the target's layers, and vLLM and SGLang read three")
    if layout == "eagle3" and drafter.taps[0] == 0:
        notes.append("SGLang cannot be told to read the output of layer 0: it will read the layers after those meant")
    if drafter.config.num_hidden_layers > 1:
        notes.append(f"it has {drafter.config.num_hidden_layers} layers, and SGLang has another rule after the first")
    if drafter.config.near.qk_norm is not None:
        notes.append("its attention norms queries and keys, which the layers that vLLM and SGLang give EAGLE-3 do not")
    return tuple(notes)
