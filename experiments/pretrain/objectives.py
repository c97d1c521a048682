"""What each model learns: a loss of batches, the batches' arrays, and how often it is right on held-out questions."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.pretrain.data import Batch, Row, batch_of, row_of
from experiments.pretrain.model import Model
from specjax.tasks import FAMILIES, generate


class Target:
    """Every next token, as the batch weighs it."""

    causal = True

    def __init__(self, recipe: dict, ids: dict[str, int]):
        self.recipe, self.ids = recipe, ids

    def arrays(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, ...]:
        return torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights[:, 1:])

    def weight(self, arrays: tuple[Tensor, ...]) -> float:
        """What a batch counts for in an update of several."""
        return float(arrays[-1].sum())

    @staticmethod
    def lost(model: Model, tokens: Tensor, weights: Tensor) -> Tensor:
        """The weighted cross-entropy, summed."""
        logits = model(tokens[:, :-1])
        return (_cross_entropy(logits, tokens[:, 1:]) * weights).sum()

    def wrong(self, model: Model, batch: Batch) -> Tensor:
        """Which rows `[B]` have an answer with a wrong argmax, all before it given."""
        tokens = torch.from_numpy(batch.tokens)
        counted = torch.from_numpy(batch.weights[:, 1:]) > 0
        return ((model(tokens[:, :-1]).argmax(-1) != tokens[:, 1:]) & counted).any(1)


class Draft(Target):
    """The target's distributions, mixed with the text: `distill` of the loss is the former."""

    def __init__(self, recipe: dict, ids: dict[str, int], teacher: Model):
        super().__init__(recipe, ids)
        self.teacher = teacher

    def arrays(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, ...]:
        tokens, weights = super().arrays(batch, rng)
        with torch.no_grad():
            taught = self.teacher(tokens[:, :-1]).softmax(-1)
        share = self.recipe["distill"]
        return tokens, taught.mul_(share), torch.full((), 1 - share), weights

    @staticmethod
    def lost(model: Model, tokens: Tensor, taught: Tensor, share: Tensor, weights: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).log_softmax(-1)
        text = -logits.gather(-1, tokens[:, 1:, None])[..., 0]
        return ((share * text - (taught * logits).sum(-1)) * weights).sum()


class Diffusion(Target):
    """Masked tokens of an answer, all else in view (LLaDA's second stage, arXiv:2502.09992, section 2.3).

    An answer stands in a canvas: after its end token there is end after end. A share `uniform` of the rows have every
    token of
    the canvas masked at one rate; in the others a block as semi-autoregressive decoding meets it is masked at one rate, what
    is before the block is known and what is behind it is not. A gap, whose both sides are known, is a canvas of its own length.
    """

    causal = False

    def arrays(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, ...]:
        recipe = self.recipe
        rows, wide = batch.tokens.shape
        room = int(rng.integers(0, recipe["room"] // 16 + 1)) * 16
        width = min(wide + room, recipe["model"]["max_position_embeddings"])
        tokens = np.full((rows, width), self.ids["end"], np.int64)
        at = np.arange(width)[None]
        inside = at < batch.lengths[:, None]
        tokens[:, :wide] = np.where(inside[:, :wide], batch.tokens, self.ids["end"])
        begin = batch.answers[:, None]
        gap = batch.known[:, None] > 0
        stop = np.where(gap, (batch.lengths - batch.known)[:, None], width)
        canvas = (at >= begin) & (at < stop)
        size = stop - begin
        # rates spread evenly over the batch: a steadier loss than independent ones
        rate = (rng.permutation(rows)[:, None] + rng.random((rows, 1))) / rows
        block = np.array(recipe["blocks"])[rng.integers(0, len(recipe["blocks"]), (rows, 1))]
        # a block that holds some of the answer
        long = batch.lengths - batch.known - batch.answers
        holding = -(-long[:, None] // block)
        start = begin + block * np.floor(rng.random((rows, 1)) * holding).astype(int)
        uniform = gap | (rng.random((rows, 1)) < recipe["uniform"])
        open_ = np.where(uniform, canvas, (at >= start) & (at < start + block))
        learned = open_ & (rng.random((rows, width)) < rate)
        one = np.where(uniform, begin, start) + np.floor(rng.random((rows, 1)) * np.where(uniform, size, block)).astype(
            int
        )
        learned |= (at == np.minimum(one, width - 1)) & ~learned.any(1, keepdims=True)
        unseen = learned | (~uniform & (at >= start + block))
        each = np.where(inside, 1.0, recipe["fill_weight"]) * learned
        each *= (long[:, None] ** 0.5) / np.maximum(each.sum(1, keepdims=True), 1.0)
        inputs = np.where(unseen, self.ids["mask"], tokens)
        return torch.from_numpy(inputs), torch.from_numpy(tokens), torch.from_numpy(each.astype(np.float32))

    @staticmethod
    def lost(model: Model, inputs: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        return (_cross_entropy(model(inputs), tokens) * weights).sum()

    def wrong(self, model: Model, batch: Batch) -> Tensor:
        """Which rows `[B]` are wrong when written left to right in one pass per token, given all before it, nothing
        after."""
        tokens = torch.from_numpy(batch.tokens).clone()
        rows, at = torch.arange(len(tokens)), torch.arange(tokens.shape[1])
        lengths, answers = torch.from_numpy(batch.lengths), torch.from_numpy(batch.answers)
        wrong = torch.zeros(len(tokens), dtype=torch.bool)
        for i in range(int((lengths - answers).max())):
            here = answers + i
            running = here < lengths
            inputs = torch.where(at[None] >= here[:, None], self.ids["mask"], tokens)
            picked = model(inputs)[rows, here.clamp(max=tokens.shape[1] - 1)]
            picked[:, self.ids["mask"]] = -torch.inf
            wrong |= running & (picked.argmax(-1) != tokens[rows, here.clamp(max=tokens.shape[1] - 1)])
            if wrong.all():
                break
        return wrong


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


class Probe:
    """Held-out questions of every family at level 2, which training never sees.

    Args:
      row: makes a row of a question.
      count: questions per family.
    """

    def __init__(self, tokenizer, pad: int, count: int, batch_tokens: int = 8192, families: Iterable[str] = FAMILIES):
        self.batches: list[tuple[str, Batch]] = []
        for name in families:
            rows: list[Row] = [
                row_of(tokenizer, question, 0.0) for question in generate(name, 2, seed=900, count=count)
            ]
            rows.sort(key=lambda row: len(row.tokens))
            size = max(1, batch_tokens // len(rows[-1].tokens))
            self.batches += [(name, batch_of(rows[i : i + size], pad)) for i in range(0, len(rows), size)]

    @torch.no_grad()
    def __call__(self, objective: Target, model: Model) -> dict[str, float]:
        """The share of answers that are right, by family."""
        right, total = {}, {}
        for name, batch in self.batches:
            right[name] = right.get(name, 0) + int((~objective.wrong(model, batch)).sum())
            total[name] = total.get(name, 0) + len(batch.lengths)
        return {name: round(right[name] / total[name], 3) for name in right}
