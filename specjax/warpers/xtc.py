"""XTC: from time to time the likeliest tokens are left out.

The rule is that of the pull request which brought it into text-generation-webui (#6335).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Warper, marked, parameter
from specjax.warpers.lists import listing


@dataclasses.dataclass(frozen=True)
class Xtc(Warper):
    """At some places, removes every token with at least the threshold probability, except the least likely of these.

    The row's own noise at a place decides whether it acts there. If it would remove an end of the text or a special
    token, it removes nothing.

    Attributes:
      xtc_probability: float32 in [0, 1], of acting at a place; 0 is off.
      xtc_threshold: float32 in (0, 1]; of equally unlikely tokens the last is kept; above 0.5 nothing happens.
      xtc_special_tokens: `[B, K]` int32 token ids, padded with -1, in addition to those that end a text. If nobody sets
        them and there is a tokenizer, it is the tokenizer's line break.
    """

    about = About(
        "xtc", "now and then leaves out the likeliest tokens", "text-generation-webui #6335", "same text",
        fields=("xtc_probability", "xtc_threshold", "xtc_special_tokens"),
    )  # fmt: skip
    reads_text = True

    xtc_probability: float = parameter(
        0.0, "how often the likeliest tokens are left out; 0 is off", "in [0, 1]", lambda x: (x >= 0) & (x <= 1)
    )
    xtc_threshold: float = parameter(
        0.1, "removes tokens of at least this probability, except the least likely of them", "in (0, 1]",
        lambda x: (x > 0) & (x <= 1), switch=False,
    )  # fmt: skip
    xtc_special_tokens: tuple[int, ...] | None = listing(
        "tokens such as [198] that are never removed: like an end of text, they keep it from acting (default: the "
        "tokenizer's line break)", "a list of token ids", switch=False, words=("\n",),
    )  # fmt: skip

    def warp(self, scores, own, text):
        chances = jax.nn.softmax(scores, axis=-1)
        likely, ids = chances >= own["xtc_threshold"][:, None, None], jnp.arange(scores.shape[-1])[None, None]
        least = jnp.where(likely, scores, jnp.inf).min(axis=-1, keepdims=True)
        kept = jnp.where(likely & (scores == least), ids, -1).max(axis=-1, keepdims=True)
        removed = likely & (ids != kept)
        acts = text.uniform(text.positions()) < own["xtc_probability"][:, None]
        if not text.partial:  # whose columns are not ids
            special = marked(own["xtc_special_tokens"], scores.shape[-1])
            special = special if text.eos is None else special | marked(text.eos, scores.shape[-1])
            acts = acts & ~(removed & special[:, None]).any(axis=-1)
        return jnp.where(acts[:, :, None] & removed, -jnp.inf, scores)
