"""DRY: a penalty on continuing a repetition, which grows with its length.

The rule is that of the pull request which brought it into text-generation-webui (#5677).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Warper, marked, parameter
from specjax.warpers.lists import listing

LONGEST = 50
"""The longest repetition that counts, in tokens."""


@dataclasses.dataclass(frozen=True)
class Dry(Warper):
    """Subtracts `multiplier * base ** (n - allowed_length)` from a token that would continue a repetition of n tokens.

    n is the length of the longest suffix of the text that occurs earlier with this token after it, if it is at least
    `allowed_length`; it is at most 50. A repetition does not reach over a breaker, and a breaker is never penalised.

    Attributes:
      dry_multiplier: float32 >= 0; 0 is off.
      dry_base: float32 >= 1.
      dry_allowed_length: int32 >= 1.
      dry_sequence_breakers: `[B, K]` int32 token ids, padded with -1. If nobody sets them and there is a tokenizer,
        they are its tokens of a line break, a colon, a quotation mark and an asterisk.
    """

    about = About(
        "dry", "lowers tokens that would go on with a repetition", "text-generation-webui #5677", "same text",
        fields=("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    )  # fmt: skip
    of_logits = True
    reads_text = True

    dry_multiplier: float = parameter(
        0.0, "strength of the penalty on continuing a repetition; 0 is off", "a finite number >= 0",
        lambda x: (x >= 0) & np.isfinite(x),
    )  # fmt: skip
    dry_base: float = parameter(
        1.75, "factor by which the penalty grows with each repeated token", "a finite number >= 1",
        lambda x: (x >= 1) & np.isfinite(x), switch=False,
    )  # fmt: skip
    dry_allowed_length: int = parameter(
        2, "the shortest repetition that is penalised, in tokens", "an integer >= 1", lambda x: x >= 1, switch=False
    )
    dry_sequence_breakers: tuple[int, ...] | None = listing(
        "tokens that no repetition reaches across, such as [198] (default: the tokenizer's line break, colon, quotation mark, "
        "asterisk)", "a list of token ids", switch=False, words=("a\n", "a:", 'a"', "a*"),
    )  # fmt: skip

    def warp(self, scores, own, text):
        vocab = scores.shape[-1]
        breaks = marked(own["dry_sequence_breakers"], vocab)

        def one(tokens, length, scores, multiplier, base, allowed, breaks):
            at = jnp.arange(tokens.shape[0])

            def longer(carry):
                run, alive = (
                    carry  # for every place: how many tokens before it equal those before the end; whether all so far do
                )
                back = at - 1 - run
                mine = tokens[jnp.maximum(length - 1 - run, 0)]
                same = (back >= 0) & (tokens[jnp.maximum(back, 0)] == mine) & ~breaks[mine] & (run < LONGEST)
                alive = alive & same
                return run + alive, alive

            start = jnp.zeros(tokens.shape, jnp.int32), (at < length) & ~breaks[tokens]
            run = jax.lax.while_loop(lambda carry: carry[1].any(), longer, start)[0]
            longest = jnp.zeros((vocab,), jnp.int32).at[jnp.where(at < length, tokens, vocab)].max(run, mode="drop")
            penalty = multiplier * base ** (longest - allowed).astype(jnp.float32)
            return jnp.where((longest >= allowed) & ~breaks, scores - penalty, scores)

        names = ("dry_multiplier", "dry_base", "dry_allowed_length")
        return text.each(one, scores, *(own[name] for name in names), breaks)
