"""`generation_config.json`: where texts end, and how transformers draws them by default.

A field that is also an option of a prompt sets that option's default. `temperature` does not: without a given
temperature, texts are greedy. Other fields that transformers would apply are not applied, and decoding says so in one
line (`left_out`).
"""

import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, is_id, is_size, shown
from specjax.models.json_file import read_json
from specjax.sampling_params import FIELDS, check_value, is_set
from specjax.warpers import WARPERS

FILE = "generation_config.json"
APPLIED = (
    "repetition_penalty", "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "top_k", "top_p", "min_p",
    "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
"""Fields that set the defaults of options."""
STARTS = ("decoder_start_token_id", "forced_decoder_ids")
"""Fields that say how the text of a model with an encoder begins."""
_SEARCHES = {"num_beam_groups": 1, "diversity_penalty": 0, "length_penalty": 1, "early_stopping": False}
ELSEWHERE = _SEARCHES | {
    "do_sample": False, "temperature": 1, "max_new_tokens": None, "max_length": None, "num_beams": 1,
    "num_return_sequences": 1, "no_repeat_ngram_size": 0, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1,
    "dola_layers": None, "penalty_alpha": 0, "watermarking_config": None, "token_healing": False, "stop_strings": None,
    "max_time": None, "constraints": None, "force_words_ids": None,
}  # fmt: skip
"""Other fields that change a text in transformers, with the values at which they change nothing."""


def read(folder: Path) -> dict[str, Any]:
    """The parsed file of a folder; empty if there is none."""
    file = folder / FILE
    return read_json(file) if file.is_file() else {}


def fields(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A folder's settings for drawing texts, without fields that change nothing.

    Without a `generation_config.json`, they come from `config.json`, as in transformers.

    Args:
      folder: the model's folder.
      config: its parsed `config.json`.

    Raises:
      ModelError: on a value that an option cannot have.
    """
    file = folder / FILE
    file, said = (file, read(folder)) if file.is_file() else (folder / "config.json", config)
    found = {}
    for field, value in said.items():
        if value is None or field not in APPLIED and value == ELSEWHERE.get(field, value):
            continue
        if field in APPLIED:
            try:
                check_value(FIELDS[field], value)
            except ValueError as error:
                raise ModelError(f"{file}: {error}") from error
            if not is_set(field, value):
                continue
        found[field] = value
    return found | _starts(folder, config)


def _starts(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `STARTS` of a model with an encoder."""
    if not config.get("is_encoder_decoder"):
        return {}
    said = [read(folder), config]
    each = {name: [one[name] for one in said if one.get(name) is not None] for name in STARTS}
    return {name: values[0] for name, values in each.items() if values}


def starts(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The ids with which a text begins that is written beside a source: the start token, and those that follow it always.
    Empty where no file says them.

    Forced ids count up to the first place without one: that of a language, which transformers would detect.

    Args:
      folder: of the model.
      config: its parsed `config.json`.

    Raises:
      ModelError: on values that are not ids.
    """
    if not config.get("is_encoder_decoder"):
        return ()
    said = _starts(folder, config)
    first = said.get("decoder_start_token_id", config.get("bos_token_id"))
    forced = said.get("forced_decoder_ids") or []
    pairs = [one for one in forced if isinstance(one, list) and len(one) == 2]
    if first is None:
        return ()
    if not is_id(first) or len(pairs) < len(forced):
        raise ModelError(
            f"{folder}: decoder_start_token_id must be the id with which texts begin, and forced_decoder_ids pairs of a place "
            f"and an id, not {shown(first)} and {shown(forced)}"
        )
    known = itertools.takewhile(lambda at: at[1][0] == at[0] and is_id(at[1][1]), enumerate(pairs, 1))
    return (first, *(token for _, (_, token) in known))


def eos_ids(folder: Path, config: dict[str, Any], of_tokenizer: Callable[[], Any]) -> tuple[int, ...]:
    """The ids that end a text: from `generation_config.json`, otherwise `config.json`, otherwise the tokenizer.

    Args:
      folder: of the model.
      config: its parsed `config.json`; its text model's part counts as well.
      of_tokenizer: the id that the tokenizer ends texts with, or None.

    Raises:
      ModelError: on values that are not ids.
    """
    for said in ((read(folder),), (config, an_object("text_config", config.get("text_config")))):
        given = [content["eos_token_id"] for content in said if content.get("eos_token_id") is not None]
        listed = [eos if isinstance(eos, list) else [eos] for eos in given]
        if wrong := [eos for eos, ids in zip(given, listed, strict=True) if not all(map(is_id, ids))]:
            raise ModelError(f"{folder}: eos_token_id must be token ids, not {shown(wrong[0])}")
        if found := dict.fromkeys(token for ids in listed for token in ids):
            return tuple(found)
    own = of_tokenizer()
    return (own,) if is_id(own) else ()


def defaults(model: Any) -> dict[str, Any]:
    """The defaults that a model sets for options of a prompt; for a diffusion model, only options that it supports.

    Args:
      model: a `specjax.models.Model`.
    """
    barred = _barred() if model.masked else ()
    return {name: value for name, value in model.generation.items() if name in APPLIED and name not in barred}


def left_out(model: Any, chosen: Collection[str], sampled: bool) -> str | None:
    """A line naming the settings that transformers would apply and specjax does not; None if there are none.

    Args:
      model: a `specjax.models.Model`.
      chosen: options that the user has set, which take precedence over the model's.
      sampled: whether texts are sampled rather than greedy.
    """
    said = {name: value for name, value in model.generation.items() if name not in chosen}
    drawn = said.get("do_sample") and not sampled and "temperature" not in chosen
    without = set() if drawn else {"do_sample", "temperature"}
    if not {"num_beams"} & {*said, *chosen}:
        without |= _SEARCHES.keys()
    most = said.get("max_length", 0)
    if {"max_new_tokens"} & {*said, *chosen} or is_size(most) and most >= model.max_length:
        without.add("max_length")
    open_place = any(pair[-1:] == [None] for pair in said.get("forced_decoder_ids") or [])
    without |= {*STARTS[: 1 if open_place else 2]} | set(APPLIED) - (_barred() if model.masked else set())
    names = [f"{name}={shown(value)}" for name, value in said.items() if name not in without]
    if not names:
        return None
    why = "; texts are greedy where no temperature is given" if drawn else ""
    return f"{model.name}: its {FILE} says {', '.join(names)}, which is not applied{why}"


def _barred() -> set[str]:
    """Options that diffusion models lack: warpers that depend on the text before a token."""
    return {name for each in WARPERS if each.of_logits or each.reads_text for name in each.__dataclass_fields__}
