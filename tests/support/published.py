"""Files of heads as the code that publishes them writes them: names, shapes and types, over small random numbers."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from support.conformance import CONFIG, TARGET, params

import specjax

E, V, F, KV = CONFIG.hidden_size, CONFIG.vocab_size, CONFIG.intermediate_size, 32
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


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], file: str = "model.safetensors"
) -> Path:
    """A folder with both."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / file)
    return folder
