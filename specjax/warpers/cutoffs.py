"""Epsilon and eta sampling: cuts at a probability (Hewitt et al. 2022, arXiv:2210.15191, sections 4.2 and 4.3)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Cut, parameter


@dataclasses.dataclass(frozen=True)
class EpsilonCutoff(Cut):
    """Keeps tokens with at least this probability, and always the likeliest.

    Attributes:
      epsilon_cutoff: float32 in [0, 1); 0 is off.
    """

    about = About(
        "epsilon_cutoff", "keeps tokens of at least a probability", "arXiv:2210.15191, section 4.2", "same text"
    )

    epsilon_cutoff: float = parameter(
        0.0, "keep tokens of at least this probability; 0 is off", "in [0, 1)", lambda x: (x >= 0) & (x < 1)
    )

    def lowest(self, scores, own, on):
        return _at(scores, jnp.log(own["epsilon_cutoff"])[:, None])


@dataclasses.dataclass(frozen=True)
class EtaCutoff(Cut):
    """Keeps tokens with at least the probability min(eta, sqrt(eta) exp(-entropy)), and always the likeliest.

    Attributes:
      eta_cutoff: float32 in [0, 1); 0 is off.
    """

    about = About(
        "eta_cutoff", "keeps tokens of a probability that falls with the entropy", "arXiv:2210.15191, section 4.3",
        "same text",
    )  # fmt: skip

    eta_cutoff: float = parameter(
        0.0, "keep tokens of at least this probability, or of less if many are likely; 0 is off", "in [0, 1)",
        lambda x: (x >= 0) & (x < 1),
    )  # fmt: skip

    def lowest(self, scores, own, on):
        logs = jax.nn.log_softmax(scores, axis=-1)
        entropy = -jnp.where(logs > -jnp.inf, jnp.exp(logs) * logs, 0.0).sum(axis=-1)
        eta = jnp.log(own["eta_cutoff"])[:, None]
        return _at(scores, jnp.minimum(eta, eta / 2 - entropy))


def _at(scores, log_chance):
    """The score of a log-probability `[B, T]`, or the highest there is."""
    return jnp.minimum(jax.nn.logsumexp(scores, axis=-1) + log_chance, scores.max(axis=-1))
