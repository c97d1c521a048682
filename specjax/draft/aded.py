"""ADED: a tree search over what followed every two tokens before (Liu et al. 2024, arXiv:2407.12021).

In the shape descriptions `S` denotes slots of the table, `K` tokens kept for a pair, `M` tri-grams at a time, `A` nodes of
the search, `P` kept nodes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, ladder
from specjax.draft.ngram_mod import index, read_texts, windows
from specjax.draft.rest import last_tokens
from specjax.draft.texts import TextsDrafter
from specjax.tree import Tree

Array = jax.Array

BASE = 8.0
"""After about so many visits, a node's children are explored more."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trigrams:
    """How often a token followed two others, in the texts of all rows.

    Attributes:
      keys: `[S, 2]` int32, the pair of each slot; -1 in empty ones.
      ids: `[S, K]` int32, tokens that followed; -1 in empty places.
      counts: `[S, K]` int32, how often; 0 in empty places.
      read: `[B]` int32, tri-grams of each row's text that are counted.
    """

    keys: Array
    ids: Array
    counts: Array
    read: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Search:
    """The nodes of a search, the root first; a node's children lie side by side, the likeliest first.

    Attributes:
      pair: `[B, A, 2]` int32, the token before a node and its own; its own is -1 where there is no node.
      parent: `[B, A]` int32.
      depth: `[B, A]` int32.
      chance: `[B, A]` float32, the node's chance after its parent; 0 for the root.
      child: `[B, A]` int32, the first child; 0 for none.
      visits: `[B, A]` float32.
      value: `[B, A]` float32, the sum over visits.
    """

    pair: Array
    parent: Array
    depth: Array
    chance: Array
    child: Array
    visits: Array
    value: Array


