"""Training of PARD: a draft model learns to go on from a text that ends in mask tokens (arXiv:2504.18583).

In the shape descriptions `R` denotes the rows of a pass: the text's tokens, and masks after some of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.chunks import chunked
from specjax.lm import Block, Output, Wants
from specjax.objectives.base import Batch, drawn_places, of_target
from specjax.objectives.draft import OfDraft
from specjax.objectives.losses import CrossEntropy, Loss, acceptance, agreement
from specjax.objectives.means import MEAN, Mean
from specjax.objectives.teacher import Teacher, of_depth, positions_at_a_time

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows of a pass. Row (d, a) is the d-th mask after token a, and row (0, a) is token a itself.

    A row sees the tokens of its document up to token a, and the masks 1 to d after it: what a step of decoding sees.

    Attributes:
      depth: `[R]` int32, d.
      anchor: `[B, R]` int32, a.
    """

    depth: Array
    anchor: Array

    @classmethod
    def drawn(cls, counts: tuple[int, ...], useful: Array, key: Array) -> "Layout":
        """Every token, and masks after drawn ones. Tokens that keep a mask keep all masks before it.

        Args:
          counts: how many masks of every depth are kept, from 1 on, not increasing.
          useful: `[B, T]` bool, the tokens after which a mask may have something to predict; they are drawn first.
          key: one, or one per row of the batch.
        """
        rows, length = useful.shape
        drawn = drawn_places(key, useful, counts[0] if counts else 0)[0]
        every = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        depth = np.repeat(np.arange(len(counts) + 1, dtype=np.int32), (length, *counts))
        return cls(jnp.asarray(depth), jnp.concatenate([every, *(drawn[:, :count] for count in counts)], axis=1))

    def of_anchor(self, values: Array) -> Array:
        """`[B, R]`: the values `[B, T]` of every row's anchor."""
        return jnp.take_along_axis(values, self.anchor, axis=1)

    def block(self, batch: Batch, mask: int) -> Block:
        """The pass over these rows, without a cache."""
        depth = self.depth[None]
        same = self.anchor[:, :, None] == self.anchor[:, None]
        before = self.anchor[:, :, None] >= self.anchor[:, None]
        if batch.documents is not None:
            document = self.of_anchor(batch.documents)
            before &= document[:, :, None] == document[:, None]
        own = same & (depth[:, :, None] >= depth[:, None])
        return Block(
            jnp.where(depth == 0, self.of_anchor(batch.tokens), mask),
            self.of_anchor(batch.positions) + depth,
            jnp.zeros((len(batch.tokens),), jnp.int32),
            jnp.where(depth[:, None] == 0, before, own),
        )

    def targets(self, batch: Batch) -> tuple[Array, Array]:
        """The slot `[B, R]` of the token before the one that a row predicts, and whether it is to be predicted."""
        length = batch.tokens.shape[1]
        at = self.anchor + self.depth[None]
        following = jnp.minimum(at + 1, length - 1)
        due = jnp.take_along_axis(batch.mask, following, axis=1) & (at + 1 < length)
        if batch.documents is not None:
            due &= jnp.take_along_axis(batch.documents, following, axis=1) == self.of_anchor(batch.documents)
        return jnp.minimum(at, length - 1), due


