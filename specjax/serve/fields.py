"""Fields of a prompt under other systems' names: they are mapped to options here, or refused if there is none."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from specjax.models import generation
from specjax.names import MEANT, WITHIN
from specjax.serve.sampling import OPTIONS

_NO_CHANGE: dict[str, Any] = {
    "n": 1, "best_of": 1, "num_return_sequences": 1, "top_logprobs": 0, "logprobs": False, "prompt_logprobs": False,
    "echo": False, "stream": False, "stream_options": None, "use_beam_search": False, "beam_width": 1,
    "stop_token_ids": (), "include_stop_str_in_output": False, "skip_special_tokens": True, "return_full_text": False,
    "spaces_between_special_tokens": True, "min_tokens_to_keep": 1, "repeat_penalty": 1, "rep_pen": 1, "repeat_last_n": 64,
    "tfs_z": 1, "top_a": 0, "top_n_sigma": -1, "dynatemp_range": 0, "penalty_decay": None, "truncate_prompt_tokens": None,
    "truncate": None,
    "tools": (), "tool_choice": "none", "functions": (), "function_call": "none", "response_format": {"type": "text"},
    "structured_outputs": None, "json_schema": None, "grammar": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "regex": None, "ebnf": None, "watermark": False, "reasoning_effort": None,
    "enable_thinking": None, "chat_template": None, "chat_template_kwargs": None, "allowed_token_ids": None, "bad_words": (),
    "system": None, "thinking": None, "prefix_allowed_tokens_fn": None, "assistant_model": None,
    "verifier": None, "unmask": None, "cache": None, "block_length": None, "sub_block": None, "align": None, "shift": False,
    "cfg_scale": 0, "filter": None, "logits_eos_inf": False, "confidence_eos_eot_inf": False, "guidance_scale": 1,
    "negative_prompt": None, "amateur": None, "contrast_alpha": None, "contrast_beta": None, "stochastic_beams": 0,
    "superposed_drafts": 0, "soft_thinking": None, "logits_processors": (), "num_beams": 1,
    **generation.ELSEWHERE,
}  # fmt: skip
"""Fields without an option of a prompt, and the value at which they change nothing."""
_OF_ALL = {
    "n": "num_return_sequences", "logprobs": "logprobs", "top_logprobs": "logprobs", "best_of": "select",
    **{name: name for name in ("num_return_sequences", "prompt_logprobs")},
}  # fmt: skip
"""Those of them that are options of a run."""
_LIKE = 0.94
"""The similarity from which a name counts as a misspelt option."""


def under_own_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a prompt under specjax's names; other names and spellings of options are mapped.

    Args:
      given: the fields; null counts as absent.

    Raises:
      ValueError: on an option that would not be applied, and on one that is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = _own_name(name, value)
        if value is None:
            if own not in _NO_CHANGE:
                found.setdefault(own, None)
        elif own == "do_sample":
            _check_do_sample(value, given)
            if not value:
                found["temperature"] = 0
        elif own in _NO_CHANGE and own not in OPTIONS:
            _check_no_change(name, own, value)
        elif found.get(own) is not None and found[own] != value:
            raise ValueError(f"it has {name} and another field that sets {own} differently: leave one out")
        else:
            found[own] = value
    bias = found.get("logit_bias")
    if isinstance(bias, dict):  # OpenAI's form
        found["logit_bias"] = [[int(token) if str(token).isdigit() else token, by] for token, by in bias.items()]
    return found


def is_known(name: str) -> bool:
    """Whether a field of this name, or of the name in another system, says something about a prompt's decoding."""
    return _plain(name) in _KNOWN


def _own_name(name: str, value: Any) -> str:
    if (own := _KNOWN.get(_plain(name))) is not None:
        return own
    if isinstance(value, (int, float)) and (like := difflib.get_close_matches(_plain(name), _KNOWN, 1, _LIKE)):
        raise ValueError(f"it has no field {name!r}; is {_KNOWN[like[0]]} meant?")
    return name


def _check_do_sample(value: Any, given: Mapping[str, Any]) -> None:
    if value not in (True, False) or value and not any(_KNOWN.get(_plain(name)) == "temperature" for name in given):
        raise ValueError("do_sample follows from the temperature, which is 0 for greedy texts: give temperature")


def _check_no_change(name: str, own: str, value: Any) -> None:
    usual = _NO_CHANGE[own]
    if value == usual or usual in (None, ()) and value in ("", [], {}) or own in _LISTED and isinstance(value, list):
        return
    what, more = (_OF_ALL[own], "") if own in _OF_ALL else {**MEANT, **WITHIN}.get(own, ("", ""))
    if what in ("decode", "drafter", *_OF_ALL.values()):
        said = f", {more}".replace("{name}", own) if more else ""
        raise ValueError(
            f"{name} is an option of all prompts together: take it out, and give --{what.replace('_', '-')}, in Python "
            f"{what}{said}"
        )
    raise ValueError(f"there is no option {name} here, and it would not be applied: take it out")


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


_LISTED = ("logprobs", "prompt_logprobs")
"""Fields that records have too, as results."""
_ALIKE = {"stop", *OPTIONS} - {"repetition_penalty"}
"""Other systems' names for equivalent options: penalties that look only at the newest tokens."""
_KNOWN = {_plain(name): name for name in (*_NO_CHANGE, "stop", *OPTIONS)} | {
    _plain(name): own
    for name, (own, beside) in MEANT.items()
    if own in _ALIKE and not beside and not name.startswith("-")
}
"""Normalised names, and the option of each."""