@dataclasses.dataclass(frozen=True)
class Aded(TextsDrafter):
    """A tree of the nodes that a search visits most, each with its likeliest next token; no trained parameters.

    A token's chance is how often it followed the two before, in the texts of all rows, divided by how often any token
    did. The search starts from the text's last two tokens. Each round goes down from the root to a node without children
    by PUCT: the child is taken that has the largest `value + c * chance * sqrt(N) / (1 + n)`, with n and N the visits of
    child and parent and `c = explore + log((N + 9) / 8)`; one that was never visited comes first. That node's next
    tokens become its children, and the likeliest one is visited. The round is worth one and the chances on its way,
    gone on to `length - 1` tokens by the likeliest ones; a node's value is the mean over its visits.

    The authors' program begins with the table of a corpus. It raises a tri-gram's chance by 0.04 at every step that finds
    it among the last 16 tokens. A round goes on by random tokens, and the longest ways are dropped until all together
    have 64 tokens. Here the table begins with the counts of a datastore if there is one (`specjax datastore build`), otherwise
    empty. A tri-gram is counted once each time it is written, and nothing is drawn or dropped.

    Rows share the table; that changes speed, never text. Of two pairs with one slot the later one counts; of a datastore's
    the one with the most frequent tri-gram.

    Attributes:
      paths: P.
      length: the tokens of the longest way, at least 2.
      rounds: of the search.
      explore: the weight of chances against values.
      k: K; the rarest one gives way.
      slots: S, a power of two.
    """

    about = About(
        "aded",
        "a tree search over what followed the last two tokens, in the texts of all rows",
        "arXiv:2407.12021",
        fields=("paths", "length", "rounds", "explore", "k", "slots"),
        paper="paths=23,rounds=150,k=12",
        loads="texts",
    )

    paths: int = 6
    length: int = 4
    rounds: int = 24
    explore: float = 32.0
    k: int = 4
    slots: int = 1 << 16

    def __post_init__(self):
        if self.length < 2 or min(self.paths, self.rounds, self.k) < 1 or not 0 <= self.explore < math.inf:
            raise ValueError(f"aded needs length >= 2, paths, rounds, k >= 1 and a finite explore >= 0, got {self}")
        if self.paths > self.rounds * self.k:
            raise ValueError(
                f"aded finds at most {self.rounds * self.k} nodes in {self.rounds} rounds, got {self.paths}"
            )
        if self.slots < 1 or self.slots & (self.slots - 1) or self.slots > 1 << 30:
            raise ValueError(f"aded needs a power of two as slots, at most 2^30, got {self.slots}")

    @property
    def nodes(self) -> int:
        return 1 + 2 * self.paths

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    @property
    def alone(self) -> bool:
        return False

    def init(self, params, batch, capacity):
        none = lambda *shape: jnp.full(shape, -1, jnp.int32)
        counts, read = jnp.zeros((self.slots, self.k), jnp.int32), jnp.zeros((batch,), jnp.int32)
        empty = Trigrams(none(self.slots, 2), none(self.slots, self.k), counts, read)
        return of_texts(empty, params["draft"]["tokens"], self.vocab_size or 0) if self.filled else empty

    def axes(self, draft):
        names: tuple[Any, ...] = (None, None), (None, None), (None, None), ("batch",)
        return Trigrams(*names)

    def encode(self, params, draft, source, tokens):
        if tokens is None or tokens.shape[1] < 3:
            return draft
        grams = windows(tokens, 3)
        return counted(draft, grams, jnp.all(grams >= 0, axis=2))

    def propose(self, params, draft, view, sampler):
        draft = read_texts(draft, view, 2, counted)
        pair = last_tokens(view, 2)[:, ::-1]
        return Proposal(most_visited(draft, self._searched(draft, pair), self.paths, self.length), draft)

    def _searched(self, table: Trigrams, pair: Array) -> Search:
        """The search from pairs `[B, 2]`; without a round if no pair has a next token."""
        batch, size = pair.shape[0], 1 + self.rounds * self.k
        whole, real = jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch, size), jnp.float32)
        begun = Search(
            jnp.full((batch, size, 2), -1, jnp.int32).at[:, 0].set(pair), whole, whole, real, whole, real, real
        )
        rounds = jnp.where(jnp.any(followers(table, pair)[0] >= 0), self.rounds, 0)
        return jax.lax.fori_loop(0, rounds, lambda turn, search: self._round(table, search, turn), begun)

    def _round(self, table, search, turn):
        """The search after one more visit; new nodes take the places from `1 + turn * K` on."""
        batch, size = search.visits.shape
        rows, root, new = jnp.arange(batch), jnp.zeros((batch,), jnp.int32), 1 + turn * self.k

        def down(carry, _):
            node, depth, worth = carry
            first = search.child[rows, node]
            choice = first + jnp.argmax(puct(search, node, first, self.k, self.explore), axis=1)
            goes = first > 0
            worth = worth + jnp.where(goes, search.chance[rows, choice], 0)
            return (jnp.where(goes, choice, node), depth + goes, worth), jnp.where(goes, choice, size)

        begun = root, root, jnp.ones((batch,), jnp.float32)
        (node, depth, worth), way = jax.lax.scan(down, begun, None, self.length - 1)
        pair = search.pair[rows, node]
        ids, chances = followers(table, pair)
        grows = (depth < self.length - 1) & (ids[:, 0] >= 0)
        search = grown(search, node, depth, jnp.where(grows[:, None], ids, -1), chances, new)

        def on(carry, _):
            pair, depth, worth = carry
            ids, chances = followers(table, pair)
            goes = (depth < self.length - 1) & (ids[:, 0] >= 0)
            pair = jnp.where(goes[:, None], jnp.stack([pair[:, 1], ids[:, 0]], axis=1), pair)
            return (pair, depth + goes, worth + jnp.where(goes, chances[:, 0], 0)), None

        (_, _, worth), _ = jax.lax.scan(on, (pair, depth, worth), None, self.length - 1)
        last = jnp.where(grows, new, size)
        visited = rows[:, None], jnp.concatenate([root[:, None], way.T, last[:, None]], axis=1)
        visits = search.visits.at[visited].add(1, mode="drop")
        value = search.value.at[visited].add(worth[:, None], mode="drop")
        return dataclasses.replace(search, visits=visits, value=value)


def puct(search: Search, node: Array, first: Array, k: int, explore: float) -> Array:
    """What the k children from `first` `[B]` on are worth to the next visit of their parent `node` `[B]`, `[B, K]` float32.

    Infinite for one that was never visited, -inf where there is none.
    """
    rows = jnp.arange(node.shape[0])[:, None]
    children = rows, first[:, None] + jnp.arange(k)[None]
    total, visits = search.visits[rows[:, 0], node][:, None], search.visits[children]
    more = (explore + jnp.log((total + BASE + 1) / BASE)) * search.chance[children] * jnp.sqrt(total) / (1 + visits)
    worth = jnp.where(visits > 0, search.value[children] / jnp.maximum(visits, 1) + more, jnp.inf)
    return jnp.where(search.pair[..., 1][children] >= 0, worth, -jnp.inf)


