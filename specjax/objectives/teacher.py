"""The common part of heads' objectives: a frozen target's distributions some tokens ahead, in the draft's vocabulary.

In the shape descriptions `V` denotes the target's vocabulary, `U` the draft's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.chunks import chunked
from specjax.lm import Output, Wants
from specjax.objectives.base import Batch, Objective, of_target
from specjax.objectives.losses import TINY, ForwardKL, Loss, acceptance, agreement
from specjax.objectives.means import Mean

Array = jax.Array
PyTree = Any
Ids = tuple[int, ...]

CHUNK = 2048
"""The number of positions whose distributions exist at a time."""
SHARE = 8
"""If the draft has at most one of so many tokens, the target's distributions over them are kept for the gradient."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Distribution:
    """The target's distributions at some positions.

    Attributes:
      logits: `[B, T, U]`, over the draft's columns.
      known: `[B, T]` bool, whether the target's likeliest next token is one that the draft can say.
      outside: `[B, T]`, the target's probability of all other tokens; None if the draft can say every token.
    """

    logits: Array
    known: Array
    outside: Array | None = None


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A batch as the target reads it. Its distributions are made where they are needed, never all at once over all tokens.

    Attributes:
      batch: the text.
      output: the target's: the head's input, and the source of the distributions.
      unembed: from `grounds` to logits `[..., V]`.
      ids: the draft's vocabulary; empty for all tokens.
    """

    batch: Batch
    output: Output
    unembed: Callable[[PyTree], Array]
    ids: Ids = ()

    @property
    def grounds(self) -> PyTree:
        """The source of distributions: final features `[B, T, E]`, or the likeliest tokens if those were captured."""
        return self.output.final if self.output.topk is None else self.output.topk

    def columns(self, tokens: Array) -> Array:
        """The columns of tokens in the draft's vocabulary, int32; -1 for tokens that it lacks."""
        if not self.ids:
            return tokens
        found = np.full((max(self.ids) + 1,), -1, np.int32)
        found[np.asarray(self.ids)] = np.arange(len(self.ids))
        return jnp.asarray(found).at[tokens].get(mode="fill", fill_value=-1)

    @property
    def labels(self) -> Array:
        """`[B, T]`: the columns of the tokens after every slot, see `columns`; the last slot's is arbitrary."""
        return self.columns(jnp.roll(self.batch.tokens, -1, axis=1))

    def ahead(self, x: Array, steps: int, width: int) -> Array:
        """`[B, width, ...]`: slot t holds x of slot t + steps."""
        return x[:, steps : steps + width]

    def dist(self, grounds: PyTree) -> Distribution:
        """The target's distributions at some slots of `grounds`, `[B, T, ...]`, without gradient."""
        every = jax.lax.stop_gradient(self.unembed(grounds))
        if not self.ids:
            return Distribution(every, jnp.ones(every.shape[:-1], bool))
        logits = every[..., np.asarray(self.ids, np.int32)]
        said = jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(every, axis=-1)
        known = logits.max(axis=-1) == every.max(axis=-1)
        return Distribution(logits, known, jnp.maximum(-jnp.expm1(said), 0.0))


def teach(drafter, target_params, batch: Batch, ids: Ids, wants: Wants) -> Teacher:
    """Reads a batch with the target of a bound drafter.

    Args:
      drafter: its field `target` is the LM.
      target_params: the target's parameters.
      batch: the text.
      ids: the draft's vocabulary; empty for all tokens.
      wants: what the head needs in addition to the final features.
    """
    target = drafter.target
    output = of_target(target, target_params, batch, wants | Wants(final=True))
    if output.topk is None:
        return Teacher(batch, output, functools.partial(target.unembed, target_params), ids)
    return Teacher(batch, output, functools.partial(spread_evenly, target.vocab_size), ids)


