"""SAM decoding: what followed the longest earlier match of the text's end, in the text or in a datastore (Hu et al. 2024,
arXiv:2411.10666).
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import ChainDrafter
from specjax.draft.datastore import SPAN
from specjax.draft.prompt_lookup import readable
from specjax.draft.rest import continuations, last_tokens
from specjax.draft.suffix import likeliest, runs_of
from specjax.draft.texts import TextsDrafter


@dataclasses.dataclass(frozen=True)
class Sam(TextsDrafter, ChainDrafter):
    """A chain that copies what followed the longest suffix that occurred before; no trained parameters.

    Of several places in the row's own text the first one counts, as in the paper's suffix automaton. A copy that
    reaches the end of the text goes on with itself. Of several places in the datastore, the most frequent continuation
    counts. The datastore's match must be longer than the text's by more than `bias` tokens. A match of m tokens
    proposes at most `factor * m`.

    The automata of the paper are not built: a scan of the text finds the same match and the same place, and the
    datastore is sorted (`specjax.draft.datastore`). The paper drafts with another method where matches are short:
    `sam+token_recycling` verifies both.

    Attributes:
      length: how many tokens to propose, at most.
      span: the longest match that is told from longer ones.
      min_match: the shortest match.
      factor: how many tokens to propose for each token of the match.
      bias: how many tokens longer the text's match counts.
      matches: how many places in the datastore are counted; if there are more, this many at even distances.
    """

    about = About(
        "sam",
        "copies what followed the longest match in the text or in a datastore",
        "arXiv:2411.10666",
        fields=("length", "span", "min_match", "factor", "bias", "matches"),
        paper="length=59,span=64,min_match=1,factor=4,bias=5",
        loads="texts",
    )

    length: int = 12
    span: int = 32
    min_match: int = 2
    factor: float = 2.0
    bias: int = 2
    matches: int = 16

    def __post_init__(self):
        if not (1 <= self.min_match <= self.span <= SPAN and min(self.length, self.matches) >= 1 and self.factor > 0):
            raise ValueError(
                f"sam needs 1 <= min_match <= span <= {SPAN}, length, matches >= 1 and factor > 0, got {self}"
            )

    def propose(self, params, draft, view, sampler):
        text, end, _ = readable(view)
        recent = last_tokens(view, self.span)
        within = jnp.arange(text.shape[1])[None] < end[:, None]
        runs = runs_of(jnp.where(within, text, -1), recent, within)
        start, match = jnp.argmax(runs, axis=1), runs.max(axis=1)
        at = start[:, None] + jnp.arange(self.length)[None] % jnp.maximum(end - start, 1)[:, None]
        copied = jnp.take_along_axis(text, at, axis=1)
        if self.filled:
            size = self.vocab_size or 0
            theirs, longer = continuations(params["draft"], recent, self.min_match, self.matches, self.length, size)
            found = (theirs[:, :, 0] >= 0).astype(jnp.int32)
            theirs, _ = likeliest(theirs, found, jnp.full((1,), self.length), 0.0, jnp.zeros_like(match))
            better = longer - self.bias > match
            copied, match = jnp.where(better[:, None], theirs, copied), jnp.where(better, longer, match)
        allowed = jnp.floor(self.factor * match.astype(jnp.float32)).astype(jnp.int32)
        allowed = jnp.where(match >= self.min_match, allowed, 0)
        return self.chain(view, jnp.where(jnp.arange(self.length)[None] < allowed[:, None], copied, -1), draft)
