"""Tokens per second of a draft model beside its target: one after the other, or at the same time on chips of their own.

Every drafted token is taken to be accepted with the same chance, whatever came before it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A draft model and a target, with the measured times of their passes.

    Attributes:
      draft: seconds of a pass of the draft model, over one token of every row.
      target: seconds of a pass of the target, over a block of every row.
      length: how many tokens the draft model writes in a step.
      accepted: the chance with which a drafted token is accepted, from 0 to 1.

    Raises:
      ValueError: for times or a length that are not positive, or a chance outside [0, 1].

    >>> pair = Pipeline(draft=0.005, target=0.02, length=4, accepted=0.8)
    >>> [round(rate) for rate in (pair.plain, pair.serial, pair.pearl, pair.saguaro(branch=0.005, hits=0.9))]
    [50, 84, 106, 125]
    """

    draft: float
    target: float
    length: int
    accepted: float

    def __post_init__(self):
        if min(self.draft, self.target) <= 0 or self.length < 1 or not 0 <= self.accepted <= 1:
            raise ValueError(
                f"a pipeline needs positive seconds, a length of at least 1 and a chance from 0 to 1, got {self}"
            )

    @property
    def plain(self) -> float:
        """Tokens per second and row of the target alone."""
        return 1 / self.target

    @property
    def serial(self) -> float:
        """Tokens per second and row if the target waits for the draft: `length` tokens are drafted, then judged."""
        return self._run(self.length) / (self.length * self.draft + self.target)

    @property
    def pearl(self) -> float:
        """Tokens per second and row of `specjax.draft.Pearl`, whose steps take the longer of both times.

        A step before a verdict commits one token, and a block follows with the chance of one acceptance. A block of
        `length - 1` tokens is followed by another one if all of it and the first token after it are accepted.
        """
        again = self.accepted**self.length
        after = self.accepted / (self.accepted + 1 - again) if self.accepted < 1 else 1.0
        tokens = (1 - after) + after * self._run(self.length - 1)
        return tokens / max(self.length * self.draft, self.target)

    def saguaro(self, branch: float, hits: float) -> float:
        """Tokens per second and row of `specjax.draft.Saguaro` or `MirrorSD`.

        Args:
          branch: seconds of a pass of the draft model over all branches.
          hits: the chance that the verdict is one of the branches; otherwise the target waits for a draft.

        Raises:
          ValueError: for seconds that are not positive, or a chance outside [0, 1].
        """
        if branch <= 0 or not 0 <= hits <= 1:
            raise ValueError(f"branches need positive seconds and a chance from 0 to 1, got {branch} and {hits}")
        seconds = max((self.length + 1) * branch, self.target) + (1 - hits) * self.length * self.draft
        return self._run(self.length) / seconds

    def _run(self, drafted: int) -> float:
        """Tokens that a step commits if so many are judged, the target's own among them."""
        return sum(self.accepted**i for i in range(drafted + 1))
