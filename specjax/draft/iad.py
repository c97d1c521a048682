"""Input-guided aggressive decoding: copies the input until the output leaves it, and again from where it meets it (Sun et al.
2021, arXiv:2106.04970).

In the shape descriptions `B` denotes rows, `G` places in the input.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import ChainDrafter, View
from specjax.draft.rest import last_tokens
from specjax.draft.suffix import runs_of

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where each row stands in its input.

    Attributes:
      begin: `[B]` int32, the length of the text at its first proposal; 0 before that.
      read: `[B]` int32, the length of the text at its latest proposal.
      place: `[B]` int32, the place in the input that was expected to come next; -1 for none.
    """

    begin: Array
    read: Array
    place: Array


@dataclasses.dataclass(frozen=True)
class InputGuided(ChainDrafter):
    """A chain that copies the input on from a pointer; no parameters.

    The input is what the target's encoder has read, or else the row's prompt. While the output follows the input, the
    pointer moves along. Once it does not, the pointer goes to where the last output token stands in the input, if
    that is one place. If it is several, the last two tokens decide, and so on. If it is none, nothing is proposed.

    With an encoder the pointer begins at the input's first token, without one nowhere.

    As published, a draft is the rest of the input. Here it has at most `length` tokens.

    Attributes:
      length: how many tokens to propose, at most.
      ngram: how many of the last output tokens may decide.
    """

    about = About(
        "iad",
        "copies the input on from where the output meets it",
        "arXiv:2106.04970",
        paper="length=200",
    )

    length: int = 12
    ngram: int = 3

    def __post_init__(self):
        if min(self.length, self.ngram) < 1:
            raise ValueError(f"iad needs length >= 1 and ngram >= 1, got {self}")

    skips = False

    def init(self, params, batch, capacity):
        zeros = lambda: jnp.zeros((batch,), jnp.int32)
        return Pointer(zeros(), zeros(), zeros())

    def propose(self, params, draft, view, sampler):
        first = draft.begin == 0
        begin = jnp.where(first, view.length, draft.begin)
        given = view.source
        if given is None:
            given = jnp.where(jnp.arange(view.tokens.shape[1])[None] < begin[:, None], view.tokens, -1)
        given = jnp.pad(given, ((0, 0), (0, 1)), constant_values=-1)
        start = jnp.full_like(begin, -1 if view.source is None else 0)
        place = jnp.where(first, start, followed(draft, view, given))
        recent = last_tokens(view, self.ngram)
        written = jnp.arange(self.ngram)[None] < (view.length - begin)[:, None]
        place = jnp.where((place < 0) & ~first, found(given, jnp.where(written, recent, -1)), place)
        ahead = place[:, None] + jnp.arange(self.length)[None]
        copied = jnp.take_along_axis(given, jnp.clip(ahead, 0, given.shape[1] - 1), axis=1)
        copied = jnp.where(place[:, None] >= 0, copied, -1)
        return self.chain(view, copied, Pointer(begin, view.length, place))


def followed(pointer: Pointer, view: View, given: Array) -> Array:
    """The pointers `[B]` after the tokens since the latest proposal, -1 if some of them did not follow `given` `[B, G]`."""
    at = jnp.arange(view.tokens.shape[1])[None]
    new = (at >= pointer.read[:, None]) & (at < view.length[:, None])
    place = at + (pointer.place - pointer.read)[:, None]
    expected = jnp.take_along_axis(given, jnp.clip(place, 0, given.shape[1] - 1), axis=1)  # the last one is -1
    follows = jnp.all(~new | (view.tokens == expected), axis=1) & (pointer.place >= 0)
    return jnp.where(follows, pointer.place + view.length - pointer.read, -1)


def found(given: Array, recent: Array) -> Array:
    """The place `[B]` after the only occurrence of the fewest last tokens that have one, -1 if none have.

    Args:
      given: `[B, G]` int32, the input; -1 matches nothing, and its last column is -1.
      recent: `[B, M]` int32, the last tokens, the last one first; -1 matches nothing.
    """
    runs = runs_of(given, recent, jnp.ones((1, given.shape[1]), bool))
    sizes = 1 + jnp.arange(recent.shape[1])[None, :, None]
    once = ((runs[:, None] >= sizes).sum(axis=2) == 1).any(axis=1)
    return jnp.where(once, jnp.argmax(runs, axis=1).astype(jnp.int32), -1)
