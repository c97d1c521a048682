"""The state that a decoder carries from step to step.

In the shape descriptions `B` denotes rows, `L` the text buffer, `D` the deepest node a step may verify.
"""

import dataclasses
import enum
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Bool, Float, Int, Key, PyTree
from specjax.pretty import Pretty
from specjax.sampling_params import SamplingArrays, begun


class Finish(enum.IntEnum):
    """Why a row stopped; RUNNING if it has not."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    STOP = 3
    ERROR = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since the row's prompt was inserted.

    Attributes:
      steps: `[B]` int32, target passes.
      accepted: `[B, D + 1]` int32, how many steps accepted 0, 1, ... D draft tokens (diffusion: committed that many
        tokens).
    """

    steps: Int[Array, " B"]
    accepted: Int[Array, "B D+1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbs(Pretty):
    """Log-probabilities of the emitted tokens, at their place in the text; other places mean nothing.

    Attributes:
      raw: `[B, L]` float32, under the model's own softmax.
      tempered: `[B, L]` float32, under the softmax of the model's own logits over the row's temperature, without any
        other warper; greedy rows: over 1, which is `raw`.
      warped: `[B, L]` float32, under the distribution that they were drawn from (greedy rows: after the repetition
        penalty).
      certainty: `[B, L]` float32, nats: the Kullback-Leibler divergence of the uniform distribution over the vocabulary
        from the model's own, at each of these places. The mean over a text is its self-certainty (arXiv:2502.18581).
    """

    raw: Float[Array, "B L"]
    tempered: Float[Array, "B L"]
    warped: Float[Array, "B L"]
    certainty: Float[Array, "B L"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows(Pretty):
    """The part of every decoder's state that describes its rows.

    Attributes:
      tokens: `[B, L]` int32, prompt and output.
      length: `[B]` int32, committed tokens.
      finish: `[B]` int32, a `Finish` value.
      key: `[B]` typed row keys.
      stats: counters.
      prompt_length: `[B]` int32.
      limit: `[B]` int32, the length at which a row stops.
      eos: `[B, K]` int32, ids that end a row; -1 padded.
      sampling: the rows' sampling parameters.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    finish: Int[Array, " B"]
    key: Key[Array, " B"]
    stats: Stats
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    eos: Int[Array, "B K"]
    sampling: SamplingArrays

    @classmethod
    def blank(
        cls, batch: int, capacity: int, commits: int, eos_width: int = 1, *, fill: int = 0, length: int = 0, **own: Any
    ) -> Self:
        """A state of finished rows, to be filled by an insert. Every array is a separate buffer, so that all can be donated.

        Args:
          batch: B.
          capacity: L.
          commits: the most tokens that a step counts as accepted, D.
          eos_width: K.
          fill: the value that `tokens` hold.
          length: the length of every row.
          **own: the fields beyond those of `Rows`.
        """
        zeros = lambda: jnp.zeros((batch,), jnp.int32)
        return cls(
            tokens=jnp.full((batch, capacity), fill, jnp.int32),
            length=zeros() + length,
            finish=zeros() + Finish.LENGTH,
            key=jax.vmap(lambda i: jax.random.key(i, impl="threefry2x32"))(zeros()),
            stats=Stats(zeros(), jnp.zeros((batch, commits + 1), jnp.int32)),
            prompt_length=zeros() + length,
            limit=zeros() + length,
            eos=jnp.full((batch, eos_width), -1, jnp.int32),
            sampling=SamplingArrays.blank(batch),
            **own,
        )

    def drawing(self, sampling: SamplingArrays) -> Self:
        """These rows with other options and no new tokens yet."""
        return dataclasses.replace(self, sampling=sampling)

    def place(self, rows: Int[Array, " R"], new: Self, axes: PyTree) -> Self:
        """This state with the rows of `new` in place of its own.

        Args:
          rows: `[R]` int32, where they go; B or more drops one (padding).
          new: the state of R rows.
          axes: logical axis names of every leaf. A leaf that does not lead with "batch" is shared by the rows and taken
            from `new`.
        """

        def put(old, new, axes):
            return old.at[rows].set(new, mode="drop") if axes[:1] == ("batch",) else new

        # keys are copied as data: under `jax_debug_key_reuse` an array of keys may be written to one place only
        old, new = (dataclasses.replace(own, key=jax.random.key_data(own.key)) for own in (self, new))
        placed = jax.tree.map(put, old, new, dataclasses.replace(axes, key=("batch", None)))
        return dataclasses.replace(placed, key=jax.random.wrap_key_data(placed.key, impl="threefry2x32"))

    @property
    def done(self) -> Bool[Array, " B"]:
        """`[B]` bool, whether each row has finished."""
        return self.finish != Finish.RUNNING


def finish_rows(
    state: Rows, length: Int[Array, " B"], ended: Bool[Array, " B"], failed: Bool[Array, " B"]
) -> Int[Array, " B"]:
    """The rows' new `finish` `[B]`, after a step of any decoder.

    The precedence is EOS, then the limit, then a failure. A text that ends at its limit with EOS has ended by itself. A
    failure lies after the tokens that the step committed. If the text ends with those, a decoder that takes one token
    at a time would never have come to it. So the reason does not depend on how many tokens each step brings.

    Args:
      state: before the step, with its limit; finished rows stay as they are.
      length: `[B]`, after the step.
      ended: `[B]` bool, rows whose committed text ends with EOS.
      failed: `[B]` bool, rows whose logits were not finite.
    """
    finish = jnp.where(failed, Finish.ERROR, Finish.RUNNING)
    finish = jnp.where(length >= state.limit, Finish.LENGTH, finish)
    finish = jnp.where(ended, Finish.EOS, finish)
    return jnp.where(state.done, state.finish, finish).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState(Rows):
    """The rows of the autoregressive decoder.

    `tokens` are garbage from `length` on. The last committed token is the root; it has no cache entry yet.

    Attributes:
      cache: the target's cache; opaque.
      draft: the drafter's state; opaque.
      logprobs: log-probabilities, or None if they were not asked for.
      carried: by warper: the sums `[B]` over the new tokens, float32, for warpers that carry one (`Warper.carries`), and
        the states `[B, ...]` that they lead to (`Warper.walks`).
    """

    cache: PyTree
    draft: PyTree
    logprobs: LogProbs | None = None
    carried: dict[str, Any] = dataclasses.field(default_factory=dict)

    def drawing(self, sampling: SamplingArrays) -> Self:
        """See `Rows.drawing`: what warpers carry begins anew."""
        return dataclasses.replace(super().drawing(sampling), carried=begun(sampling))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix(Pretty):
    """The common beginning of several prompts, computed once: one row, after all but the last of its tokens.

    Attributes:
      tokens: `[1, L]` int32, the prefix; the rest means nothing.
      cache: the target's cache of one row.
      draft: the drafter's state of one row; scalars in place of what the rows of a state share.
      length: static, how many tokens.
    """

    tokens: Int[Array, "1 L"]
    cache: PyTree
    draft: PyTree
    length: int = dataclasses.field(metadata={"static": True})