def grown(search: Search, node: Array, depth: Array, ids: Array, chances: Array, first: Array) -> Search:
    """The search after tokens `ids` `[B, K]`, -1 for none, became children of `node` `[B]` at `depth` `[B]`, from place
    `first` on.
    """
    rows = jnp.arange(node.shape[0])
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), first, axis=1)
    every = lambda x: jnp.broadcast_to(x[:, None], ids.shape)
    before = every(search.pair[rows, node, 1])
    child = search.child.at[rows, node].max(jnp.where(ids[:, 0] >= 0, first, 0))
    return dataclasses.replace(
        search,
        pair=put(search.pair, jnp.stack([before, ids], axis=2)),
        parent=put(search.parent, every(node)),
        depth=put(search.depth, every(depth + 1)),
        chance=put(search.chance, chances),
        child=child,
    )


def most_visited(table: Trigrams, search: Search, paths: int, length: int) -> Tree:
    """The `paths` nodes with most visits, and after them the likeliest next token of each that is not among them.

    Of equally visited nodes the one found first counts, so every parent comes before its children.
    """
    exists = (search.pair[..., 1] >= 0) & (jnp.arange(search.visits.shape[1])[None] > 0)
    _, kept = jax.lax.top_k(jnp.where(exists, search.visits, -1.0), paths)
    pick = lambda x: jnp.take_along_axis(x, kept, axis=1)
    real, above, depth, token = pick(exists), pick(search.parent), pick(search.depth), pick(search.pair[..., 1])
    pair = jnp.take_along_axis(search.pair, kept[:, :, None], axis=1)
    slot = 1 + jnp.arange(paths)
    below = (above[:, None, :] == kept[:, :, None]) & real[:, None] & real[:, :, None]  # [B, P, P]: children of each
    parent = jnp.where(below, slot[None, :, None], 0).max(axis=1)
    following = followers(table, pair)[0][:, :, 0]
    fresh = real & (following >= 0) & ~jnp.any(below & (token[:, None, :] == following[:, :, None]), axis=2)

    valid = jnp.concatenate([real, fresh], axis=1)
    order = jnp.argsort(~valid, axis=1, stable=True)
    valid = jnp.take_along_axis(valid, order, axis=1)

    def both(kept, new, root, none):
        joined = jnp.take_along_axis(jnp.concatenate([kept, jnp.broadcast_to(new, kept.shape)], axis=1), order, axis=1)
        return jnp.concatenate([root, jnp.where(valid, joined, none)], axis=1).astype(jnp.int32)

    first = lambda value: jnp.full((valid.shape[0], 1), value)
    return Tree(
        tokens=both(token, following, search.pair[:, :1, 1], -1),
        parent=both(parent, slot[None], first(-1), 0),
        depth=both(depth, depth + 1, first(0), 1),
        valid=jnp.concatenate([first(True), valid], axis=1),
        max_depth=length,
    )


def followers(table: Trigrams, pair: Array) -> tuple[Array, Array]:
    """What followed pairs `[..., 2]`: tokens `[..., K]`, the likeliest first, -1 where there are fewer; and their chances."""
    slot = index(pair, table.keys.shape[0])
    known = jnp.all((table.keys[slot] == pair) & (pair >= 0), axis=-1, keepdims=True)
    counts, order = jax.lax.top_k(jnp.where(known, table.counts[slot], 0).astype(jnp.float32), table.ids.shape[1])
    ids = jnp.take_along_axis(table.ids[slot], order, axis=-1)
    return jnp.where(counts > 0, ids, -1), counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1)


