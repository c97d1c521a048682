"""The contract of an unmask policy, with the confidences and ranks that policies share."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import Named
from specjax.arrays import Array, Bool, Float, Int, PyTree
from specjax.sharding.rules import replicated

if TYPE_CHECKING:  # imported only when it is needed
    from specjax.objectives.base import Objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overview:
    """The model's predictions beyond the active block, for `N` positions.

    These are all of the canvas, or the block if the model's blocks do not see later ones.

    Attributes:
      at: `[B, N]` int32, the positions.
      tokens: `[B, N]` int32, the predicted ids, never the mask id.
      log_probs: `[B, N, V]` float32, see `Guess`.
      log_own: `[B, N, V]` float32, see `Guess`.
      noise: `[B, N]` float32 in [0, 1), this pass's uniforms.
      read: `[B, N]` bool, the positions that this pass predicted.
      known: `[B, N]` bool, the new text's positions that hold a token.
      open: `[B, N]` bool, the positions that were read and hold no token.
      masked: `[B, N]` bool, all positions that hold no token.
      ends: `[B, N]` bool, whether an end of text is predicted.
      place: `[B, N]` int32, the positions, counted from the end of the prompt.
      after: `[B]` int32, the first position after the active block.
      passes: `[B]` int32, forward passes over the canvas before this one.
      blocks: `[B]` int32, how many blocks the canvas has.
    """

    at: Int[Array, "B N"]
    tokens: Int[Array, "B N"]
    log_probs: Float[Array, "B N V"]
    log_own: Float[Array, "B N V"]
    noise: Float[Array, "B N"]
    read: Bool[Array, "B N"]
    known: Bool[Array, "B N"]
    open: Bool[Array, "B N"]
    masked: Bool[Array, "B N"]
    ends: Bool[Array, "B N"]
    place: Int[Array, "B N"]
    after: Int[Array, " B"]
    passes: Int[Array, " B"]
    blocks: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guess:
    """The model's predictions for a row's active block of W positions, after one forward pass.

    Attributes:
      tokens: `[B, W]` int32, the predicted ids, never the mask id; -1 where the logits are not finite.
      log_probs: `[B, W, V]` float32, log-probabilities for computing confidences, without the mask id: the model's own,
        or those after temperature and filters, see `Unmask.warped`.
      masked: `[B, W]` bool, the positions that may be committed.
      committed: `[B, W]` bool, those committed in earlier passes over this block.
      step: `[B]` int32, forward passes over this block before this one.
      entry: `[B]` int32, how many positions were masked when the block began; if blocks count from the beginning of the
        text, how many it has, masked or not.
      noise: `[B, W]` float32 in [0, 1), this pass's uniforms.
      sampled: `[B]` bool, whether the tokens were drawn; otherwise they are the likeliest.
      current: `[B, W]` int32, the ids that stand there now.
      weights: `params["unmask"]`, for a trained policy, or None.
      overview: for a policy that looks at the `whole` canvas, or None.
      log_own: `[B, W, V]` float32, the model's own log-probabilities, whatever `log_probs` is: no temperature, no
        filters, no mask id.
      strict: whether a confidence must be above a threshold, as in the samplers of SDAR, LLaDA 2 and Fast-dLLM v2, or
        may equal it, as in Fast-dLLM's.
      rounded: the number of positions of a block whose schedule is rounded pass by pass, see `scheduled_in`; 0 for an
        even schedule.
      mask_id: the id of an open position in `current`.
    """

    tokens: Int[Array, "B W"]
    log_probs: Float[Array, "B W V"]
    masked: Bool[Array, "B W"]
    committed: Bool[Array, "B W"]
    step: Int[Array, " B"]
    entry: Int[Array, " B"]
    noise: Float[Array, "B W"]
    sampled: Bool[Array, " B"]
    current: Int[Array, "B W"] = None  # type: ignore[assignment]
    weights: PyTree = None
    overview: Any = None
    log_own: Float[Array, "B W V"] = None  # type: ignore[assignment]
    strict: bool = dataclasses.field(default=False, metadata={"static": True})
    rounded: int = dataclasses.field(default=0, metadata={"static": True})
    mask_id: int = dataclasses.field(default=-1, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """The decision of a policy.

    A policy that moves tokens says what stands at each position afterwards: `commit` where it was open, `edit` where it
    was known, `reopen` where it becomes open.

    Attributes:
      commit: `[B, W]` bool; only masked positions count.
      score: `[B, W]` float32: if no masked position was chosen, the one with the highest score is committed.
      tokens: `[B, W]` int32, what to write.
      reopen: `[B, W]` bool, committed positions of the block that become open, or None.
      besides: `[B, N]` int32, tokens to write at further open positions, those of the overview, -1 for none; or None.
      undo: `[B, N]` bool, positions of the overview that become open again, or None.
      end: `[B]` int32, where the canvas is cut, or None.
      edit: `[B, W]` bool, committed positions of the block that `tokens` overwrite, or None.
      stay: `[B]` bool, whether the block is read again although nothing of it is open, or None; for a policy that
        `edits`.
    """

    commit: Bool[Array, "B W"]
    score: Float[Array, "B W"]
    tokens: Int[Array, "B W"]
    reopen: Bool[Array, "B W"] | None = None
    besides: Int[Array, "B N"] | None = None
    undo: Bool[Array, "B N"] | None = None
    end: Int[Array, " B"] | None = None
    edit: Bool[Array, "B W"] | None = None
    stay: Bool[Array, " B"] | None = None


class Unmask(abc.ABC):
    """Chooses what to commit. Implementations are frozen dataclasses. If it chooses nothing, the surest position is
    committed.
    """

    about: ClassVar[Named] = None
    """Its names in the registry."""

    @classmethod
    def objective(cls) -> "type[Objective] | None":
        """The objective with which `specjax train` fits its parameters, imported when needed. Its field `policy` is the
        policy.

        None if there are no parameters, or none that are trained here.
        """
        return None

    def param_shardings(self, mesh: jax.sharding.Mesh, params: Any) -> Any:
        """Where its parameters, `params["unmask"]`, belong on a mesh: a copy on every device."""
        return replicated(mesh, params)

    @property
    def revises(self) -> bool:
        """Whether commits may be taken back, so that no token of a block is final before all are."""
        return False

    @property
    def edits(self) -> bool:
        """Whether it overwrites committed tokens and reads a block without open positions, see `Choice`; such a policy
        `revises`.
        """
        return False

    @property
    def whole(self) -> bool:
        """Whether a guess needs an `Overview`: predictions for more than the active block."""
        return False

    @property
    def lasting(self) -> bool:
        """Whether its memory is for an overview's N positions and lasts as long as the row, instead of for a block."""
        return False

    @property
    def warped(self) -> bool | None:
        """Whether its confidences are probabilities after temperature and filters (True) or the model's own (False).

        None: as in the model's published sampler, see `DiffusionDecoder.warped`.
        """
        return None

    @property
    def idle(self) -> bool:
        """Whether a pass may commit nothing."""
        return False

    @property
    def ordered(self) -> bool:
        """Whether a guess's noise belongs to its positions alone, the same in every pass."""
        return False

    @property
    def sees_mask(self) -> bool:
        """Whether `log_probs` and `log_own` have the mask's probability too, for a policy that takes it for a prediction.

        `Guess.tokens` never holds the mask.
        """
        return False

    def for_model(self, masked: Any) -> "Unmask":
        """The policy with what it takes from a model's settings of diffusion (`specjax.models.Masked`)."""
        return self

    @property
    def slides(self) -> bool:
        """Whether its block may be a window that slides: it decides from one pass alone, with no schedule over a block."""
        return False

    @property
    def fills(self) -> bool:
        """Whether the last block of a block-diffusion model is filled beyond a text's end and then cut.

        The samplers of SDAR, TraDo, LLaDA 2 and Fast-dLLM v2 do so; a policy's field `published` sets it. Otherwise
        positions after the end stay masked.
        """
        return getattr(self, "published", False)

    @property
    def room(self) -> int:
        """How many of the new text's first positions it looks at; a text must have at least as many."""
        return 0

    def plan(self, noise: Array, masked: Array, step: Array, entry: Array) -> Array | None:
        """What a pass will commit, for a policy that knows this before it sees predictions; the arguments are those of
        a `Guess`.

        `[B, W]` int32, 0 for the first, W or more for positions that it will not commit. None if predictions decide.
        """
        return None

    @property
    def opens(self) -> bool:
        """Whether it writes to blocks after the active one, as far as `blocks_open` says."""
        return False

    def blocks_open(self, memory: Any) -> Array | None:
        """How many blocks a pass may write to, from the first on, `[B]` int32, for a policy that `opens` blocks; None for
        all.
        """
        return None

    def sees(self, memory: Any) -> Array | None:
        """How many positions a pass sees, counted from the block's beginning, `[B]` int32; None for all."""
        return None

    @property
    def decoder(self) -> Any:
        """The kind of `DiffusionDecoder` that decodes with it; None for `DiffusionDecoder` itself."""
        return None

    @property
    def block_decoder(self) -> Any:
        """The kind of `BlockDiffusion` that decodes with it, for a policy with a `decoder`; None if models of that kind
        are not supported.
        """
        return None

    @property
    def needs(self) -> tuple[str, ...]:
        """What the decoder's parameters must hold in addition to the target's."""
        return ()

    @property
    def width(self) -> int:
        """The block length that it was made for; 0 for any."""
        return 0

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        """The policy's memory of a block: a pytree whose leaves lead with `[B]`; reset when a row enters a block."""
        return ()

    @abc.abstractmethod
    def __call__(self, guess: Guess, memory: Any) -> tuple[Choice, Any]:
        """The choice, and the new memory."""


