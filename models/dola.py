"""DoLa: a model's last layer contrasted with one of its earlier layers (Chuang et al. 2023, arXiv:2309.03883)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import LM, answered, inputs
from specjax.warpers.lists import tokens

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Dola:
    """An LM around another, whose scores are `final - early` in log-probabilities.

    `early` is the head's output on the residual stream after one of the candidate layers. At every place, the layer is
    the one whose distribution is farthest from the last layer's (`divergence`). As in the released program, the stream
    is not normed.

    Tokens below `alpha` times the likeliest token's probability are removed. A step is one pass; the head runs once
    more for each candidate layer. The released program and `transformers` 4 choose one layer for all rows of a batch;
    here each row has its own.

    Attributes:
      lm: the model.
      early: the candidate layers, counted from 0, with -1 for the embeddings; transformers counts from 1, with 0 for
        the embeddings.
      alpha: in (0, 1].

    Raises:
      ValueError: if one of them is not a layer before the last.
    """

    lm: LM
    early: tuple[int, ...]
    alpha: float = 0.1

    def __post_init__(self):
        last = self.lm.num_layers - 1
        if not self.early or any(not -1 <= layer < last for layer in self.early):
            counts = [layer + 1 for layer in self.early]
            raise ValueError(f"dola_layers must be low, high or counts of layers from 0 to {last}, got {counts}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        if not wants.head:
            return self.lm(params, block, cache, wants=wants, past=past, partial=partial)
        layers = [layer for layer in self.early if layer >= 0]
        if partial is not None and any(partial.lo > layer + 1 for layer in layers):
            raise ValueError(
                "DoLa reads layers that this drafter runs by itself: take a drafter that leaves them to the model"
            )
        hidden = tuple(sorted({*wants.hidden, *layers}))
        body = dataclasses.replace(wants, logits=True, topk=0, draw=False, hidden=hidden)
        output = self.lm(params, block, cache, wants=body, past=past, partial=partial)
        head = lambda h: jax.nn.log_softmax(self.lm.unembed(params, h), axis=-1)
        final = jax.nn.log_softmax(output.logits, axis=-1)
        stream = lambda layer: inputs(self.lm, params, block) if layer < 0 else output.hidden[layer]
        scores = contrasted(final, [head(stream(layer)) for layer in self.early], self.alpha)
        kept = {layer: output.hidden[layer] for layer in wants.hidden}
        return answered(dataclasses.replace(output, hidden=kept or None), scores, wants, draw)


def contrasted(final: Array, early: list[Array], alpha: float) -> Array:
    """Scores `[B, T, V]` from log-probabilities of the last layer and of earlier ones."""
    chosen, most = early[0], divergence(final, early[0])
    for dist in early[1:]:
        far = divergence(final, dist)
        chosen = jnp.where(far > most, dist, chosen)
        most = jnp.maximum(far, most)
    plausible = final >= math.log(alpha) + final.max(axis=-1, keepdims=True)
    return jnp.where(plausible, final - chosen, -jnp.inf)


def divergence(a: Array, b: Array) -> Array:
    """The distance of two distributions, `[B, T, 1]`, from log-probabilities: (KL(m | a) + KL(m | b)) / 2, m = (a + b)
    / 2.

    This is the released program's formula. The paper's, the Jensen-Shannon divergence, has KL(a | m) and KL(b | m).
    """
    middle = jnp.logaddexp(a, b) - math.log(2)
    to = lambda dist: jnp.where(middle > -jnp.inf, jnp.exp(middle) * (middle - dist), 0.0).sum(axis=-1, keepdims=True)
    return (to(a) + to(b)) / 2


def layers_of(asked: Any, lm: LM) -> tuple[int, ...]:
    """`Dola.early` for the `dola_layers` of `transformers`: "low" or "high" (every second layer of a half), or counts
    of layers.

    A model with more than 40 layers uses the first or the last 20 in place of a half. "low" begins with the embeddings
    (0). With a tied head it begins with the second layer, because tied embeddings predict nothing.

    Args:
      asked: the setting.
      lm: the model.
    """
    count, head = lm.num_layers, getattr(getattr(lm, "config", None), "head", None)
    tied = head is None or head.tied
    half, first = count // 2 if count <= 40 else 20, min(2, count - 1) if tied else 0
    named = {
        "low": range(first, half, 2) or [first],
        "high": range(count // 2 if count <= 40 else count - 20, count, 2),
    }
    if isinstance(asked, str):
        if asked not in named:
            raise ValueError(f"dola_layers must be low, high or counts of layers, got {asked!r}")
        asked = named[asked]
    return tuple(layer - 1 for layer in tokens(asked))
