"""SuffixDecoding: of all suffixes of the text, the one whose likeliest continuation promises the most accepted tokens
(Oliaro et al. 2024, arXiv:2411.04975).

In the shape descriptions `G` denotes places to copy from, `R` matches, `M` lengths of a match, `K` tokens of a draft,
`P` pieces of the shared memory, `C` tokens of a piece.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import ChainDrafter, Proposal
from specjax.draft.prompt_lookup import readable
from specjax.draft.rest import frequent, last_tokens
from specjax.draft.texts import TextsDrafter
from specjax.tree import Tree

Array = jax.Array

MOST = 1 << 24
"""Ranks of matches are whole numbers below this, which float32 holds exactly."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The texts that rows have written so far, shared by all rows.

    Attributes:
      pieces: `[P, C + 1]` int32, -1 where a piece has no token; its last column stays -1.
      head: `[1]` int32, the oldest piece, which is used next.
      piece: `[B]` int32, each row's own last piece.
      written: `[B]` int32, how many tokens of a row are in its pieces; rounded up if its last piece was taken away.
    """

    pieces: Array
    head: Array
    piece: Array
    written: Array


@dataclasses.dataclass(frozen=True)
class Suffix(TextsDrafter, ChainDrafter):
    """The likeliest continuations of some suffix of the text, as a chain or a tree; no parameters.

    Each suffix of m tokens has been followed by some tokens before. A draft is the way along their most frequent
    continuations: a token's chance is how often the suffix was followed by the draft up to it, divided by how often
    the suffix occurred. At most `factor * m + offset` tokens are drafted. Of all m the draft with the largest sum of
    chances wins, and on a tie the longer match. That sum is the expected number of accepted tokens.

    With `tree` a draft is not one way but the tokens with the largest chances on all ways, at most as many as a chain may
    have. Their parents have no smaller chances, so they are a tree. Of equal chances those nearer to the root come first.

    There are two places to look: the row's own prompt and text, and what all rows have written, the answers
    to earlier prompts of the same job among them. The better draft wins, and on a tie the row's own.

    The suffix trees of the paper are not built: their counts are those of the matches, which a scan finds. The scan
    keeps the `matches` longest matches in each place, the newest of equals. So counts are the paper's as long as
    a suffix occurs no more often than that. Of equally frequent tokens, the one with the more frequent continuation
    goes on.

    What rows have written is kept in pieces, the oldest of which gives way; a match does not cross pieces. Sharing
    changes speed, never text. Without pieces a row depends on no other, and `rejection` can judge it. Pieces may begin
    with the texts of earlier jobs, the last ones of a datastore (`specjax datastore build`).

    Attributes:
      length: K, how many tokens to propose, at most.
      tree: whether they branch.
      span: a match and its draft have at most this many tokens together.
      factor: how many tokens to propose for each token of the match.
      offset: how many tokens to propose besides.
      min_prob: the smallest chance of a drafted token.
      matches: R.
      pieces: P; 0 for no shared memory.
      piece: C.
    """

    about = About(
        "suffix",
        "the continuation of a suffix that promises most, in this text and all earlier ones",
        "arXiv:2411.04975",
        fields=("length", "span", "factor", "offset", "min_prob", "matches", "pieces", "piece", "tree"),
        paper="length=16,span=64,factor=1,matches=64",
        loads="texts",
    )

    length: int = 12
    span: int = 32
    factor: float = 2.0
    offset: float = 0.0
    min_prob: float = 0.1
    matches: int = 16
    pieces: int = 256
    piece: int = 128
    tree: bool = False

    def __post_init__(self):
        numbers = self.factor >= 0 and math.isfinite(self.offset) and 0 <= self.min_prob <= 1
        if min(self.length, self.matches) < 1 or self.span < 2 or not numbers:
            raise ValueError(
                f"suffix needs length, matches >= 1, span >= 2, factor >= 0, a finite offset and min_prob in [0, 1], got {self}"
            )
        if self.filled and not self.pieces:
            raise ValueError("suffix keeps a datastore's texts in pieces: leave pieces=0 or the datastore out")
        small = self.pieces and self.piece <= self.length
        if self.pieces < 0 or small or self.pieces * (self.piece + 1) * self.span > MOST:
            raise ValueError(
                f"suffix needs pieces >= 0 of more than {self.length} tokens, and at most {MOST // self.span} tokens in "
                f"all, got {self.pieces} of {self.piece}"
            )

    @property
    def is_chain(self) -> bool:
        return not self.tree

    @property
    def alone(self) -> bool:
        return not self.pieces

    def init(self, params, batch, capacity):
        if not self.pieces:
            return None
        count = max(self.pieces, batch)  # at least one for each row
        pieces = jnp.full((count, self.piece + 1), -1, jnp.int32)
        if self.filled:
            tokens = params["draft"]["tokens"][-self.pieces * self.piece :].astype(jnp.int32)
            tokens = jnp.pad(tokens, (0, -len(tokens) % self.piece), constant_values=-1)
            tokens = jnp.where(tokens < (self.vocab_size or 0), tokens, -1).reshape(-1, self.piece)
            pieces = pieces.at[count - len(tokens) :, : self.piece].set(tokens)  # the newest
        nothing = lambda: jnp.zeros((batch,), jnp.int32)
        return Outputs(pieces, jnp.zeros((1,), jnp.int32), nothing(), nothing())

    def axes(self, draft):
        names: tuple[Any, ...] = (None, None), (None,), ("batch",), ("batch",)
        return Outputs(*names) if self.pieces else None

    def propose(self, params, draft, view, sampler):
        text, end, _ = readable(view)
        recent = self._recent(view)
        at = jnp.arange(text.shape[1])[None]
        text = jnp.where(at < end[:, None], text, -1)
        matches = [self._matches(text, runs_of(text, recent, at < end[:, None]), at)]
        if self.pieces:
            flat = draft.pieces.reshape(1, -1)
            count = draft.pieces.shape[0]
            age = (jnp.arange(count) - draft.head) % count
            newest = (age[:, None] * (self.piece + 1) + jnp.arange(self.piece + 1)[None]).reshape(1, -1)
            matches.append(self._matches(flat, runs_of(flat, recent, flat >= -1), newest))
        tokens, runs = (jnp.concatenate(parts) for parts in zip(*matches, strict=True))
        rows = view.root.shape[0]
        ends = (jnp.arange(len(runs)) < rows).astype(jnp.int32)  # the text's own end is no match, and occurs too
        lengths = 1 + jnp.arange(self.span - 1)
        allowed = jnp.floor(lengths * self.factor + self.offset + 1e-6).astype(jnp.int32)
        by_place = lambda x: x.reshape(-1, rows, *x.shape[1:])
        if self.tree:
            found = branches(tokens, runs, allowed, self.span - lengths, self.min_prob, ends)
            tokens, real, limit = (_best(found[2], by_place(x)) for x in (tokens, *found[:2]))
            return Proposal(cut(frequent(view.root, tokens, real, self.nodes), limit), draft)
        tokens, chances = likeliest(tokens, runs, jnp.minimum(allowed, self.span - lengths), self.min_prob, ends)
        tokens, chances = (_best(chances.sum(axis=1), by_place(x)) for x in (tokens, chances))
        return self.chain(view, jnp.where(chances > 0, tokens, -1), draft)

    def _recent(self, view):
        """The last `span - 1` tokens of each row `[B, M]`, the last one first; -1 where no match may reach."""
        recent = last_tokens(view, self.span - 1)
        return jnp.where(jnp.arange(self.span - 1)[None] < view.length[:, None] - 1, recent, -1)

    def _matches(self, text, runs, newer):
        """The longest matches in one place to look, the newest of equals.

        Args:
          text: `[B or 1, G]`.
          runs: `[B, G]`, from `runs_of`.
          newer: `[1, G]`, ranks of the places by their age.

        Returns:
          What follows each match `[B, R, K]`, -1 from its end on, and its length `[B, R]`, 0 for none.
        """
        size = runs.shape[1]
        rank = jnp.where(runs > 0, runs * size + newer, 0).astype(jnp.float32)
        _, ends = jax.lax.top_k(rank, min(self.matches, size))
        ends = jnp.pad(ends, ((0, 0), (0, self.matches - ends.shape[1])))
        run = jnp.take_along_axis(runs, ends, axis=1).at[:, size:].set(0)
        ahead = ends[:, :, None] + jnp.arange(self.length)[None, None]
        rows = jnp.arange(text.shape[0])[:, None, None]
        return jnp.where(ahead < size, text[rows, jnp.minimum(ahead, size - 1)], -1), run

    def observe(self, params, draft, proposal, output, verdict):
        return appended(draft, verdict.emitted, verdict.committed) if self.pieces else draft


def runs_of(text: Array, recent: Array, within: Array) -> Array:
    """How many of each row's last tokens stand before every place, `[B, G]` int32.

    Args:
      text: `[B or 1, G]` int32; -1 matches nothing.
      recent: `[B, M]` int32, the last tokens, the last one first; -1 matches nothing.
      within: `[B or 1, G]` bool, places that count.
    """
    size, most = text.shape[1], recent.shape[1]
    padded = jnp.pad(text, ((0, 0), (most, 0)), constant_values=-1)

    def further(carry):
        back, same, runs = carry
        before = jax.lax.dynamic_slice_in_dim(padded, most - 1 - back, size, axis=1)
        last = jax.lax.dynamic_slice_in_dim(recent, back, 1, axis=1)
        same = same & (before == last) & (last >= 0)
        return back + 1, same, runs + same

    shape = (recent.shape[0], size)
    start = jnp.int32(0), jnp.broadcast_to(within, shape), jnp.zeros(shape, jnp.int32)
    return jax.lax.while_loop(lambda carry: (carry[0] < most) & carry[1].any(), further, start)[2]


def likeliest(tokens: Array, run: Array, allowed: Array, min_prob: float, more: Array) -> tuple[Array, Array]:
    """The draft with the largest sum of chances, over all lengths of a match; see `Suffix`.

    Args:
      tokens: `[B, R, K]` int32, what follows each match, -1 from its end on.
      run: `[B, R]` int32, how long the matches are.
      allowed: `[M]` int32, how many tokens a match of 1 to M tokens may draft.
      min_prob: the smallest chance of a token.
      more: `[B]` int32, occurrences of every suffix that are no matches.

    Returns:
      Tokens `[B, K]`, and their chances `[B, K]`; 0 from where the draft ends.
    """
    length = tokens.shape[2]
    _, alive, counts = counted(tokens, run, allowed.shape[0])
    stays = alive
    for depth in range(length):
        here = jnp.where(stays, counts[..., depth], -1)
        stays = stays & (here == here.max(axis=2, keepdims=True))
    chosen = jnp.argmax(stays, axis=2)  # [B, M], of those that tie to the end the longest match, then the newest
    ways = jnp.take_along_axis(counts, chosen[:, :, None, None], axis=2)[:, :, 0]
    chances = ways / jnp.maximum(alive.sum(axis=2) + more[:, None], 1)[:, :, None]
    goes = (chances >= min_prob) & (ways > 0) & (jnp.arange(length)[None] < allowed[:, None])[None]
    chances = jnp.where(jnp.cumprod(goes, axis=2) > 0, chances, 0.0)
    score = chances.sum(axis=2)
    best = score.shape[1] - 1 - jnp.argmax(score[:, ::-1], axis=1)  # on a tie the longer match
    pick = lambda x: jnp.take_along_axis(x, best[:, None, None], axis=1)[:, 0]
    match = jnp.take_along_axis(chosen, best[:, None], axis=1)
    return jnp.take_along_axis(tokens, match[:, :, None], axis=1)[:, 0], pick(chances)


def branches(
    tokens: Array, run: Array, allowed: Array, deepest: Array, min_prob: float, more: Array
) -> tuple[Array, Array, Array]:
    """What belongs to the tree with the largest sum of chances, over all lengths of a match; see `Suffix`.

    Args:
      tokens: `[B, R, K]` int32, what follows each match, -1 from its end on.
      run: `[B, R]` int32, how long the matches are, the longest first.
      allowed: `[M]` int32, how many tokens a match of 1 to M tokens may draft.
      deepest: `[M]` int32, and how far below the root.
      min_prob: the smallest chance of a token.
      more: `[B]` int32, occurrences of every suffix that are no matches.

    Returns:
      Which tokens are likely enough `[B, R, K]` bool, how many of them to take `[B]` int32, and their sum `[B]`.
    """
    length = tokens.shape[2]
    alike, alive, counts = counted(tokens, run, allowed.shape[0])
    chances = counts / jnp.maximum(alive.sum(axis=2) + more[:, None], 1)[:, :, None, None]
    likely = alive[..., None] & (counts > 0) & (chances >= min_prob)
    likely = likely & (jnp.arange(length)[None] < deepest[:, None])[None, :, None]
    earlier = jnp.tril(jnp.ones(alike.shape[1:3]), -1)[None, :, :, None]
    first = (alike * earlier).max(axis=2) == 0  # [B, R, K], whether no longer match begins alike
    each = jnp.where(likely & first[:, None], chances, 0.0).reshape(*alive.shape[:2], -1)
    most = jax.lax.top_k(each, length)[0]
    score = jnp.where(jnp.arange(length)[None] < allowed[:, None], most, 0.0).sum(axis=2)
    best = score.shape[1] - 1 - jnp.argmax(score[:, ::-1], axis=1)  # on a tie the longer match
    real = jnp.take_along_axis(likely, best[:, None, None, None], axis=1)[:, 0]
    return real, allowed[best], score.max(axis=1)


def counted(tokens: Array, run: Array, most: int) -> tuple[Array, Array, Array]:
    """How often matches of 1 to M tokens go on alike.

    Args:
      tokens: `[B, R, K]` int32, what follows each match, -1 from its end on.
      run: `[B, R]` int32, how long the matches are.
      most: M.

    Returns:
      Whether two go on alike `[B, R, R, K]` float32; whether one is as long `[B, M, R]`; and how many as long go on as it
      does `[B, M, R, K]` float32.
    """
    equal = (tokens[:, :, None] == tokens[:, None]) & (tokens >= 0)[:, :, None]
    alike = jnp.cumprod(equal, axis=3, dtype=jnp.float32)
    alive = run[:, None] >= 1 + jnp.arange(most)[None, :, None]
    return alike, alive, jnp.einsum("bms,brsk->bmrk", alive.astype(jnp.float32), alike)


def cut(tree: Tree, count: Array) -> Tree:
    """A tree's root and its first `count` `[B]` other nodes."""
    kept = tree.valid & (jnp.arange(tree.nodes)[None] <= count[:, None])
    of = lambda values, none: jnp.where(kept, values, none)
    return dataclasses.replace(
        tree, tokens=of(tree.tokens, -1), parent=of(tree.parent, 0), depth=of(tree.depth, 1), valid=kept
    )


