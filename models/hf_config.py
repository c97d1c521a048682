"""Hugging Face `config.json` to `ModelConfig` and back, in the layouts of transformers 4 and 5.

Each family's differences are described in `specjax.models.families`.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from specjax.models import hf_experts, hf_rope
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import switches
from specjax.models.families.base import Family
from specjax.models.families.table import FAMILIES
from specjax.models.families.unsupported import reason
from specjax.models.fields import an_object, check_depth, check_fixed, flag, is_size, positive, shown
from specjax.models.model_config import ModelConfig, llama_config
from specjax.models.packed import table as packed

SUPPORTED = tuple(family.architecture for family in FAMILIES.values())

_USUAL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


def from_hf(config: dict[str, Any], besides: Collection[str] = ()) -> ModelConfig:
    """Reads a parsed `config.json` of a text model, or of a larger model with a `text_config`.

    Args:
      config: the parsed file.
      besides: fields that the caller reads itself.

    Raises:
      ModelError: on an unsupported architecture, rope type or activation; on missing or inconsistent fields; and on
        fields that describe a different model.
    """
    family = family_of(config)
    text = config | an_object("text_config", config.get("text_config"))
    if config.get("tie_word_embeddings") is True:
        text["tie_word_embeddings"] = True  # what transformers goes by, whatever the text's part says
    text = family.renamed(text)
    packed.found(config)  # unsupported packings are reported before any other error
    made = {name: usual for name, usual in family.usual.items() if callable(usual)}
    given, asked = {**_USUAL, **family.usual, **dict.fromkeys(made), **text}, {*besides, *family.fixed}

    def get(name: str) -> Any:
        asked.add(name)
        return made[name](get) if given.get(name) is None and name in made else given.get(name)

    def size(name: str) -> Any:
        value = get(name)
        return value[0] if name in family.by_layer and isinstance(value, list) and value else value

    check_fixed(given, dict(family.fixed), family.architecture)
    free = {"num_key_value_heads"} | ({"head_dim"} if family.usual.get("head_dim") is None else set())
    missing = [name for name in _SIZES if not (is_size(size(name)) or (name in free and get(name) is None))]
    if missing:
        raise ModelError(f"config.json needs positive integers for: {', '.join(missing)}")
    check_depth(get("num_hidden_layers"))
    heads, width = get("num_attention_heads"), get("hidden_size")
    kv_heads = heads if get("num_key_value_heads") is None else get("num_key_value_heads")
    _check_heads(heads, kv_heads)
    head_dim = get("head_dim")
    if head_dim is None:
        if width % heads:
            raise ModelError(f"config.json: hidden_size {width} is not a multiple of {heads} heads; set head_dim")
        head_dim = width // heads
    sizes: dict[str, Any] = {name: size(name) for name in _SIZES} | {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    plain = llama_config(
        **sizes,
        rms_norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        tie_word_embeddings=flag("tie_word_embeddings", get("tie_word_embeddings")),
    )
    plain = plain if family.rope is None else plain.every(AttentionConfig, rope=family.rope(get))
    read = hf_experts.compressed(get, family.read(get, plain))
    found = dataclasses.replace(_stretched(read), family=family.model_type)
    switches.check(text, found, asked, family.architecture)
    return found


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads do not split over {kv_heads} key-value heads")


def _stretched(config: ModelConfig) -> ModelConfig:
    """The config with the positions that YaRN reaches, if the file gives those of the first training, as model cards
    advise."""
    ropes = {rope.scaling for rope in config.ropes}
    reach = [int(r.factor * r.original_max_position_embeddings) for r in ropes if r is not None and r.kind == "yarn"]
    return dataclasses.replace(config, max_position_embeddings=max(config.max_position_embeddings, *reach, 1))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a config; transformers 4 and 5 read it.

    It is written for the family by which the model was read. If that family cannot express the model, or the model has
    no family, it is written for the first family of the table that can.

    Raises:
      ModelError: if no family has this combination of parts; names the parts in which the nearest family differs.
    """
    for one in config.attentions:
        _check_heads(one.num_attention_heads, one.num_key_value_heads)
    found: list[tuple[list[str], str]] = []
    refused = []
    first = [config.family] if config.family in FAMILIES else []
    for kind in dict.fromkeys([*first, *FAMILIES]):
        family = FAMILIES[kind]
        try:
            own = family.write(config)
            out = _shared(config) | ({} if family.rope is None or "rope_parameters" in own else _rope(config)) | own
            out = family.named(out)
            out |= {"architectures": [family.architecture], "model_type": kind}
            again = from_hf(out)
        except ModelError as error:
            refused.append(error)
            continue
        wrong = _parts(config, again)
        if not wrong:
            return out
        found.append((wrong, family.architecture))
    if not found:
        raise refused[0]
    wrong, nearest = min(found, key=lambda one: len(one[0]))
    raise ModelError(
        f"no supported architecture has {', '.join(wrong)} with the rest of this model; {nearest} comes nearest"
    )


def _parts(config: Any, other: Any) -> list[str]:
    """The fields in which a config differs from another. Nested configs list their own fields; fields of layers are
    listed once."""
    if isinstance(config, tuple) and len(config) == len(other) and all(map(dataclasses.is_dataclass, config)):
        each = [_parts(own, theirs) for own, theirs in zip(config, other, strict=True)]
        return list(dict.fromkeys(part for found in each for part in found))
    wrong = []
    for name in (field.name for field in dataclasses.fields(config) if field.compare):
        own, theirs = getattr(config, name), getattr(other, name)
        if own != theirs:
            inner = (dataclasses.is_dataclass(own) or name == "layers") and type(own) is type(theirs)
            wrong += [f"{name}.{part}" for part in _parts(own, theirs)] if inner else [f"{name}={shown(own)}"]
    return wrong


def _shared(config: ModelConfig) -> dict[str, Any]:
    """The fields that all families write in the same way."""
    c, near = config, config.attention_sizes
    return {
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.dense.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers, "num_attention_heads": near.num_attention_heads,
        "num_key_value_heads": near.num_key_value_heads, "head_dim": near.head_dim,
        "max_position_embeddings": c.max_position_embeddings, "hidden_act": c.dense.hidden_act, "rms_norm_eps": c.norm.eps,
        "tie_word_embeddings": c.head.tied, **hf_experts.compressed_to_hf(c),
    }  # fmt: skip


def _rope(config: ModelConfig) -> dict[str, Any]:
    """The fields of families with one rope, in the layout of transformers 4; none of a model without attention."""
    if not config.attentions:
        return {}
    return {"rope_theta": config.rope.theta, "rope_scaling": hf_rope.to_hf(config.rope.scaling)}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a parsed `config.json`: by `architectures` or, if absent, by `model_type`.

    Of a larger model that is read, the `model_type` in its `text_config` decides, where that is a family's.

    Raises:
      ModelError: if it is not supported.
    """
    named = config.get("architectures") or [config.get("model_type")]
    named = [str(name) for name in ([named] if isinstance(named, str) else named) if name]
    for family in FAMILIES.values():
        if {family.model_type, family.architecture, *family.others} & set(named):
            text = an_object("text_config", config.get("text_config"))
            return FAMILIES.get(str(text.get("model_type")), family)
    found = ", ".join(named) or "none named"
    why = reason(named)
    known = "" if why is None else f" ({why})"
    raise ModelError(f"unsupported architecture: {found}{known}; supported are {', '.join(SUPPORTED)}")