@dataclasses.dataclass(frozen=True)
class TrainPard(OfDraft):
    """Fits what a draft model says after masks, as published: to the text's own tokens. Another loss fits it to the target.

    All rows of a pass weigh the same (`Layout`). Of T tokens, `int(T * max(keep ** d, least))` keep their d-th mask
    (the paper's conditional drop of tokens), drawn anew for every batch. A mask always has a token before it; the
    authors also train one row of each depth that has none.

    `target_params` are the target's parameters.

    Attributes:
      target: the teacher.
      draft: the model that is trained, with the target's columns.
      divergence: the loss.
      mask: the id that is read as a mask; -1 for the one that the draft's folder names, or a token that is not in use.
      depths: K, how many tokens ahead it learns: one from the text, and K - 1 from masks. It may draft more.
      keep: the share of masks of one depth that the next one keeps.
      least: the share of tokens that keep a mask at any depth.
    """

    divergence: Loss = CrossEntropy("text")
    mask: int = -1
    depths: int = 8
    keep: float = 0.7
    least: float = 0.2

    def __post_init__(self):
        name = type(self).__name__.removeprefix("Train").lower()
        if self.depths < 1:
            raise ValueError(f"{name}: depths must be at least 1, got {self.depths}")
        if not (0 <= self.keep <= 1 and 0 <= self.least <= 1):
            raise ValueError(f"{name}: keep and least must lie in [0, 1], got {self.keep} and {self.least}")

    @property
    def reads(self):
        return Wants(final=True)

    def kept(self, length: int) -> tuple[int, ...]:
        """How many of `length` tokens keep their masks of depth 1, 2 and so on."""
        counts = (int(length * max(self.keep**depth, self.least)) for depth in range(1, self.depths))
        return tuple(count for count in counts if count)

    def layout(self, batch: Batch, key: Array) -> Layout:
        """The rows of a batch's pass."""
        rows, length = batch.tokens.shape
        useful = jnp.zeros((rows, length), bool)
        for steps in range(2, min(self.depths + 1, length)):
            useful |= jnp.pad(batch.due(steps), ((0, 0), (0, steps)))
        return Layout.drawn(self.kept(length), useful, key)

    def read(self, params: Any, layout: Layout, batch: Batch, output: Output, key: Array) -> Array:
        """`[B, R, E]`, the draft's features of every row; `output` is the target's for the batch."""
        return self.draft(params, layout.block(batch, self.mask), None, wants=Wants(final=True)).final

    def model(self, params: Any) -> Any:
        """The draft model's parameters among those that are trained."""
        return params

    def numbers(self, dist: Array, q: Array, labels: Array) -> dict[str, Any]:
        """What the loss needs of each row, from the logits `[B, R, V]` of target and draft, and the text's tokens."""
        return {"numbers": self.divergence.numbers(dist, q, None, labels)}

    def taken(self, told: dict[str, Any], layout: Layout, batch: Batch, due: Array, mean: Mean) -> tuple[Array, Array]:
        """The loss, from `numbers` of every row, and the rows' weights `[B, R]`; `due` tells which have a target."""
        return self.divergence.taken(told["numbers"], due, mean), due

    def loss(self, params, target_params, batch, key, mean=MEAN):
        layout = self.layout(batch, key)
        output = of_target(self.target, target_params, batch, self.reads)
        final = self.read(params, layout, batch, output, key)
        unembed = functools.partial(self.target.unembed, target_params)
        teacher = Teacher(batch, dataclasses.replace(output, topk=None), unembed)
        at, due = layout.targets(batch)
        q = functools.partial(self.draft.unembed, self.model(params))
        told = _compared(teacher, self.numbers, at, final, q)
        metrics = {}
        loss, weights = self.taken(told, layout, batch, due, mean)
        for depth in range(len(self.kept(batch.tokens.shape[1])) + 1):
            of_depth_due = due & (layout.depth[None] == depth)
            metrics[of_depth("acceptance", depth)] = mean(told["kept"], of_depth_due)
            metrics[f"agreement_{depth + 1}"] = mean(told["agreed"], of_depth_due)
        return loss, metrics | {"weight": weights.sum()}


def _compared(
    teacher: Teacher,
    numbers: Callable[[Array, Array, Array], dict[str, Any]],
    at: Array,
    final: Array,
    unembed: Callable[[Array], Array],
) -> dict[str, Any]:
    """For every row `[B, R]`: `numbers`, acceptance and agreement, made for some rows at a time.

    Args:
      teacher: of the text.
      numbers: see `TrainPard.numbers`.
      at: `[B, R]`, the slots of the target's distributions.
      final: `[B, R, E]`, the draft's features.
      unembed: from these to logits.
    """
    labels = jnp.take_along_axis(teacher.labels, at, axis=1)

    def compare(inputs):
        at, final, labels = inputs
        dist = teacher.dist(jnp.take_along_axis(teacher.grounds, at[:, :, None], axis=1)).logits
        q = unembed(final)
        kept, agreed = jax.lax.stop_gradient((acceptance(dist, q), agreement(dist, q)))
        return {**numbers(dist, q, labels), "kept": kept, "agreed": agreed}

    return chunked(compare, (at, final, labels), positions_at_a_time(teacher.batch))
