"""Intervals and tests for right and wrong answers. The unit is the question, whatever its number of samples.

In the shape descriptions `Q` denotes questions. All intervals are 95% intervals.
"""

import dataclasses
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

Z = NormalDist().inv_cdf(0.975)


def wilson(shares: np.ndarray, samples: int = 1) -> tuple[float, float]:
    """Wilson's interval of an accuracy.

    With one sample per question it is the binomial interval. With several, it uses the effective number of questions
    given the spread between them (Korn and Graubard 1998). That number is Q if each question's samples are all right or
    all wrong, and at most the number of all samples.

    Args:
      shares: `[Q]`, the share of each question's samples that are right.
      samples: the number of samples of each question.

    Raises:
      ValueError: if there is no question.
    """
    count = len(shares)
    if not count:
        raise ValueError("an interval needs at least one question")
    share = float(np.mean(shares))
    within, between = share * (1 - share), float(np.var(shares, ddof=1)) if count > 1 else 0.0
    n = count * min(max(within / between, 1.0), samples) if between else count * (samples if within else 1)
    middle, spread = share + Z * Z / (2 * n), Z * math.sqrt(within / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return low if share > 0 else 0.0, high if share < 1 else 1.0  # rounding errors could exceed these bounds


@dataclasses.dataclass(frozen=True)
class Paired:
    """The difference of two decoders on the same questions.

    Attributes:
      difference: accuracy of the second minus that of the first.
      low: lower end of its interval.
      high: upper end.
      better: the number of questions on which the second is right more often.
      worse: the number of questions on which it is right less often.
      p_value: two-sided, of the exact test that both are better equally often: McNemar's test with one sample per
        question, otherwise the sign test.
    """

    difference: float
    low: float
    high: float
    better: int
    worse: int
    p_value: float


def paired(first: np.ndarray, second: np.ndarray) -> Paired:
    """Compares shares of right answers question by question.

    The interval is Bonett and Price's (2012): Wald's for paired proportions, with one more question on which the second
    is better, and one more on which it is worse. So it has a positive width even if no question differs, about 2.8 / Q
    to each side.

    Args:
      first: `[Q]`, the share of each question's samples that are right.
      second: the same for the second decoder.

    Raises:
      ValueError: if there is no question, or their numbers differ.
    """
    from scipy.stats import binomtest  # slow import

    if not len(first) or len(first) != len(second):
        raise ValueError(f"pairs of questions are needed, got {len(first)} and {len(second)}")
    gained = np.asarray(second, float) - np.asarray(first, float)
    better, worse = int(np.sum(gained > 0)), int(np.sum(gained < 0))
    adjusted = np.concatenate([gained, [1.0, -1.0]])
    half = Z * math.sqrt(float(np.var(adjusted)) / len(adjusted))
    middle = float(np.mean(adjusted))
    p_value = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return Paired(float(np.mean(gained)), max(middle - half, -1.0), min(middle + half, 1.0), better, worse, p_value)


def verdict(found: Paired, same_text: bool, margin: float) -> str:
    """The conclusion about the second decoder's accuracy, in words.

    Args:
      found: the comparison.
      same_text: whether all texts are equal.
      margin: the most points that a "free" change may cost.

    >>> verdict(Paired(-0.01, -0.03, 0.01, 3, 5, 0.7), False, 1.0)
    'not resolved: the interval reaches -3.0 points'
    """
    if same_text:
        return "same text"
    if found.high < 0:
        return f"costs {-100 * found.difference:.1f} points ({-100 * found.high:.1f} to {-100 * found.low:.1f})"
    if 100 * found.low > -margin:
        return f"free (within {margin:g} points)"
    return f"not resolved: the interval reaches {100 * found.low:.1f} points"


@dataclasses.dataclass(frozen=True)
class Auroc:
    """The area under the receiver operating characteristic of a score.

    Attributes:
      area: the probability that a positive has a higher score than a negative; ties count half.
      low: lower end of its interval.
      high: upper end.
      positive: the number of positives.
      negative: the number of negatives.
    """

    area: float
    low: float
    high: float
    positive: int
    negative: int


def auroc(scores: np.ndarray, positive: np.ndarray) -> Auroc:
    """How well a score separates positives from negatives: the Mann-Whitney statistic over the number of pairs.

    The interval is the fifth of Newcombe (2006, Statistics in Medicine 25:559), a score interval with Hanley and
    McNeil's variance at the mean of the two numbers. So it has a positive width even if the score separates all of
    them.

    Args:
      scores: `[Q]`.
      positive: `[Q]` bool.

    Raises:
      ValueError: if there is no positive, or no negative.
    """
    scores, positive = np.asarray(scores, np.float64), np.asarray(positive, bool)
    m, n = int(positive.sum()), int((~positive).sum())
    if not m or not n:
        raise ValueError("an AUROC needs a positive and a negative")
    gap = scores[positive][:, None] - scores[~positive][None]
    area = float(np.mean((gap > 0) + 0.5 * (gap == 0)))
    more = (m + n) / 2 - 1

    def beyond(chance):
        spread = 1 + more * ((1 - chance) / (2 - chance) + chance / (1 + chance))
        return abs(area - chance) - Z * math.sqrt(chance * (1 - chance) * spread / (m * n))

    def end(inner, outer):
        for _ in range(60):
            middle = (inner + outer) / 2
            inner, outer = (inner, middle) if beyond(middle) > 0 else (middle, outer)
        return (inner + outer) / 2

    return Auroc(area, end(area, 0.0) if area else 0.0, end(area, 1.0) if area < 1 else 1.0, m, n)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
      value: over all questions.
      low: lower end.
      high: upper end.
    """

    value: float
    low: float
    high: float


def resampled(statistic: Callable[[np.ndarray], float], count: int, draws: int = 1000) -> Estimate:
    """A number over questions, with the interval of the percentile bootstrap (Efron and Tibshirani 1993, chapter 13).

    All samples of a question are drawn together. The draws are the same in every call, so an interval is reproducible.

    Args:
      statistic: from the indices of questions, which may repeat, to the number.
      count: Q.
      draws: how many times Q questions are drawn.

    Raises:
      ValueError: if there is no question.
    """
    if not count:
        raise ValueError("an interval needs at least one question")
    rng = np.random.default_rng(0)
    drawn = [statistic(rng.integers(0, count, count)) for _ in range(draws)]
    low, high = (float(end) for end in np.quantile(drawn, [0.025, 0.975]))
    return Estimate(float(statistic(np.arange(count))), low, high)


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int) -> float:
    """The expected calibration error (Naeini et al. 2015; Guo et al. 2017, arXiv:1706.04599).

    Answers are sorted into bins of equal width, `((m - 1) / M, m / M]`, by the probability that the model gave them. The
    error is the distance between mean probability and share of right answers, averaged over bins by their answers. Few
    answers in a bin make it larger than it is, so compare errors over the same number of answers only.

    Args:
      confidence: `[A]`, the probability of each answer.
      right: `[A]`, whether it is right.
      bins: M.

    Raises:
      ValueError: if there is no answer, or a probability outside [0, 1].
    """
    confidence, right = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    if not len(confidence) or not (0 <= confidence.min() and confidence.max() <= 1 + 1e-6):
        raise ValueError("a calibration error needs answers with probabilities between 0 and 1")
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(places, weights=confidence - right, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))
