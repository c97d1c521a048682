"""Batches of training questions, every pool of them by its own index, so that a run goes on where it was."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from specjax.tasks import Mixture, Question, messages
from specjax.tasks.chat import render


@dataclasses.dataclass(frozen=True)
class Row:
    """Ids, where the answer begins, how much each token counts as a label, and how many known ones stand after it."""

    tokens: list[int]
    answer: int
    weights: np.ndarray
    known: int = 0


def row_of(tokenizer: Tokenizer, question: Question, prompt_weight: float) -> Row:
    """A question and its answer in the chat template; an answer counts as the root of its length, in all."""
    asked = tokenizer.encode(render(messages(question))).ids
    tokens = tokenizer.encode(render(messages(question, answered=True), add_generation_prompt=False)).ids
    answer = len(asked)
    each = (len(tokens) - answer) ** -0.5
    weights = np.full(len(tokens), each * prompt_weight, np.float32)
    weights[answer:] = each
    return Row(tokens, answer, weights)


def gap_of(tokenizer: Tokenizer, question: Question) -> Row:
    """A text with a gap as models see it that fill in: the answer is the gap."""
    left, right = question.infill
    before, answer, after = (tokenizer.encode(text).ids for text in (left, f" {question.answers[0]}", f" {right}"))
    tokens = [*before, *answer, *after]
    weights = np.zeros(len(tokens), np.float32)
    weights[len(before) : len(before) + len(answer)] = len(answer) ** -0.5
    return Row(tokens, len(before), weights, known=len(after))


def echo(rng: np.random.Generator, vocab_size: int, first: int) -> Row:
    """Random tokens twice: what teaches a model to copy."""
    part = rng.integers(first, vocab_size, rng.integers(8, 49)).tolist()
    weights = np.zeros(2 * len(part), np.float32)
    weights[len(part) + 1 :] = 0.5 * len(part) ** -0.5
    return Row(part + part, len(part), weights)


@dataclasses.dataclass(frozen=True)
class Batch:
    """`tokens`, `weights` `[B, T]` (0 for padding); where answers begin, rows end, and what is known at the end `[B]`."""

    tokens: np.ndarray
    weights: np.ndarray
    answers: np.ndarray
    lengths: np.ndarray
    known: np.ndarray


def batch_of(rows: list[Row], pad: int, multiple: int = 16) -> Batch:
    width = -(-max(len(row.tokens) for row in rows) // multiple) * multiple
    tokens = np.full((len(rows), width), pad, np.int64)
    weights = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        weights[i, : len(row.tokens)] = row.weights
    lengths = np.array([len(row.tokens) for row in rows])
    answers, known = (np.array([getattr(row, name) for row in rows]) for name in ("answer", "known"))
    return Batch(tokens, weights, answers, lengths, known)


@dataclasses.dataclass
class Pools:
    """What a recipe trains on: pool i is always the same questions in the same batches.

    Args:
      recipe: `seed`, `pools`, `questions`, `update_tokens`, `batch_tokens`, `prompt_weight`, `echo` (share of echoes in the
        first pool, which falls to 0 at `echo_until` of the run), `infill` (share of texts with a gap that are shown as such;
        none where it is left out), and `parts`: mixtures, each with its share of the questions between the shares `from` and
        `until` of the run.
    """

    recipe: dict
    tokenizer: Tokenizer
    pad: int
    first_word: int

    def __post_init__(self):
        self.mixtures = [
            Mixture(self.recipe["seed"], tuple(part.get("families", ())), tuple(part["levels"]))
            for part in self.recipe["parts"]
        ]

    def rows(self, pool: int) -> list[Row]:
        recipe = self.recipe
        spent = pool / recipe["pools"]
        rng = np.random.default_rng((recipe["seed"], pool))
        open_now = [p.get("from", 0.0) <= spent < p.get("until", 2.0) for p in recipe["parts"]]
        share = np.array([part["share"] for part in recipe["parts"]]) * open_now
        chosen = rng.choice(len(share), recipe["questions"], p=share / share.sum())
        echoes = rng.random(recipe["questions"]) < recipe["echo"] * max(0.0, 1 - spent / recipe["echo_until"])
        rows = []
        for i, (part, echoed) in enumerate(zip(chosen, echoes, strict=True)):
            if echoed:
                rows.append(echo(rng, recipe["vocab_size"], self.first_word))
            else:
                question = self.mixtures[part][pool * recipe["questions"] + i]
                gap = question.infill and "infill" in recipe and rng.random() < recipe["infill"]
                rows.append(
                    gap_of(self.tokenizer, question)
                    if gap
                    else row_of(self.tokenizer, question, recipe["prompt_weight"])
                )
        return rows

    def updates(self, pool: int) -> Iterator[list[Batch]]:
        """The batches of every update of a pool: rows as they come, like lengths together in a batch.

        An update of like rows alone would weigh few long answers as much as many short ones, and its gradient would be
        mostly noise.
        """
        rows, start = self.rows(pool), 0
        total = np.cumsum([len(row.tokens) for row in rows])
        while start < len(rows):
            before = total[start - 1] if start else 0
            end = int(np.searchsorted(total, before + self.recipe["update_tokens"])) + 1
            yield self._batches(rows[start:end])
            start = end

    def _batches(self, rows: list[Row], multiple: int = 8) -> list[Batch]:
        rows, start, cuts = sorted(rows, key=lambda row: len(row.tokens)), 0, []
        for end in range(1, len(rows) + 1):
            width = -(-len(rows[end - 1].tokens) // multiple) * multiple
            if (end - start) * width > self.recipe["batch_tokens"] and end - start > 1:
                cuts.append(rows[start : end - 1])
                start = end - 1
        cuts.append(rows[start:])
        return [batch_of(cut, self.pad, multiple) for cut in cuts]


def shares(batches: list[Batch], processes: int) -> list[list[int]]:
    """Which batches each process takes, so that all have about as much to do."""
    taken, load = [[] for _ in range(processes)], [0] * processes
    for index in sorted(range(len(batches)), key=lambda i: -batches[i].tokens.size):
        least = load.index(min(load))
        taken[least].append(index)
        load[least] += batches[index].tokens.size
    return taken
