"""Intervals and tests of right and wrong answers. The unit is the question, however many samples it has.

In the shape descriptions `Q` denotes questions. All intervals are of 95%.
"""

import dataclasses
import math
from statistics import NormalDist

import numpy as np

Z = NormalDist().inv_cdf(0.975)


def wilson(shares: np.ndarray, samples: int = 1) -> tuple[float, float]:
    """Wilson's interval of an accuracy.

    For one sample per question it is the binomial one. For several it has the effective number of questions that the
    spread between questions leaves (Korn and Graubard 1998): as many as there are where a question's samples are all
    right or all wrong, and at most all samples.

    Args:
      shares: `[Q]`, the share of each question's samples that are right.
      samples: of each question.

    Raises:
      ValueError: where there is no question.
    """
    count = len(shares)
    if not count:
        raise ValueError("there is no interval of no questions")
    share = float(np.mean(shares))
    within, between = share * (1 - share), float(np.var(shares, ddof=1)) if count > 1 else 0.0
    n = count * min(max(within / between, 1.0), samples) if between else count * (samples if within else 1)
    middle, spread = share + Z * Z / (2 * n), Z * math.sqrt(within / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return low if share > 0 else 0.0, high if share < 1 else 1.0  # rounding leaves a little more or less there


@dataclasses.dataclass(frozen=True)
class Paired:
    """How two decoders differ on the same questions.

    Attributes:
      difference: accuracy of the second minus that of the first.
      low: lower end of its interval.
      high: upper end.
      better: questions on which the second is right more often.
      worse: less often.
      p_value: two-sided, of the exact test that both are as often better: McNemar's where a question has one sample, else the
        sign test.
    """

    difference: float
    low: float
    high: float
    better: int
    worse: int
    p_value: float


def paired(first: np.ndarray, second: np.ndarray) -> Paired:
    """Compares shares of right answers question by question.

    The interval is Bonett and Price's (2012): Wald's for paired proportions with one question more on which the second is
    better, and one on which it is worse. So it has a width where no question differs, about 2.8 / Q to each side.

    Args:
      first: `[Q]`, the share of each question's samples that are right.
      second: likewise.

    Raises:
      ValueError: where there is no question, or their numbers differ.
    """
    from scipy.stats import binomtest  # takes a while

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
    """What may be said of the second decoder's accuracy.

    Args:
      found: the comparison.
      same_text: whether all texts are equal.
      margin: points that "free" may cost at most.

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
      area: the chance that a positive has a higher score than a negative, equal ones counted half.
      low: lower end of its interval.
      high: upper end.
      positive: how many.
      negative: how many.
    """

    area: float
    low: float
    high: float
    positive: int
    negative: int


def auroc(scores: np.ndarray, positive: np.ndarray) -> Auroc:
    """How well a score tells positives from negatives: Mann and Whitney's statistic over the number of pairs.

    The interval is the fifth of Newcombe (2006, Statistics in Medicine 25:559), a score interval with Hanley and McNeil's
    variance at the middle of the two numbers: so it has a width where the score tells all of them apart.

    Args:
      scores: `[Q]`.
      positive: `[Q]` bool.

    Raises:
      ValueError: where there is no positive, or no negative.
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
