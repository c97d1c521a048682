"""The search for a good set of sublayers to skip: random sets, and from time to time a Gaussian process's best guess.

Everything is an array of the search's state, so that it runs inside the decoding step. `n` denotes the sublayers that
may be skipped, two for every layer but the first and the last; `H` the trials that are remembered.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

KAPPA, NOISE = 2.5, 1e-2  # in the upper confidence bound, as in SWIFT's search
GUESSES = 256  # random sets that the Gaussian process ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Search:
    """The state of the search. All rows share it, except the lengths of their prompts.

    Scalars have one axis, so that every leaf has an axis to name.

    Attributes:
      best: `[n]` bool, the best set so far, True for a skipped sublayer.
      score: `[1]` float32, its score; -1 before the first trial.
      trials: `[1]` int32.
      idle: `[1]` int32, trials since the best was found.
      tried: `[H, n]` bool, the latest sets.
      scores: `[H]` float32, their scores.
      prompt: `[B]` int32, the tokens of each row's prompt; the only leaf that belongs to the rows.
    """

    best: Any
    score: Any
    trials: Any
    idle: Any
    tried: Any
    scores: Any
    prompt: Any = None


def start(layers: int, history: int) -> Search:
    """A search that begins with every odd layer skipped."""
    best = jnp.repeat(jnp.arange(1, layers - 1) % 2 == 1, 2)
    zero = lambda: jnp.zeros((1,), jnp.int32)
    return Search(
        best,
        jnp.full((1,), -1.0, jnp.float32),
        zero(),
        zero(),
        jnp.zeros((history, *best.shape), bool),
        jnp.zeros((history,), jnp.float32),
    )


def mask(chosen: Array) -> Array:
    """`[n]` as the argument of `LM.layers`: `[L, 2]` bool, in which the first and the last layer stay."""
    return jnp.pad(chosen.reshape(-1, 2), ((1, 1), (0, 0)))


def random_sets(key: Array, count: int, size: int, among: int) -> Array:
    """`count` random subsets `[count, among]` bool of `size` each."""
    order = jnp.argsort(jnp.argsort(jax.random.uniform(key, (count, among)), axis=1), axis=1)
    return order < size


def bound(sets: Array, tried: Array, scores: Array, known: Array, size: int) -> Array:
    """The upper confidence bound `[R]` of sets `[R, n]`, by a Gaussian process fitted to the trials.

    Args:
      sets: to be ranked.
      tried: `[H, n]` bool.
      scores: `[H]`.
      known: `[H]` bool, which trials exist.
      size: of the sets; two that share nothing correlate by exp(-1).
    """

    def near(a, b):
        apart = jnp.sum(a[:, None] != b[None], axis=2)
        return jnp.exp(-apart / (2.0 * size))

    mean = jnp.sum(jnp.where(known, scores, 0.0)) / jnp.maximum(known.sum(), 1)
    centred = jnp.where(known, scores - mean, 0.0)
    spread = jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(centred)) / jnp.maximum(known.sum(), 1)), 1e-6)
    both = known[:, None] & known[None]
    gram = jnp.where(both, near(tried, tried), 0.0) + jnp.diag(jnp.where(known, NOISE, 1.0))
    factor = jax.scipy.linalg.cho_factor(gram)
    across = jnp.where(known[None], near(sets, tried), 0.0)
    expected = across @ jax.scipy.linalg.cho_solve(factor, centred / spread)
    explained = jnp.sum(across * jax.scipy.linalg.cho_solve(factor, across.T).T, axis=1)
    return expected + KAPPA * jnp.sqrt(jnp.maximum(1.0 - explained, 0.0))


def advance(search: Search, matchness: Callable[[Array], Array], size: int, guess_every: int) -> Search:
    """One trial: proposes a set, scores it, and keeps it if it is the best yet.

    Args:
      search: so far.
      matchness: the score of a set `[n]`.
      size: how many sublayers a set skips.
      guess_every: the Gaussian process proposes one of so many trials.
    """
    trial = search.trials[0]
    history, among = search.tried.shape
    sets = random_sets(jax.random.fold_in(jax.random.key(0), trial), GUESSES, size, among)

    def guess():
        known = jnp.arange(history) < trial
        return sets[jnp.argmax(bound(sets, search.tried, search.scores, known, size))]

    proposed = jax.lax.cond(trial % guess_every == guess_every - 1, guess, lambda: sets[0])
    proposed = jnp.where(trial == 0, search.best, proposed)
    score = matchness(proposed)
    better = score > search.score[0]
    slot = trial % history
    return dataclasses.replace(
        search,
        best=jnp.where(better, proposed, search.best),
        score=jnp.where(better, score, search.score),
        trials=search.trials + 1,
        idle=jnp.where(better, 0, search.idle + 1),
        tried=search.tried.at[slot].set(proposed),
        scores=search.scores.at[slot].set(score),
    )


def sublayers(layers: int, share: float) -> int:
    """How many sublayers correspond to a share of those that may be skipped."""
    return math.floor(2 * (layers - 2) * share)
