"""PEARL: the draft model writes the next block while the target verifies the present one (arXiv:2408.11850)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.ahead import Ahead


@dataclasses.dataclass(frozen=True)
class Pearl(Ahead):
    """Drafts on the assumption that the whole block is accepted, in two modes that are data.

    - Pre-verify: nothing is proposed. The target reads the last token of the text, while the draft model writes `length`
      tokens after it. If the target's token is the first of them, the others are the next block.
    - Post-verify: the block is proposed, while the draft model writes `length` tokens after it. If all of the block is
      accepted and the target's own token is the first new one, the others are the next block.

    Otherwise what was written is dropped, and the row is in pre-verify mode.

    In the paper the first new token is judged like the others, and in our form it is a guess of the token that the
    target draws. Under `coupled` and for greedy rows both are the same. Under `rejection` ours is met less often: the
    guess has the noise with which the target's token is drawn. The authors' program judges the token after an accepted
    first token by the same uniform number again, which changes the distribution. Here a number decides once.

    Attributes:
      length: how many tokens the draft model writes in a step, at least 2; about as many as it can in the time of a
        target's pass.
    """

    about = About(
        "pearl",
        "a small model that writes the next block while the target verifies this one",
        "arXiv:2408.11850",
        fields=("length",),
        loads="model",
    )
    tiles = True

    length: int = 4

    def __post_init__(self):
        if self.length < 2:
            raise ValueError(
                f"pearl needs length >= 2, got {self.length}: the first token is a guess, and the others are the next block"
            )

    @property
    def block(self):
        return self.length - 1

    def points(self, count):
        return jnp.asarray(count)[:, None]
