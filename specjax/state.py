"""What a decoder carries from step to step.

In the shape descriptions `B` denotes rows, `L` the text buffer, `D` the deepest node a step may verify.
"""

import dataclasses
import enum
from typing import Any

import jax

from specjax.sampling_params import Sampling

Array = jax.Array
PyTree = Any


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
      accepted: `[B, D + 1]` int32, how many steps accepted 0, 1, ... D draft tokens (diffusion: committed so many tokens).
    """

    steps: Array
    accepted: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the emitted tokens, at their place in the text; meaningless elsewhere.

    Attributes:
      raw: `[B, L]` float32, under the model's own softmax.
      warped: `[B, L]` float32, under the law they were drawn from (greedy rows: after the repetition penalty).
    """

    raw: Array
    warped: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What every decoder's state has of its rows.

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

    tokens: Array
    length: Array
    finish: Array
    key: Array
    stats: Stats
    prompt_length: Array
    limit: Array
    eos: Array
    sampling: Sampling

    @property
    def done(self) -> Array:
        """`[B]` bool."""
        return self.finish != Finish.RUNNING


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState(Rows):
    """The rows of the autoregressive decoder: `tokens` are garbage from `length` on, and the last committed token is the root,
    whose cache entry does not exist yet.

    Attributes:
      cache: the target's cache; opaque.
      draft: the drafter's state; opaque.
      logprobs: log-probabilities, or None where they were not asked for.
    """

    cache: PyTree
    draft: PyTree
    logprobs: LogProbs | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """What prompts that begin alike have in common, computed once: one row, after all but the last of its tokens.

    Attributes:
      tokens: `[1, L]` int32, the prefix and nothing meaningful after it.
      cache: the target's cache of one row.
      draft: the drafter's state of one row; scalars in place of what the rows of a state share.
      length: static, how many tokens.
    """

    tokens: Array
    cache: PyTree
    draft: PyTree
    length: int = dataclasses.field(metadata={"static": True})
