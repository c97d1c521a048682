"""Files of heads as the code that publishes them writes them: names, shapes and types, over small random numbers."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from support.conformance import CONFIG, TARGET, params

import specjax

E, V, F, KV = CONFIG.hidden_size, CONFIG.vocab_size, CONFIG.dense.intermediate_size, 32
BF16 = np.dtype(ml_dtypes.bfloat16)


def toy(lm: Any = TARGET, own: Any = None) -> specjax.models.Model:
    """The conformance table's target as `specjax.models.load` would return it."""
    return specjax.models.Model(
        lm, params()["target"] if own is None else own, None, (), "toy", None, np.dtype("float32")
    )


def draw(seed: int, shapes: dict[str, tuple[int, ...]], dtype: Any = BF16) -> dict[str, np.ndarray]:
    """Random tensors; norms are around 1, as trained ones are."""
    rng = np.random.default_rng(seed)
    made = {name: 0.05 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: (x + ("norm" in name)).astype(dtype) for name, x in made.items()}


def decoder_layer(at: str, inputs: int, width: int = E) -> dict[str, tuple[int, ...]]:
    """A Llama layer's tensors but for the norms before attention."""
    attention = {"q": (E, inputs), "k": (KV, inputs), "v": (KV, inputs), "o": (width, E)}
    mlp = {"gate": (F, width), "up": (F, width), "down": (width, F)}
    shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    return {f"{at}.{name}": shape for name, shape in {**shapes, "post_attention_layernorm.weight": (width,)}.items()}


def llama(width: int = E, **more: Any) -> dict[str, Any]:
    """Fields of a draft layer that transformers' LlamaConfig writes."""
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": F, "vocab_size": V, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
        "initializer_range": 0.02, "pretraining_tp": 1, "rope_theta": 10000.0, "rope_scaling": None, "use_cache": True,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def vocabulary(count: int) -> dict[str, np.ndarray]:
    """`d2t`, offsets, and `t2d`, a mask, of every other token from 5 on."""
    ids = np.arange(count) * 2 + 5
    return {"d2t": (ids - np.arange(count)).astype(np.int64), "t2d": np.isin(np.arange(V), ids)}


def specforge(width: int = E, taps: int = 3, target: int | None = None, **config: Any):
    """SpecForge's EAGLE-3, which has SafeAILab's names: `midlayer`, a map of the vocabulary, no embeddings.

    Returns:
      The `config.json` and the tensors.
    """
    shapes = {"fc.weight": (width, taps * (target or width)), "norm.weight": (width,), "lm_head.weight": (40, width)}
    shapes |= decoder_layer("midlayer", 2 * width, width)
    shapes |= {f"midlayer.{norm}.weight": (width,) for norm in ("hidden_norm", "input_layernorm")}
    own = llama(width, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, torch_dtype="bfloat16")
    return {**own, **config}, {**draw(4, shapes), **vocabulary(40)}


def speculators(layer: dict[str, Any] | None = None, seed: int = 6, count: int = 40, **config: Any):
    """speculators' EAGLE-3: its layer's config nested, `layers.0`, always a table of embeddings, `input_norm` or `fc_norm`.

    Args:
      layer: more fields of the `transformer_layer_config`.
      seed: of the tensors.
      count: draft tokens; where that is the target's vocabulary there is no map.
      **config: more flags.

    Returns:
      The `config.json` and the tensors. The table is not the target's: `with_table` puts that there.
    """
    nested = llama(**(layer or {}))
    shapes = {"fc.weight": (E, 3 * E), "norm.weight": (E,), "lm_head.weight": (count, E), "embed_tokens.weight": (V, E)}
    shapes |= decoder_layer("layers.0", 2 * E)
    shapes |= {f"layers.0.{norm}.weight": (E,) for norm in ("hidden_norm", "input_layernorm")}
    for i in range(1, nested["num_hidden_layers"]):  # ordinary layers, which have no hidden_norm
        shapes |= {**decoder_layer(f"layers.{i}", E), f"layers.{i}.input_layernorm.weight": (E,)}
    attention = "layers.0.self_attn"
    if nested["attention_bias"]:
        widths = {"q": E, "k": KV, "v": KV, "o": E}
        shapes |= {f"{attention}.{name}_proj.bias": (width,) for name, width in widths.items()}
    if nested["model_type"] == "qwen3":
        shapes |= {f"{attention}.{name}.weight": (8,) for name in ("q_norm", "k_norm")}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * E,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (E,) for j in range(3)}
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    own = {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "dtype": "bfloat16",
        "draft_vocab_size": count, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "embed_requires_grad": False,
        "fc_norm": False, "norm_before_fc": False, "norm_before_residual": True, "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "lab/target"},
        },
        "speculators_model_type": "eagle3", "speculators_version": "0.8.0", "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": nested, "transformers_version": "5.1.0",
    }  # fmt: skip
    tensors = draw(seed, shapes)
    return {**own, **config}, {**tensors, **vocabulary(count)} if count < V else tensors


def with_table(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with the target's embeddings, as a copy of them in 16 bits is stored."""
    table = np.asarray(toy().params["embed"]["embedding"]).astype(BF16)
    return {**tensors, "embed_tokens.weight": table}


def modelopt(**nested: Any):
    """NVIDIA ModelOpt's EAGLE-3: `layers.0`, a map without its mask, and an `eagle_config` with the exporter's keys.

    Returns:
      The `config.json` and the tensors.
    """
    shapes = {
        "fc.weight": (E, 3 * E),
        "norm.weight": (E,),
        "lm_head.weight": (40, E),
        **decoder_layer("layers.0", 2 * E),
    }
    shapes |= {f"layers.0.{norm}.weight": (E,) for norm in ("hidden_norm", "input_layernorm")}
    if nested.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * E,)
    flags = {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True, "next_layer_regular": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None, **nested,
    }  # fmt: skip
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40, eagle_config=flags)
    return config, {**draw(7, shapes), "d2t": vocabulary(40)["d2t"]}


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], file: str = "model.safetensors"
) -> Path:
    """A folder with both."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / file)
    return folder
