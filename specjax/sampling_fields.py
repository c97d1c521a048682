"""The parameters of all warpers as typed fields, so that type checkers and errors know them without jax.

`python docs/tables.py` writes them, from what `specjax.warpers` exports.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The options that `specjax samplers` lists; None means that the user gave none.

    `specjax.warpers` says which values each may have.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Any = None
    bad_words_ids: Any = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    begin_suppress_tokens: Any = None
    suppress_tokens: Any = None
    constraint: Any = None
    guide: Any = None
    momentum_alpha: float | None = None
    momentum_k: int | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    xtc_special_tokens: Any = None
