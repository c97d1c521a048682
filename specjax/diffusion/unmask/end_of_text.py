"""End-of-text prediction: a committed end of text ends the canvas (Learn2PD, arXiv:2509.25188, section 3.3)."""

import dataclasses

from specjax.about import About
from specjax.diffusion.unmask.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class EndOfText(Wrapper):
    """Another policy's choice. Where it commits an end of text, nothing behind that is read or decoded any more.

    Lossy where the model takes notice of open positions behind the end: the later ones of a block are not there for it.

    Attributes:
      inner: decides.
    """

    about = About(
        "end_of_text", "a committed end of text ends the canvas; put before another policy", "arXiv:2509.25188", "lossy"
    )

    @property
    def ends(self):
        return True

    def __call__(self, guess, memory):
        return self.inner(guess, memory)
