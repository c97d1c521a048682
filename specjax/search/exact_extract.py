"""Exact extraction (Castel et al. 2021, arXiv:2108.05857): the likeliest answer among all spans of a passage.

In the shape descriptions `R` denotes rows, each for the spans that begin at one place, `T` the longest span, `V` the
vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.lm import LM, Block, Source, Wants
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.sampling_params import SamplingArrays
from specjax.settings import settled
from specjax.speculative import prefill_width, speculative

ROWS = 16
"""How many starting places are read at a time; only their logits exist at once."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of a passage.

    Attributes:
      start: its first token.
      stop: the token after its last one.
      log_prob: natural logarithm of the probability that the answer is these tokens and ends there, in the model's own
        distribution.
    """

    start: int
    stop: int
    log_prob: float


def exact_extract(
    lm: LM,
    params: Any,
    prompt: Sequence[int],
    passage: Sequence[int],
    *,
    eos: Sequence[int],
    longest: int = 16,
    count: int = 1,
    source: Any = None,
) -> list[Span]:
    """The likeliest spans of a passage as the answer to a prompt, the best first.

    This is not a search: all spans are scored. Spans that begin at one place share a row, and the prompt is prefilled
    once.

    A model with an encoder reads the question and the passage as its `source`, as published (T5). Its prompt is then how its
    texts begin (`Model.starts`).

    Args:
      lm: the model, on one device.
      params: its parameters.
      prompt: token ids, usually with the passage and a question; at least one.
      passage: token ids as they would appear in an answer (usually after a space).
      eos: ids that end an answer.
      longest: tokens of a span, at most.
      count: how many spans.
      source: what the model's encoder reads: token ids, or features `[S, F]`; None without an encoder.

    Raises:
      ValueError: for an empty prompt or passage, no EOS, ids outside the vocabulary, or fewer than one token or span; for a
        model with an encoder and no source, or the other way round.
    """
    if not len(prompt) or not len(passage) or not len(eos) or longest < 1 or count < 1:
        raise ValueError("exact_extract needs a prompt, a passage, an EOS, and longest and count of at least 1")
    if outside := [token for token in (*prompt, *passage, *eos) if not 0 <= token < lm.vocab_size]:
        raise ValueError(f"id {outside[0]} is outside the vocabulary of {lm.vocab_size} tokens")
    longest = min(longest, len(passage))
    padded = np.concatenate([np.asarray(passage, np.int32), np.full(longest, -1, np.int32)])
    starts = np.arange(len(passage))
    tokens = padded[starts[:, None] + np.arange(longest)[None]]
    cache = _prefilled(lm, params, prompt, longest, source)
    spans: list[Span] = []
    for at in range(0, len(tokens), ROWS):
        part = np.full((ROWS, longest), -1, np.int32)
        part[: len(tokens[at : at + ROWS])] = tokens[at : at + ROWS]
        given = np.int32(prompt[-1]), np.int32(len(prompt)), part, np.asarray(eos, np.int32)
        scores = jax.device_get(_scores(lm, params, cache, *jax.device_put(given)))
        for flat in np.argsort(-scores, axis=None, kind="stable")[:count]:
            row, length = divmod(int(flat), longest)
            if np.isfinite(scores[row, length]):
                spans.append(Span(at + row, at + row + length + 1, float(scores[row, length])))
    return sorted(spans, key=lambda span: -span.log_prob)[:count]


def _prefilled(lm, params, prompt, room, source):
    """The cache of one row after all but the prompt's last token; prompts of similar length use the same programs."""
    plain, length = speculative(lm), len(prompt)
    width = prefill_width(length)
    size = 1 + max(1, -(-(length - 1) // width)) * width
    read = None if source is None else Source.of([source], -(-len(source) // 128) * 128)
    tokens_read = read.inputs.shape[1] if read is not None and read.is_tokens else 0
    capacity = -(-max(size + room + plain.slack, tokens_read) // 128) * 128
    every = {"target": params, "draft": None}
    tokens = np.pad(np.asarray([prompt], np.int32), ((0, 0), (0, size - length)))
    given = np.full(1, length, np.int32)
    prompts = Prompts(tokens, given, row_keys(0, [""]), given + 1, SamplingArrays.make(1), width=width, source=read)
    state = decoding.empty(plain, every, 1, capacity, jax.tree.leaves(params)[0].dtype, 1)
    state = decoding.insert(plain, every, state, np.zeros(1, np.int32), prompts)
    return state.cache


def _score(lm, params, cache, last, length, tokens, eos):
    """Log-probabilities `[R, T]` of the spans that begin with each row and end after column t; -inf at padding."""
    rows, longest = tokens.shape
    cache = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *leaf.shape[1:])), cache)
    block = jnp.concatenate([jnp.broadcast_to(last, (rows, 1)), tokens], axis=1)
    begin = jnp.broadcast_to(length - 1, (rows,))
    positions = begin[:, None] + jnp.arange(longest + 1)[None]
    logits = lm(params, Block(block, positions, begin), cache, wants=Wants(logits=True)).logits
    dists = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    own = jnp.take_along_axis(dists[:, :-1], jnp.maximum(tokens, 0)[:, :, None], axis=2)[:, :, 0]
    ends = jax.nn.logsumexp(dists[:, 1:, eos], axis=2)
    return jnp.where(tokens >= 0, jnp.cumsum(own, axis=1) + ends, -jnp.inf)


_scores = jax.jit(settled(_score), static_argnums=0)
