"""Logit bias (OpenAI's API reference, `logit_bias`): added to the model's own logits, before all other warpers."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Warper
from specjax.warpers.lists import Shape, ids_array, listing, tokens


def _read(value):
    pairs = dict(value).items()
    ids = tokens(int(token) for token, _ in pairs)
    biases = tuple(float(bias) for _, bias in pairs)
    if not all(math.isfinite(bias) and abs(bias) <= 1e30 for bias in biases):
        raise ValueError("not finite")
    return tuple(zip(ids, biases, strict=True))


def _array(rows, widths):
    biases = np.zeros((len(rows), *widths), np.float32)
    for row, pairs in enumerate(rows):
        biases[row, : len(pairs)] = [bias for _, bias in pairs]
    return {"ids": ids_array([[token for token, _ in pairs] for pairs in rows], widths[0]), "bias": biases}


@dataclasses.dataclass(frozen=True)
class LogitBias(Warper):
    """Adds to the logits of some tokens.

    Attributes:
      logit_bias: `ids` `[B, K]` int32, padded with -1, and `bias` `[B, K]` float32.
    """

    about = About("logit_bias", "adds to the logits of some tokens", "OpenAI's API", "same text")
    of_logits = True

    logit_bias: tuple[tuple[int, float], ...] = listing(
        'added to the logits of tokens, such as {"198": -100, "262": 2.5}', "an object of token ids and numbers",
        Shape(_read, lambda pairs: (len(pairs),), _array),
    )  # fmt: skip

    def warp(self, scores, own, text):
        ids, bias = own["logit_bias"]["ids"], own["logit_bias"]["bias"]
        rows, vocab = jnp.arange(ids.shape[0])[:, None], scores.shape[-1]
        added = jnp.zeros((ids.shape[0], vocab)).at[rows, jnp.where(ids >= 0, ids, vocab)].add(bias, mode="drop")
        return scores + added[:, None]
