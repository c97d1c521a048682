"""A contextual bandit: which arm pays best for a prompt (RFF-UCB, arXiv:2410.13287).

In the shape descriptions `G` denotes arms, `E` the width of a context, `D` random features.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from specjax.models.on_disk import replace


class Router:
    """Learns what each arm pays for contexts like those that it has met; on the host, in float64.

    Each arm has its own ridge regression of the reward on random Fourier features of the context, `phi(x)`, which are the
    same for all arms. The arm with the largest `phi A^-1 v + explore sqrt(phi A^-1 phi)` is taken. Here A is `alpha` on the
    diagonal plus the sum of `phi phi^T` over the contexts that the arm met, and v the sum of `reward phi`.

    Args:
      arms: their names.
      size: E.
      features: D.
      width: of the Gaussian kernel; contexts that are this far apart share little.
      alpha: the ridge.
      delta: `explore` is `sqrt(2 ln(2 G / delta))`.
      seed: of the features.
      of: what contexts and rewards are of, such as a model and a function.

    Attributes:
      weights: `[D, E]`, and `shifts` `[D]`: the random features.
      inverse: `[G, D, D]`, `A^-1` of each arm.
      paid: `[G, D]`, v of each arm.
      counts: `[G]`, how often each arm has learnt.
    """

    def __init__(
        self, arms: Sequence[str], size: int, *, features: int = 200, width: float = 5.0, alpha: float = 1.0,
        delta: float = 0.05, seed: int = 0, of: str = "",
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.arms, self.of = tuple(arms), of
        self.weights = rng.normal(0.0, 1.0 / width, (features, size))
        self.shifts = rng.uniform(0.0, 2 * math.pi, features)
        self.explore = math.sqrt(2 * math.log(2 * len(self.arms) / delta))
        self.inverse = np.tile(np.eye(features) / alpha, (len(self.arms), 1, 1))
        self.paid = np.zeros((len(self.arms), features))
        self.counts = np.zeros(len(self.arms), np.int64)

    def phi(self, context: np.ndarray) -> np.ndarray:
        """The features `[D]` of a context `[E]`."""
        return math.sqrt(2 / len(self.shifts)) * np.cos(self.weights @ context + self.shifts)

    def values(self, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What each arm is expected to pay, `[G]`, and the deviation of that, `[G]`."""
        own = self.phi(context)
        spread = self.inverse @ own
        return np.sum(self.paid * spread, axis=1), np.sqrt(spread @ own)

    def choose(self, context: np.ndarray, rng: np.random.Generator, pending: np.ndarray | None = None) -> int:
        """The arm for a context `[E]`: one that was never tried, or else the one with the largest upper bound.

        Args:
          context: of the prompt.
          rng: decides between equals.
          pending: `[G]`, how often each arm is being tried now.
        """
        tried = self.counts if pending is None else self.counts + pending
        mean, deviation = self.values(context)
        bounds = np.where(tried == 0, math.inf, mean + self.explore * deviation)
        return int(rng.choice(np.flatnonzero(bounds == bounds.max())))

    def learn(self, arm: int, context: np.ndarray, reward: float) -> None:
        """Notes what an arm has paid for a context `[E]`."""
        own = self.phi(context)
        spread = self.inverse[arm] @ own
        self.inverse[arm] -= np.outer(spread, spread) / (1 + own @ spread)
        self.paid[arm] += reward * own
        self.counts[arm] += 1

    def _held(self) -> dict[str, np.ndarray]:
        names = np.frombuffer("\n".join((self.of, *self.arms)).encode(), np.uint8)
        own = {name: getattr(self, name) for name in ("weights", "shifts", "inverse", "paid", "counts")}
        return {**own, "arms": names, "explore": np.asarray([self.explore])}

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes all that was learnt as one safetensors file, atomically.

        Raises:
          OSError: if it cannot be written.
        """
        replace(Path(file), [save(self._held())])

    def resume(self, file: str | os.PathLike[str]) -> None:
        """Goes on from what `save` wrote.

        Raises:
          ValueError: if the file cannot be read, or is of other arms, features, models or rewards. The router is then as
            before.
        """
        try:
            found = load(Path(file).read_bytes())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read what a router learnt from {str(file)!r}: {error}") from error
        own = self._held()
        same = own.keys() == found.keys() and all(own[name].shape == found[name].shape for name in own)
        if not same or any((own[name] != found[name]).any() for name in ("arms", "weights", "shifts", "explore")):
            raise ValueError(
                f"{str(file)!r} is of a router of other arms, features, models or rewards: give its own, or another folder"
            )
        for name in ("inverse", "paid", "counts"):
            setattr(self, name, found[name].copy())