def spread_evenly(size: int, likeliest: tuple[Array, Array]) -> Array:
    """A distribution `[..., V]` float32 from its likeliest tokens: the others share the remaining mass evenly.

    Args:
      size: V.
      likeliest: their log-probabilities `[..., k]`, and their ids `[..., k]` int32.
    """
    values, ids = likeliest
    left = jnp.maximum(-jnp.expm1(jax.nn.logsumexp(values, axis=-1, keepdims=True)), TINY)
    rest = jnp.broadcast_to(jnp.log(left / max(size - values.shape[-1], 1)), (*values.shape[:-1], size))
    return jnp.put_along_axis(rest, ids, values, axis=-1, inplace=False)


@dataclasses.dataclass(frozen=True)
class Guess:
    """One head's distributions for the token `steps + 1` after slot t's feature, t < W.

    Attributes:
      inputs: arrays `[B, W, ...]` from which they are made.
      dist: from `inputs` of some slots to logits `[B, ..., U]`; it contains everything else that it depends on.
      steps: see above.
      weight: of its loss.
      besides: `[B, W]`, another loss of every slot, with its weight; None: there is none.
    """

    inputs: PyTree
    dist: Callable[[PyTree], Array]
    steps: int
    weight: float
    besides: Array | None = None

    @property
    def width(self) -> int:
        """W."""
        return jax.tree.leaves(self.inputs)[0].shape[1]

    def aligned(self, length: int) -> PyTree:
        """`inputs` `[B, length, ...]` at the place of the target's distribution that they are compared with: slot t +
        steps.
        """
        behind = length - self.steps - self.width
        pad = lambda x: jnp.pad(x, ((0, 0), (self.steps, behind), *[(0, 0)] * (x.ndim - 2)))
        return jax.tree.map(pad, self.inputs)


