"""E-LANG (arXiv:2203.00748): a small model answers, and the large one where the small one's energy says that it is unsure.

In the shape descriptions `B` denotes rows, `W` tokens that are read together, `V` the vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.lm import Block, Wants
from specjax.models.text import new_text
from specjax.search.stepwise import Asked, Step, StepwisePair, Written, partner
from specjax.search.writer import Writer
from specjax.settings import settled
from specjax.sharding.distributed import to_host

Array = jax.Array
WIDTH = 64
"""How many tokens are read together for their energies."""


@dataclasses.dataclass(frozen=True)
class ELang(StepwisePair):
    """The small model writes a text. If it was sure enough, this is the text; otherwise the large one writes it anew.

    How sure it was is the mean over its new tokens of minus the free energy, `heat log(sum(exp(logits / heat)))`, of the
    distribution that each was drawn from, before any warper. For texts of several tokens the mean is this library's reading
    of the paper. What is sure enough depends on the model: `calibrated` finds a threshold for a share of prompts.

    Attributes:
      small: the small model, see `PairSettings`.
      threshold: from which mean on the small model's text is taken; -inf takes all, inf none; nan
        is none, and refused when bound or called.
      heat: the temperature of the energy.

    Raises:
      ValueError: for a heat that is not above 0.
    """

    about = About(
        "e_lang", "a small model's text, or the large one's where the small one was unsure by its energy",
        "arXiv:2203.00748", "own text", fields=("small", "threshold", "heat"),
    )  # fmt: skip

    threshold: float = math.nan
    heat: float = 1.0

    def __post_init__(self):
        if not 0 < self.heat < math.inf:
            raise ValueError(f"heat must be above 0, got {self.heat!r}")

    def partner_of(self, model: Any, mesh: Any = None, logprobs: bool = False) -> Any:
        """See `PairSettings.partner_of`.

        Raises:
          ValueError: also without a threshold, and for a small model with running states.
        """
        if math.isnan(self.threshold):
            raise ValueError(
                "e_lang needs to know which energy is sure enough: give threshold=NUMBER, see `calibrated`"
            )
        small = super().partner_of(model, mesh, logprobs)
        if jax.tree.leaves(small.lm.states(jax.eval_shape(lambda: small.lm.init_cache(1, 8, jnp.float32)))):
            raise ValueError(f"e_lang reads a text's tokens again, and {small.name} has running states: take another")
        return small

    def calibrated(self, model: Any, prompts: Sequence[Any], share: float, **options: Any) -> "ELang":
        """The same with a threshold at which the small model keeps this share of the prompts.

        Args:
          model: the large model.
          prompts: like those to come.
          share: from 0 to 1.
          **options: as for a call.

        Raises:
          ValueError: for no prompt, or a share out of range; see `__call__`.
        """
        if isinstance(share, bool) or not 0 <= share <= 1 or not len(prompts):
            raise ValueError(f"a threshold needs prompts and a share from 0 to 1, got {len(prompts)} and {share!r}")
        found = dataclasses.replace(self, threshold=-math.inf)(model, prompts, **options)
        of = lambda score: -math.inf if score is None else float(score)  # a text that failed is the least sure
        sure = sorted((of(own.steps[0].score) for own in found), reverse=True)
        kept = round(share * len(sure))
        return dataclasses.replace(self, threshold=sure[kept - 1] if kept else math.inf)

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """A text for every prompt, in order; its step says which model wrote it, and `score` is minus the small one's energy.

        Args:
          model: the large model, from `specjax.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt; both models share it.
          batch_size: prompts side by side.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`.

        Raises:
          ValueError: see `Asked.of` and `partner_of`.
        """
        small = partner(model, self.partner_of(model))
        asked = Asked.of([model, small], prompts, max_new_tokens, seed, sampling, keys)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        rows = len(parts[0].ids)
        little, large = Writer(small, rows, asked, ()), Writer(model, rows, asked, ())
        return [found for part in parts for found in self._part(little, large, part)]

    def _part(self, little: Writer, large: Writer, part: Asked) -> list[Written]:
        """Some prompts side by side."""
        count = len(part.ids)
        texts = _write(little, part)
        sure, again = _sureness(little, self.heat)
        unsure = [row for row in range(count) if not sure[row] >= self.threshold]
        anew: dict[int, list[int]] = {}
        if unsure:
            pick = lambda values: tuple(values[row] for row in unsure)
            mine = dataclasses.replace(part, prompts=pick(part.prompts), ids=pick(part.ids), keys=part.keys[unsure])
            anew = dict(zip(unsure, _write(large, mine), strict=False))
        found = []
        for row in range(count):
            own, lane = (large, unsure.index(row)) if row in anew else (little, row)
            tokens = anew.get(row, texts[row])
            words = new_text(own.model.tokenizer, part.ids[row], tokens)
            score = float(sure[row]) if math.isfinite(sure[row]) else None
            step = Step(tuple(tokens), words, "large" if row in anew else "small", score)
            passes = int(large.passes[lane]) if row in anew else 0
            small_passes = int(little.passes[row] + again[row])
            found.append(
                Written(part.prompts[row], words, tokens, own.reason(lane), passes, small_passes, (step,), score)
            )
        return found


def _write(writer: Writer, part: Asked) -> list[list[int]]:
    """The texts of some prompts."""
    writer.enter(part)
    return writer.write(np.arange(writer.rows) < len(part.ids), part.max_new_tokens, step=False)


def _sureness(writer: Writer, heat: float) -> tuple[np.ndarray, np.ndarray]:
    """By row, the mean of minus the energy over the new tokens, -inf where there is none; and the passes that it took."""
    sums, passes = np.zeros(writer.rows), np.zeros(writer.rows, np.int64)
    counts = np.where(writer.failed, 0, writer.length - writer.begin)
    for at in range(0, int(counts.max()), WIDTH):
        here = np.clip(counts - at, 0, WIDTH)
        begin = np.where(here > 0, writer.begin - 1 + at, 0)
        given = jax.device_put((begin.astype(np.int32), here.astype(np.int32), np.float32(heat)))
        sums += to_host(_summed(writer.decoder, WIDTH, writer.params, writer.state, *given))
        passes += here > 0
    return np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf), passes


def minus_energy(logits: Array, heat: Array | float) -> Array:
    """`heat log(sum(exp(logits / heat)))` over the last axis.

    >>> round(float(minus_energy(jnp.asarray([2.0, 1.0, 0.0]), 1.0)), 6)
    2.407606
    """
    return heat * jax.nn.logsumexp(logits / heat, axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
@settled
def _summed(decoder, width: int, params, state, begin: Array, count: Array, heat: Array):
    """`[B]`: the sums of minus the energies after the `count` `[B]` of `width` tokens from `begin` `[B]` on.

    The tokens' keys and values lie in the cache; those before `begin` are read, and nothing is written.
    """
    columns = jnp.arange(width)[None]
    positions = begin[:, None] + columns
    tokens = jnp.take_along_axis(state.tokens, positions, axis=1, mode="clip")
    output = decoder.target(params["target"], Block(tokens, positions, begin), state.cache, wants=Wants(logits=True))
    found = minus_energy(output.logits.astype(jnp.float32), heat)
    return jnp.sum(jnp.where(columns < count[:, None], found, 0.0), axis=1)
