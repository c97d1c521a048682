"""Losses that pull a draft's distribution q towards the target's p, and the share of draft tokens from q that p accepts.

All take logits `[B, T, V]` of both models for the same positions, and a `mask` `[B, T]`, bool or non-negative weights;
the axes before the vocabulary may be any. They return a float32 scalar: the mean over the masked positions of all given
rows (0 if there are none). If a batch comes in parts (`means`), it is these rows' share of the mean. Under `jax.jit` on
a mesh, the rows are the global batch's. Gradients flow only to the draft's logits.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.objectives.means import MEAN, Mean

Array = jax.Array

TINY = 1e-20  # keeps a logarithm finite


def acceptance(target_logits: Array, draft_logits: Array, outside: Array | None = None) -> Array:
    """`sum_v min(p, q)` `[B, T]`: the chance that speculative sampling keeps a token of q (arXiv:2211.17192, section 3).

    Args:
      target_logits: `[B, T, V]`.
      draft_logits: `[B, T, V]`.
      outside: `[B, T]`, the target's probability of all tokens that the draft cannot say and V leaves out; None if
        there are none.
    """
    p, q = _distributions(target_logits, draft_logits, outside)
    return jnp.minimum(p, q).sum(axis=-1)


def agreement(target_logits: Array, draft_logits: Array) -> Array:
    """Whether both models' likeliest tokens are equal, `[B, T]` float32: acceptance in greedy decoding."""
    return (jnp.argmax(target_logits, axis=-1) == jnp.argmax(draft_logits, axis=-1)).astype(jnp.float32)


class Loss(abc.ABC):
    """A loss on logits. Implementations are frozen dataclasses; see `LOSSES`.

    For a draft over fewer tokens than the target knows, both models' logits are over the draft's tokens. The loss
    decides how the other tokens count. Acceptance and losses made from it (total variation, LK) compare with the
    target's distribution over all its tokens.

    A Kullback-Leibler divergence would be infinite. So it and similar losses condition the target's distribution on the
    tokens that the draft can say, at positions where the target's likeliest token is one of these (as EAGLE-3 does).
    """

    @abc.abstractmethod
    def numbers(
        self, target_logits: Array, draft_logits: Array, outside: Array | None = None, labels: Array | None = None
    ) -> tuple[Array, ...]:
        """The loss's numbers for every position, `[B, T]` float32 each.

        Args:
          target_logits: see `__call__`.
          draft_logits: see `__call__`.
          outside: see `acceptance`.
          labels: see `__call__`.
        """

    @abc.abstractmethod
    def taken(self, numbers: tuple[Array, ...], mask: Array, mean: Mean = MEAN, known: Array | None = None) -> Array:
        """The loss of a batch from its `numbers`; for the other arguments see `__call__`."""

    def __call__(
        self,
        target_logits: Array,
        draft_logits: Array,
        mask: Array,
        labels: Array | None = None,
        mean: Mean = MEAN,
        *,
        known: Array | None = None,
        outside: Array | None = None,
    ) -> Array:
        """The loss of a batch.

        Args:
          target_logits: `[B, T, V]`.
          draft_logits: `[B, T, V]`.
          mask: `[B, T]`, bool or weights.
          labels: `[B, T]` int32, the text's own tokens, as columns of V; -1 where the draft cannot say one. Only
            `CrossEntropy("text")` reads it.
          mean: takes the means.
          known: `[B, T]` bool, whether the target's likeliest token is one that the draft can say; None: everywhere.
          outside: `[B, T]`, see `acceptance`.
        """
        return self.taken(self.numbers(target_logits, draft_logits, outside, labels), mask, mean, known)


class Divergence(Loss):
    """A loss that is the mean of one number per position."""

    counts_outside: ClassVar[bool] = False
    """Whether it compares with the target's distribution over all tokens; see `Loss`."""

    @abc.abstractmethod
    def positions(self, target_logits: Array, draft_logits: Array, outside: Array | None = None) -> Array:
        """The number for every position, `[B, T]` float32; for `outside` see `acceptance`."""

    def numbers(self, target_logits, draft_logits, outside=None, labels=None) -> tuple[Array, ...]:
        return (self.positions(target_logits, draft_logits, outside),)

    def taken(self, numbers, mask, mean=MEAN, known=None):
        return mean(numbers[0], mask if self.counts_outside or known is None else mask * known)