def score(
    teacher: Teacher, guesses: list[Guess], divergence: Loss, mean: Mean, aligned: int = 0
) -> tuple[Array, dict[str, Array]]:
    """The weighted losses of some guesses, one for each, and how often each would be accepted.

    A guess with `steps` s at slot t is compared with the target's distribution after token t + s, if token t + s + 1 is
    to be predicted and belongs to slot t's document. A token that the draft cannot say counts as a wrong guess.

    Args:
      teacher: the batch as the target reads it.
      guesses: of depth 1, 2, ...
      divergence: between a guess and the target's distribution.
      mean: takes the means.
      aligned: of every guess but the first, only those places count where the text's token was among so many likeliest
        of the guess before, and where the place before counted in that guess (GRIFFIN, arXiv:2502.11018). 0: all count.
    """
    loss = jnp.zeros(())
    metrics = {}
    weight = jnp.zeros((), jnp.float32)
    known, every = _compared(teacher, guesses, divergence, aligned)
    counted = jnp.ones(known.shape, bool)
    for number, (guess, told) in enumerate(zip(guesses, every, strict=True)):
        at = slice(guess.steps, guess.steps + guess.width)
        here = jax.tree.map(lambda x, at=at: x[:, at], told)
        said = known[:, at]
        due = teacher.batch.due(guess.steps + 1)[:, : guess.width] & counted[:, at]
        loss += guess.weight * divergence.taken(here.numbers, due, mean, said)
        if guess.besides is not None:
            loss += mean(guess.besides, due)
        if number == 0:
            weight = due.sum()
        metrics[of_depth("acceptance", number)] = mean(here.kept, due)
        metrics[f"agreement_{number + 1}"] = mean(here.agreed * said, due)
        if told.found is not None:
            counted = told.found & jnp.pad(counted[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return loss, metrics | {"weight": weight}


class Told(NamedTuple):
    """What a guess is worth at the places `[B, T]` of the target's distributions.

    Attributes:
      numbers: of the loss, see `Loss.numbers`.
      kept: `acceptance`.
      agreed: `agreement`.
      found: whether the text's token is among the guess's likeliest; None if nobody asks.
    """

    numbers: tuple[Array, ...]
    kept: Array
    agreed: Array
    found: Array | None


def _compared(teacher: Teacher, guesses: list[Guess], divergence: Loss, aligned: int) -> tuple[Array, list[Told]]:
    """`Distribution.known`, `[B, T]`, and what every guess is worth.

    Distributions are made for some slots at a time, the target's once for all guesses, and made again for the gradient. Only
    the target's over a small part of its tokens are kept, since the product with all of them would be most of the work.
    """
    length, size = teacher.batch.tokens.shape[1], positions_at_a_time(teacher.batch)
    grounds, dist_of = teacher.grounds, teacher.dist
    if teacher.ids and SHARE * len(teacher.ids) <= jax.eval_shape(teacher.unembed, grounds).shape[-1]:
        grounds, dist_of = chunked(teacher.dist, grounds, size), lambda dist: dist
    inputs = grounds, [guess.aligned(length) for guess in guesses], teacher.labels

    def compare(inputs):
        dist, every = dist_of(inputs[0]), []
        for guess, own in zip(guesses, inputs[1], strict=True):
            q = guess.dist(own)
            kept = jax.lax.stop_gradient((acceptance(dist.logits, q, dist.outside), agreement(dist.logits, q)))
            found = among_likeliest(q, inputs[2], aligned) if aligned else None
            every.append(Told(divergence.numbers(dist.logits, q, dist.outside, inputs[2]), *kept, found))
        return dist.known, every

    return chunked(compare, inputs, size)


def agreed(teacher: Teacher, guess: Guess) -> Array:
    """`[B, W]` bool, whether a guess's likeliest tokens are the target's; the distributions of some slots exist at a time."""

    def compare(inputs):
        dist = teacher.dist(inputs[0])
        return dist.known & (jnp.argmax(dist.logits, axis=-1) == jnp.argmax(guess.dist(inputs[1]), axis=-1))

    inputs = teacher.grounds, guess.aligned(teacher.batch.tokens.shape[1])
    told = chunked(compare, inputs, positions_at_a_time(teacher.batch))
    return told[:, guess.steps : guess.steps + guess.width]


def among_likeliest(logits: Array, labels: Array, count: int) -> Array:
    """`[...]` bool, whether the columns `labels` `[...]` are among the `count` likeliest of logits `[..., U]`; no -1 is."""
    own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)
    return (labels >= 0) & ((logits > own).sum(axis=-1) < count)


def positions_at_a_time(batch: Batch) -> int:
    """How many slots of every row of a batch have their distributions at a time."""
    return max(1, CHUNK // len(batch.tokens))


def of_depth(name: str, number: int) -> str:
    """The name of a metric for guess `number`, counted from 0; the first guess keeps the plain name.

    >>> [of_depth("acceptance", number) for number in range(3)]
    ['acceptance', 'acceptance_2', 'acceptance_3']
    """
    return f"{name}_{number + 1}" if number else name


@dataclasses.dataclass(frozen=True)
class HeadObjective(Objective):
    """A head over a frozen target's features, possibly over fewer tokens than the target knows.

    Attributes:
      drafter: bound to the target.
      ids: the draft's vocabulary; empty for the target's.
      divergence: between the distributions.
    """

    follows_dtype = True

    drafter: Any
    ids: Ids = ()
    divergence: Loss = ForwardKL()

    @property
    def reads(self):
        return self.drafter.feature_wants

    @property
    def columns(self) -> np.ndarray | None:
        """`ids` as an array; None for the target's vocabulary."""
        return np.asarray(self.ids, np.int32) if self.ids else None

    def init(self, key, target_params):
        """Fresh parameters over the columns `ids`, without the list itself, which is not trained."""
        params = self.drafter.init_params(key, target_params)
        if self.columns is None:
            return params
        own = self.drafter.trimmed(params, target_params, self.columns)[1]
        return {name: value for name, value in own.items() if name != "ids"}

    def export(self, params):
        return params if self.columns is None else {**params, "ids": self.columns}
