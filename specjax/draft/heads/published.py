"""Published heads: the file layouts of Medusa, Hydra, EAGLE-1/2 and EAGLE-3, read as fields and parameters of our drafters.

Linear layers are stored `[out, in]`; ours are `[in, out]`. Every tensor and every flag of a file is accounted for.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specjax.draft.feature import layers_config
from specjax.draft.head import check_ids
from specjax.models import hf_config
from specjax.models.errors import ModelError
from specjax.models.tensors import read_header

_FILES = ("model", "pytorch_model", "medusa_lm_head", "hydra_lm_head")
_ATTENTION = ("q", "k", "v", "o")
_MLP = ("gate", "up", "down")
# Fields of a config.json that say nothing about a head, or that `hf_config` reads.
_NEUTRAL = frozenset(
    "architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path base_model_name_or_path "
    "version version_2 use_cache pretraining_tp initializer_range auto_map bos_token_id eos_token_id pad_token_id "
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings vocab_size "
    "attention_bias attention_dropout mlp_bias max_window_layers sliding_window use_sliding_window layer_types qkv_bias "
    "target_model_type model_max_length max_sequence_length".split()
)

_EAGLE3_FLAGS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "eagle_config")
_EAGLE3_FLAGS += ("eagle_aux_hidden_state_layer_ids",)


class _Reader:
    """Tensors by name; what was not taken is an error."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors = _read(folder)
        self.problems: list[str] = []

    def take(self, name: str, shape: tuple[int, ...], transpose: bool = False) -> np.ndarray:
        array = self.tensors.pop(name, None)
        stored = shape[::-1] if transpose else shape
        if array is None:
            self.problems.append(f"missing {name} {list(stored)}")
        elif array.shape != stored:
            self.problems.append(f"{name} has shape {list(array.shape)}, expected {list(stored)}")
        else:
            return array.T if transpose else array
        return np.zeros(shape, np.float32)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> dict[str, np.ndarray]:
        """A `{name}.weight`, and `{name}.bias` where there must be one."""
        made = {"kernel": self.take(f"{name}.weight", (inputs, outputs), transpose=True)}
        return {**made, "bias": self.take(f"{name}.bias", (outputs,))} if bias else made

    def scale(self, name: str, size: int) -> dict[str, np.ndarray]:
        return {"scale": self.take(f"{name}.weight", (size,))}

    def finish(self) -> None:
        problems = self.problems + [f"unknown {name} {list(array.shape)}" for name, array in self.tensors.items()]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ModelError(f"{self.folder}: the head's tensors do not fit: {'; '.join(problems[:8])}{more}")


