"""What a PARD-2 model reads of its target: the features of several layers, joined and projected."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.lm import Output, Wants
from specjax.models.few_bits import dot

Array = jax.Array

STRIDE = 8
"""How many layers lie between two that are read, in a target that has three times as many."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """The target's features that are added to a draft model's embeddings.

    Attributes:
      target_layers: in the order in which they are joined, counted as transformers counts `hidden_states`: 0 is the
        embedding, n is the output of the n-th layer, and -1, the last, follows the final norm. Empty: see
        `default_layers`.
      scale: the factor of their projection.
      bias: whether the projection has a bias.
    """

    target_layers: tuple[int, ...] = ()
    scale: float = 0.02
    bias: bool = False

    def of(self, layers: int) -> "Joined":
        """The same, made ready for a target of so many layers.

        Raises:
          ValueError: for layers that the target does not have, or of which it gives no features.
        """
        chosen = self.target_layers or default_layers(layers)
        bad = [layer for layer in chosen if not -layers <= layer <= layers or layer == 0]
        if bad:
            raise ValueError(
                f"pard2: target_layers has {bad[0]}, and a target of {layers} layers gives features of -1 to -{layers}: "
                "choose layers that it has"
            )
        return dataclasses.replace(self, target_layers=chosen)

    def places(self, layers: int) -> tuple[int | None, ...]:
        """The layers, counted from 0, whose outputs are joined; None for the last one's after the final norm."""
        counted = (layer if layer > 0 else layers + 1 + layer for layer in self.target_layers)
        return tuple(None if count == layers else count - 1 for count in counted)

    def wants(self, layers: int) -> Wants:
        """What is asked of a target of so many layers."""
        places = self.places(layers)
        return Wants(hidden=tuple(sorted({at for at in places if at is not None})), final=None in places)

    def features(self, output: Output, layers: int) -> Array:
        """`[B, T, F]`, the joined features of the target's output."""
        return jnp.concatenate(
            [output.final if at is None else output.hidden[at] for at in self.places(layers)], axis=-1
        )

    def projected(self, fc: dict[str, Array], features: Array) -> Array:
        """`[B, T, E]`, what is added to embeddings, in the type of the kernel.

        Args:
          fc: `kernel` `[F, E]`, and `bias` `[E]` if there is one.
          features: `[B, T, F]`.
        """
        product = dot(features.astype(fc["kernel"].dtype), fc["kernel"])
        return self.scale * (product + fc["bias"][None, None] if self.bias else product)

    def nothing(self, fc: dict[str, Array]) -> Array:
        """`[E]`, what is added to the first token, which no feature precedes."""
        bias = fc["bias"] if self.bias else jnp.zeros(fc["kernel"].shape[1:], fc["kernel"].dtype)
        return self.scale * bias


def default_layers(layers: int) -> tuple[int, ...]:
    """-1, -8, -16 and -24, as published; for a target of fewer than 24 layers, -1 and each third of it."""
    stride = min(STRIDE, layers // 3)
    return tuple(dict.fromkeys((-1, *(-stride * i for i in (1, 2, 3) if stride))))