def of_texts(table: Trigrams, tokens: Array, vocab_size: int) -> Trigrams:
    """An empty table after all tri-grams of a datastore.

    A slot takes the pair of its most frequent tri-gram, and that pair's K most frequent next tokens, smaller tokens first.

    Args:
      table: without tri-grams.
      tokens: `[M]`, V between documents.
      vocab_size: V.
    """
    slots, k = table.ids.shape
    grams = windows(tokens[None].astype(jnp.int32), 3)[0]
    size = grams.shape[0]
    turn = jnp.arange(size)
    changes = lambda x: jnp.append(True, x[1:] != x[:-1])
    real = jnp.all(grams < vocab_size, axis=1)
    outside, *columns = jax.lax.sort((~real, grams[:, 0], grams[:, 1], grams[:, 2]), num_keys=4)
    leads = (
        changes(outside) | changes(columns[0]) | changes(columns[1]) | changes(columns[2])
    )  # the first of equal ones
    ahead = jax.lax.cummin(jnp.where(leads, turn, size), reverse=True)
    times = jnp.append(ahead[1:], size) - turn
    slot = jnp.where(leads & ~outside, index(jnp.stack(columns[:2], axis=1), slots), slots)

    slot, times, *columns = jax.lax.sort((slot, -times, *columns), num_keys=5)
    pair, token = jnp.stack(columns[:2], axis=1), columns[2]
    first = jax.lax.cummax(jnp.where(changes(slot), turn, 0))
    own = jnp.all(pair == pair[first], axis=1) & (slot < slots)
    rank = jnp.cumsum(own) - own
    rank = rank - rank[first]
    put = jnp.where(own & (rank < k), slot, slots), jnp.minimum(rank, k - 1)
    return dataclasses.replace(
        table,
        keys=table.keys.at[put[0]].set(pair, mode="drop"),
        ids=table.ids.at[put].set(token, mode="drop"),
        counts=table.counts.at[put].set(-times, mode="drop"),
    )


def counted(table: Trigrams, grams: Array, real: Array) -> Trigrams:
    """The table after more tri-grams, in whatever order they come.

    Of several pairs with one slot the largest counts. Known tokens are counted first. Each new one then takes the place
    of the rarest, smaller tokens first.

    Args:
      table: before.
      grams: `[B, M, 3]` int32.
      real: `[B, M]` bool, which of them count.
    """
    slots, k = table.ids.shape
    grams = grams.reshape(-1, 3)
    size = grams.shape[0]
    slot = jnp.where(real.reshape(-1), index(grams[:, :2], slots), slots)
    slot, *columns = jax.lax.sort((slot, grams[:, 0], grams[:, 1], grams[:, 2]), num_keys=4)
    pair, token, turn = jnp.stack(columns[:2], axis=1), columns[2], jnp.arange(size)
    changes = lambda x: jnp.append(True, x[1:] != x[:-1])
    begins = changes(slot)  # a slot's first tri-gram
    leads = begins | changes(columns[0]) | changes(columns[1]) | changes(token)  # the first of equal ones
    ahead = lambda starts: jnp.append(jax.lax.cummin(jnp.where(starts, turn, size), reverse=True)[1:], size)
    times = ahead(leads) - turn
    wins = jnp.all(pair == pair[ahead(begins) - 1], axis=1) & (slot < slots)
    leads = leads & wins

    at = jnp.minimum(slot, slots - 1)
    other = wins & jnp.any(table.keys[at] != pair, axis=1)
    anew = jnp.where(other, slot, slots)
    keys = table.keys.at[anew].set(pair, mode="drop")
    ids, counts = table.ids.at[anew].set(-1, mode="drop"), table.counts.at[anew].set(0, mode="drop")
    same = ids[at] == token[:, None]
    known = same.any(axis=1)
    counts = counts.at[jnp.where(leads & known, slot, slots), jnp.argmax(same, axis=1)].add(times, mode="drop")
    new = leads & ~known
    rank = jnp.cumsum(new) - new
    rank = rank - jax.lax.cummax(jnp.where(begins, rank, 0))
    rarest = jnp.argsort(counts[at], axis=1, stable=True)
    place = jnp.take_along_axis(rarest, jnp.minimum(rank, k - 1)[:, None], axis=1)[:, 0]
    put = jnp.where(new & (rank < k), slot, slots), place
    ids, counts = ids.at[put].set(token, mode="drop"), counts.at[put].set(times, mode="drop")
    return dataclasses.replace(table, keys=keys, ids=ids, counts=counts.astype(jnp.int32))