def read_published(folder: Path, name: str, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """A published head.

    Args:
      folder: with `config.json` and the weights, in safetensors or, where torch is installed, in its own format.
      name: the drafter's registry name.
      config: the content of `config.json`.
      target: what `specjax.models.load` returned.

    Returns:
      Fields of the drafter, and its parameters.

    Raises:
      ModelError: on a missing, misshapen or unknown tensor or flag, and on a head of another width or vocabulary.
    """
    if name not in _LAYOUTS:
        raise ModelError(
            f"{folder / 'config.json'} does not say which drafter it is for, and {name} has no published layout"
        )
    reader = _Reader(folder)
    try:
        fields, params = _LAYOUTS[name](reader, config, target)
    except ModelError:
        raise
    except (TypeError, AttributeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"{folder / 'config.json'} has a field of the wrong kind: {error}") from error
    reader.finish()
    return fields, params


def _medusa(reader: _Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    _check_flags(reader, config, "medusa_num_heads", "medusa_num_layers", "medusa_choices")
    size, vocab = target.lm.config.hidden_size, target.lm.vocab_size
    heads = 1 + max((int(n.partition(".")[0]) for n in reader.tensors if n.partition(".")[0].isdigit()), default=-1)
    layers = int(config.get("medusa_num_layers", 1))
    if not heads:
        raise ModelError(f"{reader.folder}: there is no tensor of a Medusa head (0.0.linear.weight, ...)")
    made = [
        {
            "blocks": [reader.linear(f"{i}.{j}.linear", size, size, bias=True) for j in range(layers)],
            **reader.linear(f"{i}.{layers}", size, vocab),
        }
        for i in range(heads)
    ]
    return {"heads": heads, "layers": layers}, {"heads": made}


def _hydra(reader: _Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    _check_flags(
        reader, config, "hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset",
        "dropout_rate",
    )  # fmt: skip
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp") or not config.get("grounded_heads", True) or config.get("hidden_state_offset"):
        raise ModelError(
            f"{reader.folder}: hydra_head_arch={arch!r}, grounded_heads={config.get('grounded_heads')}, hidden_state_offset="
            f"{config.get('hidden_state_offset')}; read are grounded mlp and prefix-mlp heads over the last hidden state"
        )
    size, vocab = target.lm.config.hidden_size, target.lm.vocab_size
    heads, layers = int(config["hydra_num_heads"]), int(config.get("hydra_num_layers", 1))
    made = []
    for i in range(heads):
        wide = f"hydra_mlp.{i}.1"  # dropouts hold the even places
        shortcut = reader.linear(f"{wide}.res_connection", (i + 2) * size, size, bias=True)
        first = reader.linear(f"{wide}.linear", (i + 2) * size, size, bias=True)
        blocks = [reader.linear(f"hydra_mlp.{i}.{2 * j + 1}.linear", size, size, bias=True) for j in range(1, layers)]
        made.append(
            {
                "input": {**first, "shortcut": shortcut["kernel"], "shortcut_bias": shortcut["bias"]},
                "blocks": blocks,
                **reader.linear(f"hydra_lm_head.{i}.1", size, vocab, bias=True),
            }
        )
    params: dict[str, Any] = {"heads": made}
    prefix = arch == "prefix-mlp"
    if prefix:
        at = "prefix_embeding_layer"  # so spelt in the files
        _check_embedding(reader, f"{at}.embed_tokens.weight", target)
        own = layers_config(target.lm, "hydra")
        layer = _layer(reader, f"{at}.layers.0", own, own.hidden_size)
        layer["attention_norm"] = reader.scale(f"{at}.layers.0.input_layernorm", size)
        params["prefix"] = {"layer": layer, "norm": reader.scale(f"{at}.norm", size)}
    return {"heads": heads, "layers": layers, "prefix_layer": prefix}, params


def _eagle1(reader: _Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    _check_flags(reader, config, "bias")
    own = _own_config(reader, config, target)
    size = own.hidden_size
    fc = reader.linear("fc", 2 * size, size, bias=config.get("bias", True))
    fc.setdefault("bias", np.zeros((size,), np.float32))
    _check_embedding(reader, "embed_tokens.weight", target)
    return {"config": own}, {"fc": fc, "layer": _layer(reader, "layers.0", own, size)}


def _eagle3(reader: _Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    _check_flags(reader, config, *_EAGLE3_FLAGS)
    own = _own_config(reader, config, target)
    size, vocab = own.hidden_size, target.lm.vocab_size
    taps = _taps(reader, config, target)
    count = int(config.get("draft_vocab_size") or vocab)
    at = "midlayer" if any(name.startswith("midlayer.") for name in reader.tensors) else "layers.0"
    layer = _layer(reader, at, own, 2 * size)
    params = {
        "fc": reader.linear("fc", len(taps) * size, size),
        "input_norm": reader.scale(f"{at}.input_layernorm", size),
        "hidden_norm": reader.scale(f"{at}.hidden_norm", size),
        "mlp_norm": layer["mlp_norm"],
        "attention": layer["attention"],
        "mlp": layer["mlp"],
        "norm": reader.scale("norm", size),
        "head": reader.linear("lm_head", size, count),
    }
    flags = {flag: bool(config.get(flag, False)) for flag in ("norm_before_residual", "norm_before_fc")}
    if flags["norm_before_fc"]:
        params["fc_norm"] = reader.scale("fc_norm", len(taps) * size)
    _check_embedding(reader, "embed_tokens.weight", target)
    if count < vocab or "d2t" in reader.tensors:
        params["ids"] = _ids(reader, count, vocab)
    return {"config": own, "taps": taps, **flags}, params


_LAYOUTS: dict[str, Callable[[_Reader, dict[str, Any], Any], tuple[dict[str, Any], Any]]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "eagle1": _eagle1,
    "eagle3": _eagle3,
}


def _ids(reader: _Reader, count: int, vocab: int) -> np.ndarray:
    """Target ids of the draft's: `d2t` holds offsets, `t2d` says which target ids there are."""
    offsets = reader.take("d2t", (count,)).astype(np.int64)
    known = reader.take("t2d", (vocab,)).astype(bool) if "t2d" in reader.tensors else None
    if reader.problems:
        return np.arange(count)
    try:
        ids = check_ids(np.arange(count) + offsets, vocab)
    except ValueError as error:
        raise ModelError(f"{reader.folder}: d2t holds offsets from draft to target ids: {error}") from error
    if known is not None and (known.sum() != count or not known[ids].all()):
        raise ModelError(f"{reader.folder}: t2d and d2t name different target ids")
    return ids


def _taps(reader: _Reader, config: dict[str, Any], target: Any) -> tuple[int, ...]:
    """The layers whose outputs are fused: published indices count the embedding as the first hidden state."""
    nested = config.get("eagle_config") or {}
    unknown = sorted(set(nested) - {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"})
    if unknown:
        raise ModelError(f"{reader.folder}: config.json has the unknown flag eagle_config.{unknown[0]}")
    given = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        layers = target.lm.num_layers
        given = (2, layers // 2, layers - 3)
    return tuple(int(i) - 1 for i in given)


def _layer(reader: _Reader, at: str, config: Any, inputs: int) -> dict[str, Any]:
    """A decoder layer without its first norm; `inputs` is the width that attention reads."""
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    size = config.hidden_size
    shapes = {"q": (inputs, heads), "k": (inputs, kv), "v": (inputs, kv), "o": (heads, size)}
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
    wide = {"gate": (size, config.intermediate_size), "up": (size, config.intermediate_size)}
    wide["down"] = (config.intermediate_size, size)
    attention = {n: reader.linear(f"{at}.self_attn.{n}_proj", *shapes[n], bias=biased[n]) for n in _ATTENTION}
    if config.qk_norm:
        attention |= {n: reader.scale(f"{at}.self_attn.{n}", config.head_dim) for n in ("q_norm", "k_norm")}
    mlp = {n: reader.linear(f"{at}.mlp.{n}_proj", *wide[n], bias=config.mlp_bias) for n in _MLP}
    norm = reader.scale(f"{at}.post_attention_layernorm", size)
    return {"attention": attention, "mlp": mlp, "mlp_norm": norm}


def _own_config(reader: _Reader, config: dict[str, Any], target: Any) -> Any:
    """The layer's config; width and vocabulary must be the target's.

    The vocabulary is the number of tokens that the head reads, which some files pad.
    """
    known = {key: value for key, value in config.items() if key in _NEUTRAL}
    family = known.get("model_type", "llama")
    own = hf_config.from_hf(
        {**known, "model_type": family if family in ("llama", "mistral", "qwen2", "qwen3") else "llama"}
    )
    if own.hidden_size != target.lm.config.hidden_size:
        raise ModelError(
            f"{reader.folder}: the head is {own.hidden_size} wide and {target.name!r} {target.lm.config.hidden_size}: it "
            "belongs to another target"
        )
    if own.vocab_size != target.lm.vocab_size:
        raise ModelError(
            f"{reader.folder}: the head reads {own.vocab_size} tokens, {target.name!r} has {target.lm.vocab_size}"
        )
    if own.num_hidden_layers != 1:
        raise ModelError(f"{reader.folder}: num_hidden_layers is {own.num_hidden_layers}; heads of one layer are read")
    biased = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    normed = any(name.endswith("self_attn.q_norm.weight") for name in reader.tensors)
    return dataclasses.replace(own, sliding_window=None, sliding_layers=(), qkv_bias=biased, qk_norm=normed)


def _check_flags(reader: _Reader, config: dict[str, Any], *known: str) -> None:
    unknown = sorted(set(config) - _NEUTRAL - set(known))
    if unknown:
        raise ModelError(f"{reader.folder}: config.json has the unknown flag {unknown[0]!r} ({config[unknown[0]]!r})")


def _check_embedding(reader: _Reader, name: str, target: Any) -> None:
    """Some files hold a copy of the target's embedding: it is not read, but tells whose head this is."""
    copy = reader.tensors.pop(name, None)
    if copy is None:
        return
    own = np.asarray(
        target.lm.embed(target.params, np.arange(target.lm.vocab_size, dtype=np.int32)[None])[0], np.float32
    )
    if copy.shape != own.shape or not np.allclose(np.asarray(copy, np.float32), own, rtol=0.02, atol=1e-3):
        raise ModelError(
            f"{reader.folder}: {name} is not the embedding of {target.name!r}: the head belongs to another target"
        )


def _read(folder: Path) -> dict[str, np.ndarray]:
    for stem in _FILES:
        file = folder / f"{stem}.safetensors"
        if file.is_file():
            found = {name: tensor.array() for name, tensor in read_header(file).items()}
            return {name: array for name, array in found.items() if not re.search(r"rotary_emb\.inv_freq$", name)}
        for suffix in (".bin", ".pt"):
            if (folder / f"{stem}{suffix}").is_file():
                return _read_torch(folder / f"{stem}{suffix}")
    names = ", ".join(f"{stem}.safetensors" for stem in _FILES)
    raise ModelError(
        f"{folder} holds no weights of a head: looked for {names}, and for .bin and .pt files of these names"
    )


def _read_torch(file: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise ModelError(f"{file} needs torch to be read: install it, or convert the file to safetensors") from error
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own text asks to turn its guard off
        raise ModelError(
            f"{file} is damaged, or holds more than weights, which is never read; convert it to safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise ModelError(f"{file} holds other things than named tensors; convert it to safetensors")
    array = lambda x: (x.float() if x.is_floating_point() else x).numpy()
    return {name: array(x) for name, x in found.items() if not name.endswith("rotary_emb.inv_freq")}