def _best(score: Array, found: Array) -> Array:
    """Of each row's places, `found` `[P, B, ...]`, the one with the largest `score` `[P B]`; on a tie the row's own."""
    best = jnp.argmax(score.reshape(found.shape[:2]), axis=0)
    return found[best, jnp.arange(found.shape[1])]


def appended(outputs: Outputs, tokens: Array, count: Array) -> Outputs:
    """The texts after every row wrote `count` `[B]` of its `tokens` `[B, T]`, at most a piece of them."""
    size, width = outputs.pieces.shape[0], outputs.pieces.shape[1] - 1
    count = jnp.minimum(count, width)  # a drafter beside it may be deeper
    had = -(-outputs.written // width)
    new = -(-(outputs.written + count) // width) > had
    turn = (outputs.head + jnp.cumsum(new) - new) % size
    pieces = outputs.pieces.at[jnp.where(new, turn, size)].set(-1, mode="drop")
    at = outputs.written[:, None] + jnp.arange(tokens.shape[1])[None]
    own = jnp.where(at // width < had[:, None], outputs.piece[:, None], turn[:, None])
    real = jnp.arange(tokens.shape[1])[None] < count[:, None]
    pieces = pieces.at[jnp.where(real, own, size), at % width].set(tokens, mode="drop")
    piece, written = jnp.where(new, turn, outputs.piece), outputs.written + count
    # a row whose piece was given to another one goes on in a new one
    taken = jnp.any((piece[:, None] == turn[None]) & new[None] & ~jnp.eye(len(piece), dtype=bool), axis=1)
    written = jnp.where(taken, -(-written // width) * width, written)
    return Outputs(pieces, (outputs.head + new.sum()) % size, piece, written)
