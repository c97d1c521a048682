"""What the objectives of heads share: a frozen target's laws, seen through the draft's vocabulary, some tokens ahead."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Output, Wants
from specjax.train.losses import ForwardKL, Loss, acceptance, agreement
from specjax.train.means import Mean
from specjax.train.objective import Batch, Objective, read

Array = jax.Array
Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A batch as the target reads it.

    Attributes:
      batch: the text.
      output: the target's, without gradient; its logits over the draft's columns.
      known: `[B, T]` bool, whether the target's likeliest next token is one that the draft can say.
      outside: `[B, T]`, the target's probability of all others; None where the draft can say every token.
    """

    batch: Batch
    output: Output
    known: Array
    outside: Array | None = None

    def ahead(self, x: Array, steps: int, width: int) -> Array:
        """`[B, width, ...]`: slot t holds x of slot t + steps."""
        return x[:, steps : steps + width]


def teach(drafter, target_params, batch: Batch, ids: Ids, wants: Wants) -> Teacher:
    """Reads a batch with the target of a bound drafter.

    Args:
      drafter: its field `target` is the LM.
      target_params: of the target.
      batch: the text.
      ids: the draft's vocabulary; empty: all.
      wants: what the head needs beside the logits.
    """
    output = read(drafter.target, target_params, batch, wants | Wants(logits=True))
    output = jax.lax.stop_gradient(output)
    known, outside = jnp.ones(batch.tokens.shape, bool), None
    if ids:
        columns = np.asarray(ids, np.int32)
        inside = np.zeros((drafter.target.vocab_size,), bool)
        inside[columns] = True
        known = jnp.asarray(inside)[jnp.argmax(output.logits, axis=-1)]
        every, output = output.logits, dataclasses.replace(output, logits=output.logits[..., columns])
        said = jax.nn.logsumexp(output.logits, axis=-1) - jax.nn.logsumexp(every, axis=-1)
        outside = jnp.maximum(-jnp.expm1(said), 0.0)
    return Teacher(batch, output, known, outside)


@dataclasses.dataclass(frozen=True)
class Guess:
    """One head's laws: `logits` `[B, W, U]` of the token `steps + 1` after slot t's feature, t < W."""

    logits: Array
    steps: int
    weight: float


def score(teacher: Teacher, guesses: list[Guess], divergence: Loss, mean: Mean) -> tuple[Array, dict[str, Array]]:
    """The weighted losses of some guesses, each on its own, and how often each would be accepted.

    A guess of `steps` s at slot t is compared with the target's law after token t + s, where token t + s + 1 is to be
    predicted and is of slot t's document. A token that the draft cannot say is one that it guesses wrongly.
    """
    loss = jnp.zeros(())
    metrics = {}
    weight = jnp.zeros((), jnp.float32)
    for number, guess in enumerate(guesses):
        width = guess.logits.shape[1]
        law = teacher.ahead(teacher.output.logits, guess.steps, width)
        known = teacher.ahead(teacher.known, guess.steps, width)
        outside = None if teacher.outside is None else teacher.ahead(teacher.outside, guess.steps, width)
        due = teacher.batch.due(guess.steps + 1)[:, :width]
        loss += guess.weight * divergence(law, guess.logits, due, mean=mean, known=known, outside=outside)
        if number == 0:
            weight = due.sum()
        metrics[of_depth("acceptance", number)] = mean(acceptance(law, guess.logits, outside), due)
        metrics[f"agreement_{number + 1}"] = mean(agreement(law, guess.logits) * known, due)
    return loss, metrics | {"weight": weight}


def of_depth(name: str, number: int) -> str:
    """What a metric of the number-th guess, from 0 on, is called: the first has the name itself.

    >>> [of_depth("acceptance", number) for number in range(3)]
    ['acceptance', 'acceptance_2', 'acceptance_3']
    """
    return f"{name}_{number + 1}" if number else name


@dataclasses.dataclass(frozen=True)
class HeadObjective(Objective):
    """A head over a frozen target's features, perhaps over fewer tokens than the target knows.

    Attributes:
      drafter: bound to the target.
      ids: the draft's vocabulary; empty: the target's.
      divergence: between the laws.
    """

    drafter: Any
    ids: Ids = ()
    divergence: Loss = ForwardKL()

    def init(self, key, target_params):
        """Fresh parameters over the columns `ids`, without the list itself, which is not trained."""
        params = self.drafter.init_params(key, target_params)
        if not self.ids:
            return params
        own = self.drafter.trimmed(params, target_params, np.asarray(self.ids, np.int32))[1]
        return {name: value for name, value in own.items() if name != "ids"}

    def export(self, params):
        return {**params, "ids": np.asarray(self.ids, np.int32)} if self.ids else params
