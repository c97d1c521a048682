"""Prompt lookup decoding: find an earlier occurrence of the last n-gram and copy what followed (Saxena 2023).

The longer the match, the likelier the copy is right. A match of m tokens proposes at most `factor * m` tokens;
SuffixDecoding (arXiv:2411.04975) bounds its drafts in this way. Unsure steps then cost little more than plain ones.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import ChainDrafter, View

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PromptLookup(ChainDrafter):
    """A chain copied from the row's own text; no parameters, no state.

    Attributes:
      length: how many tokens to propose, at most.
      ngram: the longest suffix that is looked up; if it does not occur, shorter ones are tried.
      min_ngram: the shortest suffix.
      factor: how many tokens to propose for each matched token, at least 1.
    """

    about = About("prompt_lookup", "copies what followed the last n-gram earlier in the text", "Saxena 2023")

    length: int = 13
    ngram: int = 6
    min_ngram: int = 2
    factor: float = 3.0

    def __post_init__(self):
        if self.length < 1 or not 1 <= self.min_ngram <= self.ngram or not self.factor >= 1:
            raise ValueError(f"prompt_lookup needs length >= 1, 1 <= min_ngram <= ngram and factor >= 1, got {self}")

    def propose(self, params, draft, view, sampler):
        found, matched = copied(view, self.length, self.ngram, self.min_ngram)
        allowed = jnp.floor(self.factor * matched.astype(jnp.float32)).astype(jnp.int32)
        found = jnp.where(jnp.arange(self.length)[None] < allowed[:, None], found, -1)
        return self.chain(view, found, draft)


def copied(view: View, length: int, ngram: int, min_ngram: int) -> tuple[Array, Array]:
    """What followed the longest earlier match of each row's last tokens, in its text or its source.

    Args:
      view: the rows.
      length: how many tokens to copy.
      ngram: the longest match counted.
      min_ngram: the shortest match accepted.

    Returns:
      Tokens `[B, length]`, -1 where there is nothing to copy, and the length of the match `[B]`, 0 if there is none.
    """
    text, end, begin = readable(view)
    start, matched = lookup(text, end, ngram, min_ngram, begin)
    # A match closer to the end than `length` repeats with its own period, so nothing beyond the text is read.
    period = jnp.maximum(end - start, 1)
    at = start[:, None] + jnp.arange(length)[None] % period[:, None]
    found = jnp.where(matched[:, None] > 0, jnp.take_along_axis(text, at, axis=1), -1)
    return jnp.where(jnp.cumsum(found < 0, axis=1) == 0, found, -1), matched


def readable(view: View) -> tuple[Array, Array, int]:
    """What there is to copy from: each row's source, if it has one, then -1 as a border, then its text.

    Returns:
      Tokens `[B, M]`; where the text ends `[B]`; and, static, where it begins.
    """
    if view.source is None:
        return view.tokens, view.length, 0
    begin = view.source.shape[1] + 1
    text = jnp.concatenate([jnp.pad(view.source, ((0, 0), (0, 1)), constant_values=-1), view.tokens], axis=1)
    return text, view.length + begin, begin


def lookup(tokens: Array, length: Array, ngram: int, min_ngram: int, begin: int = 0) -> tuple[Array, Array]:
    """Where the longest earlier match of each row's last tokens continues.

    If several matches are equally long (up to `ngram` tokens), the most recent one wins.

    Args:
      tokens: `[B, L]`; -1 matches nothing.
      length: `[B]`.
      ngram: the longest match counted.
      min_ngram: the shortest match accepted.
      begin: static, where the text begins, if it is found in tokens before it too.

    Returns:
      The index of the first token after the match `[B]`, below `length`, and the length of the match `[B]`, 0 if there
      is none.
    """
    size = tokens.shape[1]
    ends = jnp.arange(size)[None]  # a match that continues at index e covers [e - m, e)
    run = jnp.zeros(tokens.shape, jnp.int32)
    matching = (ends >= 1) & (ends < length[:, None])
    if begin:
        matching = matching & (tokens >= 0)
    for back in range(1, ngram + 1):
        last = jnp.take_along_axis(tokens, jnp.maximum(length - back, 0)[:, None], axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :size]
        matching = matching & (shifted == last) & (ends >= back) & (length[:, None] >= begin + back)
        run = run + matching
    score = jnp.where(run >= min_ngram, run * size + ends, -1)
    best = jnp.argmax(score, axis=1)
    return best, jnp.maximum(jnp.take_along_axis(score, best[:, None], axis=1)[:, 0], 0) // size