@dataclasses.dataclass(frozen=True)
class ForwardKL(Divergence):
    """`sum_v w (p log p - p log q)`. Covers everything that the target may say.

    The weight w is 1, and `1 + more` for the target's `top` likeliest tokens (HASS, arXiv:2408.15766, whose sum over
    these is a loss besides). With it, the least is not at q = p but where likely tokens are likelier.

    Attributes:
      top: how many tokens weigh more; of those that the draft can say.
      more: how much more.
    """

    top: int = 0
    more: float = 0.0

    def __post_init__(self):
        if self.top < 0 or not self.more >= 0 or bool(self.top) != bool(self.more):
            raise ValueError(
                f"loss forward_kl: top and more are both 0 or both above 0, got top={self.top}, more={self.more}"
            )

    def positions(self, target_logits, draft_logits, outside=None):
        log_p, log_q = _log_probs(target_logits), _log_probs(draft_logits)
        if not self.top:
            return _kl(log_p, log_q)
        least = jax.lax.top_k(log_p, min(self.top, log_p.shape[-1]))[0][..., -1:]
        return _kl(log_p, log_q, jnp.where(log_p >= least, 1 + self.more, 1.0))


@dataclasses.dataclass(frozen=True)
class ReverseKL(Divergence):
    """`sum_v q (log q - log p)`. Keeps to what the target is likely to say."""

    def positions(self, target_logits, draft_logits, outside=None):
        return _kl(_log_probs(draft_logits), _log_probs(target_logits))


@dataclasses.dataclass(frozen=True)
class JSD(Divergence):
    """`beta KL(p, m) + (1 - beta) KL(q, m)` with `m = beta p + (1 - beta) q` (arXiv:2306.13649).

    Attributes:
      beta: in (0, 1); near 0 it behaves like the forward KL, near 1 like the reverse KL, each times a small factor.
    """

    beta: float = 0.5

    def __post_init__(self):
        if not 0 < self.beta < 1:
            raise ValueError(f"loss jsd: beta must lie between 0 and 1, got {self.beta}")

    def positions(self, target_logits, draft_logits, outside=None):
        log_p, log_q = _log_probs(target_logits), _log_probs(draft_logits)
        # a floor: the gradient of a sum of two exact zeros would be NaN
        middle = jnp.log(jnp.maximum(self.beta * jnp.exp(log_p) + (1 - self.beta) * jnp.exp(log_q), TINY))
        return self.beta * _kl(log_p, middle) + (1 - self.beta) * _kl(log_q, middle)


@dataclasses.dataclass(frozen=True)
class TVD(Divergence):
    """Total variation, `1/2 sum_v |p - q|`: one minus `acceptance`. Its gradient fades when q is far from p."""

    counts_outside = True

    def positions(self, target_logits, draft_logits, outside=None):
        p, q = _distributions(target_logits, draft_logits, outside)
        more = jnp.where(q < p, p - q, 0.0).sum(
            axis=-1
        )  # half of all differences; equal distributions give no gradient
        return more if outside is None else more + outside


@dataclasses.dataclass(frozen=True)
class TVDPP(Loss):
    """TVD++ (arXiv:2403.00858), with the expectation over q computed exactly instead of by samples.

    The reward of a token is `r = 1[p > q]`, and its advantage `A = (r - mu) / (sigma + 1e-6)`. The mean mu and the
    standard deviation sigma of r are over all masked positions and tokens drawn from q there, and are held constant.
    The loss is `mean_t sum_v A (p - q)`, whose gradient is the policy gradient `-mean_t E_q[A grad log q]`.

    Because q sums to one, mu has no gradient, and the value is computed without it. So value and gradient are those of
    `TVD` divided by sigma: this loss changes only the length of the step.
    """

    def numbers(self, target_logits, draft_logits, outside=None, labels=None):
        p, q = _distributions(target_logits, draft_logits, outside)
        return TVD().positions(target_logits, draft_logits, outside), jnp.where(q < p, q, 0.0).sum(axis=-1)

    def taken(self, numbers, mask, mean=MEAN, known=None):
        share = mean.whole(numbers[1], mask)
        spread = jnp.sqrt(jnp.maximum(share * (1 - share), 0.0))  # of numbers that are 0 or 1
        return mean(numbers[0], mask) / (spread + 1e-6)


