"""Banned tokens, and sequences that may not be completed: `transformers`' processors with these names."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Warper, marked, parameter
from specjax.warpers.lists import NONE, Shape, listing, tokens


def removed(scores, ids):
    """Scores `[B, T, V]` without tokens `[B, K]`, padded with -1."""
    return jnp.where(marked(ids, scores.shape[-1])[:, None], -jnp.inf, scores)


@dataclasses.dataclass(frozen=True)
class SuppressTokens(Warper):
    """Removes tokens.

    Attributes:
      suppress_tokens: `[B, K]` int32 token ids, -1 padded.
    """

    about = About("suppress_tokens", "removes tokens", "transformers", "same text")
    of_logits = True
    removes = True

    suppress_tokens: tuple[int, ...] = listing("tokens that are never drawn, such as [198, 628]", "a list of token ids")

    def warp(self, scores, own, text):
        return removed(scores, own["suppress_tokens"])


def _words(value):
    if isinstance(value, (str, bytes, dict)):
        raise TypeError("not a list")
    words = tuple(tokens(word) for word in value)
    if not all(words):
        raise ValueError("an empty word")
    return words


def _array(rows, widths):
    out = np.full((len(rows), *widths), NONE, np.int32)
    for row, words in enumerate(rows):
        for index, word in enumerate(words):
            out[row, index, widths[1] - len(word) :] = word
    return out


WORDS = Shape(_words, lambda words: (len(words), max(map(len, words), default=0)), _array)


@dataclasses.dataclass(frozen=True)
class BadWordsIds(Warper):
    """Removes the token that would complete a banned sequence, wherever in the text (prompt included) that sequence begins.

    A row's EOS is never removed as a banned word by itself.

    Attributes:
      bad_words_ids: `[B, W, K]` int32 token ids, -1 in front of shorter sequences.
    """

    about = About("bad_words_ids", "removes tokens that would complete given sequences", "transformers", "same text")
    of_logits = True
    removes = True
    reads_text = True

    bad_words_ids: tuple[tuple[int, ...], ...] = listing(
        "sequences of tokens that are never completed, such as [[11, 262], [30]]", "a list of lists of token ids", WORDS
    )

    def warp(self, scores, own, text):
        words, vocab = own["bad_words_ids"], scores.shape[-1]
        last, prefixes = words[..., -1], words[..., :-1]
        if text.eos is not None:
            alone = (prefixes == NONE).all(axis=-1)
            last = jnp.where(alone & (last[:, :, None] == text.eos[:, None]).any(axis=-1), NONE, last)

        def ban(tokens, length, scores, last, prefixes):
            size = prefixes.shape[-1]
            at = length - size + jnp.arange(size)
            end = jnp.where(at >= 0, tokens[jnp.maximum(at, 0)], NONE)
            complete = ((prefixes == end[None]) | (prefixes == NONE)).all(axis=-1) & (last >= 0)
            return scores.at[jnp.where(complete, last, vocab)].set(-jnp.inf, mode="drop")

        return text.each(ban, scores, last, prefixes)


@dataclasses.dataclass(frozen=True)
class MinLength(Warper):
    """Removes EOS from texts that are too short.

    Attributes:
      min_length: int32, of the whole text, including prompt and EOS; 0 is off.
      min_new_tokens: int32, of the generated text, without EOS; 0 is off.
    """

    about = (
        About("min_length", "no EOS before a text is so long", "transformers", "same text", fields=("min_length",)),
        About(
            "min_new_tokens",
            "no EOS before so many new tokens",
            "transformers",
            "same text",
            fields=("min_new_tokens",),
        ),
    )
    of_logits = True
    removes = True
    reads_text = True

    min_length: int = parameter(
        0, "no end of text before the text, prompt included, has this many tokens; 0 is off", "an integer >= 0",
        lambda x: x >= 0,
    )  # fmt: skip
    min_new_tokens: int = parameter(
        0, "no end of text before this many new tokens; 0 is off", "an integer >= 0", lambda x: x >= 0
    )

    def warp(self, scores, own, text):
        if text.eos is None:
            return scores
        begin = 0 if text.begin is None else text.begin[:, None]
        at = text.positions()
        short = (at < own["min_length"][:, None]) | (at - begin < own["min_new_tokens"][:, None])
        return jnp.where(short[:, :, None], removed(scores, text.eos), scores)