class Lasting(Unmask):
    """Decides over the whole canvas, with a memory that lasts as long as the row."""

    @property
    def whole(self):
        return True

    @property
    def lasting(self):
        return True


class Editing(Unmask):
    """Overwrites tokens that it committed."""

    @property
    def revises(self):
        return True

    @property
    def edits(self):
        return True


def confidence(guess: Guess | Overview) -> Array:
    """The probability `[B, W]` of the predicted token (LLaDA's `low_confidence`, Dream's `maskgit_plus`)."""
    picked = jnp.take_along_axis(guess.log_probs, guess.tokens[..., None], axis=-1)[..., 0]
    return jnp.exp(picked)


def margin(guess: Guess | Overview) -> Array:
    """The likeliest token's probability minus the second's, `[B, W]` (Dream's `topk_margin`)."""
    best = jnp.exp(jax.lax.top_k(guess.log_probs, 2)[0])
    return best[..., 0] - best[..., 1]


def negative_entropy(guess: Guess | Overview) -> Array:
    """`sum p log p`, `[B, W]` in nats (Dream's `entropy`)."""
    dist = jnp.exp(guess.log_probs)
    return jnp.sum(jnp.where(dist > 0, dist * guess.log_probs, 0.0), axis=-1)


def random(guess: Guess | Overview) -> Array:
    """This pass's uniforms, `[B, W]`: every position is as good as any other (LLaDA's `random`)."""
    return guess.noise


