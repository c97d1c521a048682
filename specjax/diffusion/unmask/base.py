"""The contract of an unmask policy, and what policies share: confidences and ranks."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.about import Named
from specjax.sharding.rules import replicated

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guess:
    """What the model predicts for a row's active block of W positions, after one forward pass.

    Attributes:
      tokens: `[B, W]` int32, the predicted ids, never the mask id; -1 where the logits are not finite.
      log_law: `[B, W, V]` float32, the model's law: no temperature, no filters, no mask id.
      masked: `[B, W]` bool, the positions that may be committed.
      committed: `[B, W]` bool, those committed in earlier passes over this block.
      step: `[B]` int32, forward passes over this block before this one.
      entry: `[B]` int32, how many positions were masked when the block began.
      noise: `[B, W]` float32 in [0, 1), this pass's uniforms.
      sampled: `[B]` bool, whether the tokens were drawn; else they are the likeliest.
      weights: `params["unmask"]`, of a policy that was trained, or None.
    """

    tokens: Array
    log_law: Array
    masked: Array
    committed: Array
    step: Array
    entry: Array
    noise: Array
    sampled: Array
    weights: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """What a policy decided.

    Attributes:
      commit: `[B, W]` bool; only masked positions count.
      score: `[B, W]` float32: where no masked position was chosen, the surest one is committed.
      tokens: `[B, W]` int32, what to write.
      reopen: `[B, W]` bool, committed positions of the block that become open again, or None.
    """

    commit: Array
    score: Array
    tokens: Array
    reopen: Array | None = None


class Unmask(abc.ABC):
    """Chooses what to commit. Implementations are frozen dataclasses; where it chooses nothing, the surest is committed."""

    about: ClassVar[Named] = None
    """Its names in the registry."""

    def param_shardings(self, mesh: jax.sharding.Mesh, params: Any) -> Any:
        """Where its parameters, `params["unmask"]`, belong on a mesh: a copy on every device."""
        return replicated(mesh, params)

    @property
    def revises(self) -> bool:
        """Whether commits may be taken back, so that no token of a block is final before all are."""
        return False

    @property
    def ends(self) -> bool:
        """Whether a committed end of text ends the canvas there, before all that precedes it is known."""
        return False

    @property
    def decoder(self) -> Any:
        """The kind of `Diffusion` that decodes with it; None is that class itself."""
        return None

    @property
    def needs(self) -> tuple[str, ...]:
        """What the decoder's parameters must hold besides the target's."""
        return ()

    @property
    def width(self) -> int:
        """The block length that it was made for; 0: any."""
        return 0

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        """What the policy remembers of a block: a pytree whose leaves lead with `[B]`; reset where a row enters a block."""
        return ()

    @abc.abstractmethod
    def __call__(self, guess: Guess, memory: Any) -> tuple[Choice, Any]:
        """The choice, and what to remember."""


def confidence(guess: Guess) -> Array:
    """The probability `[B, W]` of the predicted token (LLaDA's `low_confidence`, Dream's `maskgit_plus`)."""
    picked = jnp.take_along_axis(guess.log_law, guess.tokens[..., None], axis=-1)[..., 0]
    return jnp.exp(picked)


def margin(guess: Guess) -> Array:
    """The likeliest token's probability less the second's, `[B, W]` (Dream's `topk_margin`)."""
    best = jnp.exp(jax.lax.top_k(guess.log_law, 2)[0])
    return best[..., 0] - best[..., 1]


def negative_entropy(guess: Guess) -> Array:
    """`sum p log p`, `[B, W]` in nats (Dream's `entropy`)."""
    law = jnp.exp(guess.log_law)
    return jnp.sum(jnp.where(law > 0, law * guess.log_law, 0.0), axis=-1)


def random(guess: Guess) -> Array:
    """This pass's uniforms, `[B, W]`: any position is as good as another (LLaDA's `random`)."""
    return guess.noise


RULES: dict[str, Callable[[Guess], Array]] = {
    "low_confidence": confidence,
    "margin": margin,
    "entropy": negative_entropy,
    "random": random,
}
"""How sure a prediction is, by the name of what is committed last."""


def ranks(scores: Array, masked: Array) -> Array:
    """Ranks `[B, W]` int32 of masked positions by falling score, 0 the surest, ties to the lower position; W elsewhere."""
    order = jnp.argsort(jnp.where(masked, -scores, jnp.inf), axis=-1, stable=True)
    return jnp.where(masked, jnp.argsort(order, axis=-1), scores.shape[-1])
