"""A trained filter decides which predictions are final: Learn2PD (arXiv:2509.25188)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Guess, Unmask, confidence, ranks, scheduled

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Learn2PD(Unmask):
    """Commits what the filter finds final, and always the surest, as many as a schedule asks for. The filter sees how sure the
    model is at every position of the block.

    Its parameters, `params["unmask"]`, are {`first`: {`kernel` `[W, H]`, `bias`}, `second`: {`kernel` `[H, W]`, `bias`}}. They
    belong to one model and one block length.

    Attributes:
      threshold: of the filter's probability.
      block_length: W, that it was trained for.
      hidden: H.
      steps: passes a block of the schedule, see `Fixed`; 0: one token a pass.
    """

    about = About(
        "learn2pd",
        "what a trained filter finds final",
        "arXiv:2509.25188",
        "lossy",
        fields=("threshold", "steps"),
        loads="filter",
    )

    threshold: float = 0.96
    block_length: int = 32
    hidden: int = 32
    steps: int = 0

    def __post_init__(self):
        if not 0 < self.threshold < 1 or self.block_length < 1 or self.hidden < 1 or self.steps < 0:
            raise ValueError(
                f"learn2pd needs threshold in (0, 1), block_length and hidden >= 1, and steps >= 0, got {self}"
            )

    @property
    def needs(self):
        return ("unmask",)

    @property
    def width(self):
        return self.block_length

    def bind(self, target: Any) -> "Learn2PD":
        """Itself: it knows no more of the model than its confidences."""
        return self

    def init_params(self, key: Array, target_params: Any) -> Any:
        """A random filter."""
        keys = jax.random.split(key)
        layer = lambda key, rows, columns: {
            "kernel": jax.nn.initializers.lecun_normal()(key, (rows, columns)),
            "bias": jnp.zeros((columns,)),
        }
        return {
            "first": layer(keys[0], self.block_length, self.hidden),
            "second": layer(keys[1], self.hidden, self.block_length),
        }

    def __call__(self, guess, memory):
        sure = jnp.where(guess.masked | guess.committed, top(guess), 1.0)
        final = jax.nn.sigmoid(judge(guess.weights, sure)) > self.threshold
        score = confidence(guess)
        count = scheduled(self.steps, guess.step + 1, guess.entry) - scheduled(self.steps, guess.step, guess.entry)
        surest = ranks(score, guess.masked) < count[:, None]
        return Choice(final | surest, score, guess.tokens), memory


def top(guess: Guess) -> Array:
    """The probability `[B, W]` of the likeliest token, of known positions too."""
    return jnp.exp(guess.log_law.max(axis=-1))


def judge(params: Any, sure: Array) -> Array:
    """The filter's logits `[..., W]` of being final, from the confidences `[..., W]` of a block."""
    layer = lambda x, part: x @ part["kernel"] + jnp.reshape(part["bias"], (1,) * (x.ndim - 1) + part["bias"].shape)
    return layer(jax.nn.gelu(layer(sure.astype(jnp.float32), params["first"])), params["second"])