@dataclasses.dataclass(frozen=True)
class LK(Loss):
    """Losses on the batch's mean acceptance `a` itself (arXiv:2602.23881).

    `alpha`: `-log a`. `lambda`: `w KL(p, q) + (1 - w) (1 - a)` with the constant `w = kl_scale exp(-kl_decay a)`, which
    leads from the forward KL to total variation as acceptance grows.

    Attributes:
      kind: `alpha` or `lambda`.
      kl_scale: in [0, 1], the KL's share at acceptance 0.
      kl_decay: how fast that share falls. The default is ours, which leaves 5% of it at acceptance 1; SpecForge's is 1.
    """

    kind: str = "alpha"
    kl_scale: float = 1.0
    kl_decay: float = 3.0

    def __post_init__(self):
        if self.kind not in ("alpha", "lambda"):
            raise ValueError(f"loss lk: kind must be alpha or lambda, got {self.kind!r}")
        if not 0 <= self.kl_scale <= 1 or not self.kl_decay >= 0:
            raise ValueError(
                f"loss lk: kl_scale must lie in [0, 1] and kl_decay must not be negative, got {self.kl_scale}, "
                f"{self.kl_decay}"
            )

    def numbers(self, target_logits, draft_logits, outside=None, labels=None):
        kept = acceptance(target_logits, draft_logits, outside)
        if self.kind == "alpha":
            return (kept,)
        pair = target_logits, draft_logits, outside
        return kept, ForwardKL().positions(*pair), TVD().positions(*pair)

    def taken(self, numbers, mask, mean=MEAN, known=None):
        whole = jnp.maximum(mean.whole(numbers[0], mask), TINY)
        if self.kind == "alpha":  # -log a, its tangent at the whole batch's a, so that parts add up
            return mean(1 - jnp.log(whole) - numbers[0] / whole, mask)
        share = self.kl_scale * jnp.exp(-self.kl_decay * whole)
        kl, tvd = ForwardKL().taken(numbers[1:2], mask, mean, known), TVD().taken(numbers[2:], mask, mean, known)
        return share * kl + (1 - share) * tvd


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Divergence):
    """`-log q(y)` with a hard label y.

    The target's likeliest token is what greedy verification asks for. On text that the target wrote greedily it is the
    text's own next token, so there this is sequence-level distillation. The published Medusa-1 and DFlash learn the
    text's own tokens. The draft may be unable to say some of these; such positions do not count.

    Attributes:
      labels: `target`: the likeliest token of p; `text`: the text's own.
    """

    labels: str = "target"

    def __post_init__(self):
        if self.labels not in ("target", "text"):
            raise ValueError(f"loss cross_entropy: labels must be target or text, got {self.labels!r}")

    def positions(self, target_logits, draft_logits, outside=None):
        return surprise(draft_logits, jnp.argmax(target_logits, axis=-1))

    def numbers(self, target_logits, draft_logits, outside=None, labels=None):
        if self.labels == "target":
            return super().numbers(target_logits, draft_logits, outside)
        if labels is None:
            raise ValueError("loss cross_entropy: labels=text needs the text's tokens")
        return surprise(draft_logits, jnp.maximum(labels, 0)), (labels >= 0).astype(jnp.float32)

    def taken(self, numbers, mask, mean=MEAN, known=None):
        if self.labels == "target":
            return super().taken(numbers, mask, mean, known)
        return mean(numbers[0], mask * numbers[1])


LOSSES: dict[str, type[Loss]] = {
    "forward_kl": ForwardKL,
    "reverse_kl": ReverseKL,
    "jsd": JSD,
    "tvd": TVD,
    "tvdpp": TVDPP,
    "lk": LK,
    "cross_entropy": CrossEntropy,
}
"""Every loss by name; its fields are set as in `jsd:beta=0.1`."""


def _log_probs(logits: Array) -> Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def _distributions(target_logits: Array, draft_logits: Array, outside: Array | None) -> tuple[Array, Array]:
    """The target's distribution over all its tokens, limited to the columns that the draft can say, and the draft's."""
    p, q = jnp.exp(_log_probs(target_logits)), jnp.exp(_log_probs(draft_logits))
    return p if outside is None else p * (1 - outside[..., None]), q


def surprise(logits: Array, labels: Array) -> Array:
    """`-log q` `[...]` in float32 of the columns `labels` `[...]`, from logits `[..., V]`."""
    return -jnp.take_along_axis(_log_probs(logits), labels[..., None], axis=-1)[..., 0]


def _kl(log_a: Array, log_b: Array, weights: Array | float = 1.0) -> Array:
    """`sum_v w a (log a - log b)`; a token that a never says does not count, not even in the gradient."""
    said = log_a > -jnp.inf
    log_a = jnp.where(said, log_a, 0.0)
    return jnp.where(said, weights * jnp.exp(log_a) * (log_a - jnp.where(said, log_b, 0.0)), 0.0).sum(axis=-1)
