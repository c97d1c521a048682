"""A trained filter decides which predictions are final: Learn2PD (arXiv:2509.25188)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Guess, Unmask, confidence, ranks, scheduled_in

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Learn2PD(Unmask):
    """Commits the predictions that the filter finds final, and always as many of the surest as a schedule asks for.

    The filter sees the model's confidence at every position of the block. Its parameters, `params["unmask"]`, are
    {`first`: {`kernel` `[W, H]`, `bias`}, `second`: {`kernel` `[H, W]`, `bias`}}. They belong to one model and one
    block length.

    Attributes:
      threshold: of the filter's probability.
      block_length: W, for which it was trained.
      hidden: H.
      steps: passes per block of the schedule, see `Fixed`; 0 for one token per pass.
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
    def warped(self):
        """The model's own probabilities, which the filter was trained on."""
        return False

    @property
    def needs(self):
        return ("unmask",)

    @property
    def width(self):
        return self.block_length

    def bind(self, target: Any) -> "Learn2PD":
        """Itself: of the model it needs only the confidences."""
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

    @classmethod
    def objective(cls):
        from specjax.diffusion.unmask.learn2pd.objective import TrainFilter

        return TrainFilter

    def __call__(self, guess, memory):
        sure = jnp.where(guess.masked | guess.committed, top(guess), 1.0)
        final = jax.nn.sigmoid(judge(guess.weights, sure)) > self.threshold
        score = confidence(guess)
        count = scheduled_in(self.steps, guess.step, guess.entry, guess.rounded)
        surest = ranks(score, guess.masked) < count[:, None]
        return Choice(final | surest, score, guess.tokens), memory


def top(guess: Guess) -> Array:
    """The probability `[B, W]` of the likeliest token, also at known positions."""
    return jnp.exp(guess.log_probs.max(axis=-1))


def judge(params: Any, sure: Array) -> Array:
    """The filter's logits `[..., W]` that predictions are final, from the confidences `[..., W]` of a block."""
    layer = lambda x, part: x @ part["kernel"] + jnp.reshape(part["bias"], (1,) * (x.ndim - 1) + part["bias"].shape)
    return layer(jax.nn.gelu(layer(sure.astype(jnp.float32), params["first"])), params["second"])


def read_filter(file: Path) -> dict[str, dict[str, Array]]:
    """The parameters of a filter from a file of tensors alone: `first.kernel` and so on, see `Learn2PD`.

    Raises:
      ValueError: if the file is damaged, or its tensors are not those of a filter.
    """
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged, or no file of safetensors ({error}): fetch it again") from error
    names = [f"{layer}.{part}" for layer in ("first", "second") for part in ("kernel", "bias")]
    if sorted(tensors) != sorted(names) or tensors["first.kernel"].ndim != 2:
        raise ValueError(
            f"{file} is not a filter: it holds {', '.join(sorted(tensors))} in place of {', '.join(names)}"
        )
    width, hidden = tensors["first.kernel"].shape
    shapes = [tensors[name].shape for name in names]
    if shapes != [(width, hidden), (hidden,), (hidden, width), (width,)]:
        raise ValueError(f"{file} is not a filter for blocks of {width}: its tensors are {shapes}")
    return {
        layer: {part: jnp.asarray(tensors[f"{layer}.{part}"], jnp.float32) for part in ("kernel", "bias")}
        for layer in ("first", "second")
    }