RULES: dict[str, Callable[[Guess | Overview], Array]] = {
    "low_confidence": confidence,
    "margin": margin,
    "entropy": negative_entropy,
    "random": random,
}
"""How sure a prediction is, by the name of each rule."""


def counted(guess: Guess) -> Array:
    """How many positions of the block were open when it began `[B]`: those that are open, or were committed since."""
    return jnp.sum(guess.masked | guess.committed, axis=1)


def scheduled(steps: int, passes: Array, entry: Array) -> Array:
    """How many of a block's tokens `[B]` so many passes commit.

    Each of `steps` passes (0: `entry`) takes the same number, and the first ones also the remainder.
    """
    count = jnp.maximum(entry, 1) if steps == 0 else jnp.full_like(entry, steps)
    return jnp.minimum(entry // count * passes + jnp.minimum(passes, entry % count), entry)


def scheduled_in(steps: int, step: Array, entry: Array, rounded: int = 0) -> Array:
    """How many of a block's tokens `[B]` pass number `step` commits, see `scheduled`.

    Args:
      steps: passes per block; 0: `entry`.
      step: `[B]` int32, passes before this one.
      entry: `[B]` int32, how many positions were open when the block began.
      rounded: the largest possible number. A pass then commits the remaining tokens divided by the remaining passes,
        rounded; passes without a token are left out (dLLM's samplers). 0: as many in each pass, and the remainder in
        the first ones.
    """
    if not (rounded and steps):
        return scheduled(steps, step + 1, entry) - scheduled(steps, step, entry)
    table = jnp.asarray([_rounded(steps, total) for total in range(rounded + 1)], jnp.int32)
    return jnp.where(step < steps, table[entry, jnp.minimum(step, steps - 1)], 0)


def _rounded(steps, total):
    """The commits of each of so many passes: the published arithmetic, with shares in float32 and halves rounded to even."""
    counts = []
    for left in range(steps, 0, -1):
        open_after, open_before = (1 - (1 - np.float32(n / steps)) for n in (left - 1, left))
        counts.append(min(round(total * (1 - float(open_after / open_before))), total))
        total -= counts[-1]
    counts = [count for count in counts if count]
    return counts + [0] * (steps - len(counts))


def ranks(scores: Array, masked: Array) -> Array:
    """Ranks `[B, W]` int32 of masked positions by falling score, 0 the surest, ties to the lower position; W elsewhere."""
    order = jnp.argsort(jnp.where(masked, -scores, jnp.inf), axis=-1, stable=True)
    return jnp.where(masked, jnp.argsort(order, axis=-1), scores.shape[-1])
