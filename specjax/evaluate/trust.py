"""How far a shrunk model can be trusted in the place of the whole one: what right answers alone do not show.

A model whose weights or cache take less memory may have as many right answers and other ones (Dutta et al. 2024,
arXiv:2407.09141). It may be as often right and more sure of what is wrong, and it may forget what it knew while it still
copies well (Jaiswal et al. 2023, arXiv:2310.01382). So a row has, beside right answers: texts that change, answers that
turn right or wrong, the divergence by token, calibration, and right answers to questions that ask for knowledge and to
those that ask for copying.

In the shape descriptions `Q` denotes questions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.evaluate.results import Answer, Row, Share, rounded, share_of, shares_of
from specjax.evaluate.statistics import Estimate, Paired, calibration_error, paired, resampled

BINS = 15
"""Bins of the calibration error: those of Guo et al. 2017 (arXiv:1706.04599)."""


@dataclasses.dataclass(frozen=True)
class Against:
    """A shrunk model against the whole one, on the same questions.

    Attributes:
      changed: the share of texts that differ.
      points: the difference of accuracy.
      lost: how many questions the whole model answers right more often.
      gained: how many the shrunk one does.
      divergence: KL(whole, shrunk) of the next token's distribution in nats, a mean over the tokens of the whole model's
        texts.
      calibration_change: the difference of calibration errors.
      groups: the difference of accuracy by what questions ask for.
    """

    changed: Share
    points: Paired
    lost: int
    gained: int
    divergence: Estimate
    calibration_change: Estimate
    groups: dict[str, Paired]


@dataclasses.dataclass(frozen=True)
class Trust:
    """What one model's answers are worth; all intervals are of 95%.

    Attributes:
      decoder: its name.
      right: its accuracy.
      confidence: the mean probability of its answers under its own distribution.
      calibration_error: the expected calibration error of this probability, in `BINS` bins.
      groups: accuracy by what questions ask for.
      parameter_bytes: of the model's parameters.
      cache_bytes: of the cache of one text.
      slots: how long this text may be, in tokens.
      against: the comparison with the whole model; None for that one itself.
    """

    decoder: str
    right: Share
    confidence: float
    calibration_error: float
    groups: dict[str, Share]
    parameter_bytes: int
    cache_bytes: int
    slots: int
    against: Against | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        own = dataclasses.asdict(self)
        against = own.pop("against") or {}
        groups, differences = own.pop("groups"), against.pop("groups", {})
        return {
            **rounded(own),
            "bins": BINS,
            "groups": {name: {**rounded(group), **_points(differences.get(name))} for name, group in groups.items()},
            **{name: rounded(value) if isinstance(value, dict) else value for name, value in against.items()},
        }


def _points(found: dict[str, Any] | None) -> dict[str, Any]:
    return {} if found is None else {"points": rounded(found)}


@dataclasses.dataclass(frozen=True)
class Size:
    """What a model takes in memory; see `Trust`."""

    parameter_bytes: int
    cache_bytes: int
    slots: int


def trust_of(
    rows: Sequence[Row], asks: Sequence[str | None], divergences: np.ndarray, sizes: Sequence[Size]
) -> list[Trust]:
    """A row of trust for every decoder; the first is the whole model.

    Args:
      rows: their answers, with `nll`, by question and sample, to the same questions in the same order.
      asks: what every question asks for, "knowledge" or "copying", or None.
      divergences: `[decoders - 1, answers]`, sums over the first one's texts (`specjax.evaluate.divergence`).
      sizes: of every decoder.
    """
    first = rows[0]
    found = [_alone(row, asks, size) for row, size in zip(rows, sizes, strict=True)]
    for i, (row, sums) in enumerate(zip(rows[1:], divergences, strict=True), start=1):
        found[i] = dataclasses.replace(found[i], against=_against(first, row, asks, sums))
    return found


def _alone(row: Row, asks: Sequence[str | None], size: Size) -> Trust:
    sure, right = _judged(row.answers, _samples(row))
    groups = {name: share_of(own, _samples(row)) for name, own in _groups(row.answers, asks).items()}
    error = calibration_error(sure.ravel(), right.ravel(), BINS)
    return Trust(row.decoder, row.overall, float(sure.mean()), error, groups, **dataclasses.asdict(size))


def _against(first: Row, row: Row, asks: Sequence[str | None], sums: np.ndarray) -> Against:
    samples = _samples(row)
    same = {(a.id, a.sample): a.text == b.text for a, b in zip(first.answers, row.answers, strict=True)}
    changed = share_of(shares_of(row.answers, lambda answer: not same[answer.id, answer.sample]), samples)
    points = paired(shares_of(first.answers), shares_of(row.answers))
    tokens = np.asarray([answer.tokens for answer in first.answers], float).reshape(-1, samples).sum(axis=1)
    nats = np.asarray(sums, float).reshape(-1, samples).sum(axis=1)
    before, after = _judged(first.answers, samples), _judged(row.answers, samples)
    count = len(tokens)

    def error(of: tuple[np.ndarray, np.ndarray], chosen: np.ndarray) -> float:
        sure, right = of
        return calibration_error(sure[chosen].ravel(), right[chosen].ravel(), BINS)

    groups = zip(_groups(first.answers, asks).items(), _groups(row.answers, asks).items(), strict=True)
    return Against(
        changed,
        points,
        points.worse,
        points.better,
        resampled(lambda chosen: nats[chosen].sum() / max(tokens[chosen].sum(), 1), count),
        resampled(lambda chosen: error(after, chosen) - error(before, chosen), count),
        {name: paired(a, b) for (name, a), (_, b) in groups},
    )


def _samples(row: Row) -> int:
    return 1 + max(answer.sample for answer in row.answers)


def _judged(answers: Sequence[Answer], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """The probability of each answer under its model, and whether it is right: both `[Q, samples]`.

    An answer that failed has no probability: nothing was said, and so nothing was sure.
    """
    sure = [0.0 if answer.nll is None else float(np.exp(-answer.nll)) for answer in answers]
    right = [answer.right for answer in answers]
    return np.asarray(sure).reshape(-1, samples), np.asarray(right, float).reshape(-1, samples)


def _groups(answers: Sequence[Answer], asks: Sequence[str | None]) -> dict[str, np.ndarray]:
    """The shares of right answers `[Q]` by what the questions ask for."""
    shares = shares_of(answers)
    names = dict.fromkeys(sorted(name for name in asks if name is not None))
    chosen = {name: [i for i, own in enumerate(asks) if own == name] for name in names}
    return {name: shares[places] for name, places in chosen.items()}
