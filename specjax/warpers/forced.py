"""Tokens that stand at certain places of a text, and tokens that do not begin it: `transformers`' processors."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.banned import removed
from specjax.warpers.base import Warper, parameter
from specjax.warpers.lists import listing


def only(scores, here, token):
    """Scores `[B, T, V]` in which `token` `[B]` is the only one, at the places that are `here` `[B, T]`; -1: as before."""
    alone = jnp.where(jnp.arange(scores.shape[-1])[None] == token[:, None], 0.0, -jnp.inf)[:, None]
    return jnp.where((here & (token >= 0)[:, None])[:, :, None], alone, scores)


def _token(help: str) -> Any:
    number = parameter(-1, f"{help}; -1 is off", "a token id, or -1", lambda x: x >= -1)
    return dataclasses.field(default=-1, metadata={**number.metadata, "is_token": True})


@dataclasses.dataclass(frozen=True)
class Forced(Warper):
    """The places depend on the text's length alone. Lengths include the prompt, which for a model with an encoder is the
    beginning of the decoder's text (`specjax.models.Model.starts`).

    A text of one token that is followed by a forced token begins after that, for `begin_suppress_tokens`.

    Attributes:
      forced_bos_token_id: int32, the only token after a text of one token; -1 is off.
      forced_eos_token_id: int32, the only token at the last place before a text's limit; -1 is off.
      begin_suppress_tokens: `[B, K]` int32 token ids, -1 padded, never the first new token.
    """

    about = (
        About(
            "forced_bos_token_id",
            "the only second token of a text, prompt included",
            "transformers",
            "same text",
            fields=("forced_bos_token_id",),
        ),
        About(
            "forced_eos_token_id",
            "the only token at the last place before a text's limit",
            "transformers",
            "same text",
            fields=("forced_eos_token_id",),
        ),
        About(
            "begin_suppress_tokens",
            "removes tokens from the first new place",
            "transformers",
            "same text",
            fields=("begin_suppress_tokens",),
        ),
    )
    of_logits = True
    reads_text = True
    removes = True
    reads_limit = True
    forces = "forced_bos_token_id", "forced_eos_token_id"

    forced_bos_token_id: int = _token("the token after a text of one token, such as a decoder's start")
    forced_eos_token_id: int = _token("the token at the last place before a text's limit")
    begin_suppress_tokens: tuple[int, ...] = listing(
        "tokens that never come first after the prompt, such as [220, 50256]", "a list of token ids"
    )

    def warp(self, scores, own, text):
        at, bos = text.positions(), own["forced_bos_token_id"]
        scores = only(scores, at == 1, bos)
        if text.limit is not None:
            scores = only(scores, at == text.limit[:, None] - 1, own["forced_eos_token_id"])
        begin = jnp.zeros_like(text.length) if text.begin is None else text.begin
        first = at == (begin + ((begin == 1) & (bos >= 0)))[:, None]
        return jnp.where(first[:, :, None], removed(scores, own["begin_suppress_tokens"]), scores)
