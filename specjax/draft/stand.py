"""STAND: an n-gram memory of the target's own distributions, from which it drafts with the target's own noise
(arXiv:2506.04708).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.draft.base import Proposal, ladder
from specjax.draft.table import TableDrafter
from specjax.tree import Tree, log_q_of

Array = jax.Array

CONTEXT = 3
"""Tokens of the longest context; the memory has contexts of 3, 2 and 1 tokens (4-, 3- and 2-grams)."""

_KEPT = np.triu(np.ones((CONTEXT, CONTEXT), bool))  # the longest context first; each next one drops its earliest token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """A hash table from contexts to the target's average distribution after them, shared by all rows.

    Attributes:
      keys: `[S, 3]` int32 contexts, the latest token last, -1 in front of shorter ones and in empty slots.
      ids: `[S, k]` int32, the likeliest next tokens, -1 where there are fewer.
      probs: `[S, k]` float32, their average probabilities, 0 where there are fewer.
      seen: `[S]` int32, the number of distributions in the average.
      tail: `[B, 3]` int32, each row's last committed tokens at its latest proposal; -1 before its text.
    """

    keys: Array
    ids: Array
    probs: Array
    seen: Array
    tail: Array


@dataclasses.dataclass(frozen=True)
class Stand(TableDrafter):
    """A static tree filled with the target's earlier distributions after the same last 3, 2 or 1 tokens.

    A node takes its longest known context. Its children are the best of `log q / temperature + g` with the position's
    shared noise. So a memory equal to the target's distribution proposes the target's own draws. A distribution is
    stored as the probabilities of the k largest logits, normalised among themselves. Drafting reads no more, and needs
    no softmax over V.

    The rows of a batch share the memory, because several completions of one prompt repeat each other's n-grams; that
    changes speed, never text. The memory learns from the accepted path alone, whose contexts are known to occur.

    Attributes:
      k: next tokens kept for a context.
      slots: S, contexts held. If all `probes` places of a context are taken, the least seen context is replaced.
      probes: places in which a context may lie.
    """

    about = About("stand", "a table of the target's average distributions after its last tokens", "arXiv:2506.04708")

    tree: str = "2 | 1 1 | 1 | 1 | 1 | 1"
    k: int = 10
    slots: int = 1 << 16
    probes: int = 4

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.probes <= self.slots:
            raise ValueError(f"stand needs 1 <= probes <= slots, got {self.probes} and {self.slots}")

    @property
    def alone(self) -> bool:
        return False

    @property
    def children(self):
        return "coupled"

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def init(self, params, batch, capacity):
        return Memory(
            keys=jnp.full((self.slots, CONTEXT), -1, jnp.int32),
            ids=jnp.full((self.slots, self.k), -1, jnp.int32),
            probs=jnp.zeros((self.slots, self.k), jnp.float32),
            seen=jnp.zeros((self.slots,), jnp.int32),
            tail=jnp.full((batch, CONTEXT), -1, jnp.int32),
        )

    skips = False

    def axes(self, draft):
        shared = jax.tree.map(lambda leaf: (None,) * leaf.ndim, draft)
        return dataclasses.replace(shared, tail=("batch", None))

    def propose(self, params, draft, view, sampler):
        topology = self.topology
        parents, ranks, depths = topology.parents, topology.ranks, topology.depths
        back = view.length[:, None] - CONTEXT + jnp.arange(CONTEXT)[None]
        tail = jnp.take_along_axis(view.tokens, jnp.maximum(back, 0), axis=1)
        tail = jnp.where(back >= 0, tail, -1)
        columns, last, dists = {0: view.root}, {0: tail}, {}
        for depth in range(self.depth):
            frontier = [n for n in range(self.nodes) if depths[n] == depth and n in parents]
            ids, probs = self._recall(draft, jnp.stack([last[n] for n in frontier], axis=1))
            log_q = jnp.log(probs)
            scores = sampler.scores_at(log_q, ids, depth)
            if view.keep_q:
                for i, n in enumerate(frontier):
                    dists[n] = drawn_from(log_q[:, i], ids[:, i], sampler.params.temperature, self.vocab_size or 0)
            width = 1 + max(ranks[n] for n in range(1, self.nodes) if parents[n] in frontier)
            values, order = jax.lax.top_k(scores, width)
            best = jnp.where(values > -jnp.inf, jnp.take_along_axis(ids, order, axis=2), -1)
            for n in range(1, self.nodes):
                if parents[n] in frontier:
                    columns[n] = best[:, frontier.index(parents[n]), ranks[n]]
                    last[n] = jnp.concatenate([last[parents[n]][:, 1:], columns[n][:, None]], axis=1)
        tokens = jnp.stack([columns[n] for n in range(self.nodes)], axis=1)
        log_q = log_q_of(dists, self.nodes) if dists else None
        tree = Tree.of(topology, tokens, tokens >= 0, log_q=log_q, children=self.children)
        return Proposal(tree, dataclasses.replace(draft, tail=tail))

    def encode(self, params, draft, source, tokens):
        if tokens is None or tokens.shape[1] < 2:
            return draft
        learnt = self._read_text(draft, tokens[:, :-1], tokens[:, 1:] >= 0, tokens[:, 1:])
        return dataclasses.replace(learnt, tail=draft.tail)

    def prefill(self, params, draft, chunk, output):
        return self._read_text(draft, chunk.block.tokens, chunk.real, chunk.following)

    def _read_text(self, draft: Memory, tokens: Array, real: Array, following: Array) -> Memory:
        """Learns given tokens `[B, T]`, of which some are `real`, each with certainty after those before it."""
        text = jnp.concatenate([draft.tail, tokens], axis=1)
        last = jnp.stack([text[:, 1 + i : 1 + i + tokens.shape[1]] for i in range(CONTEXT)], axis=-1)
        certain = jnp.arange(self.k) == 0
        ids = jnp.where(certain, following[..., None], -1)
        dists = jnp.broadcast_to(certain.astype(jnp.float32), ids.shape)
        read = real.sum(axis=1)[:, None] + jnp.arange(CONTEXT)[None]
        tail = jnp.take_along_axis(text, read, axis=1)
        return dataclasses.replace(self._learn_after(draft, last, real, ids, dists), tail=tail)

    def observe(self, params, draft, proposal, output, verdict):
        path = jnp.maximum(verdict.path, 0)
        values, ids = (jnp.take_along_axis(x[..., : self.k], path[:, :, None], axis=1) for x in output.topk)
        dists = jax.nn.softmax(values, axis=-1)
        text = jnp.concatenate([draft.tail[:, :-1], jnp.take_along_axis(proposal.tree.tokens, path, axis=1)], axis=1)
        steps = path.shape[1]
        last = jnp.stack([text[:, i : i + steps] for i in range(CONTEXT)], axis=-1)  # [B, D + 1, 3]
        # the distribution after a node counts if it decided a committed token
        known = (jnp.arange(steps)[None] < verdict.committed[:, None]) & jnp.isfinite(dists).all(axis=-1)
        return self._learn_after(draft, last, known, ids, dists)

    def _learn_after(self, memory: Memory, last: Array, known: Array, ids: Array, dists: Array) -> Memory:
        """Learns distributions (`ids`, `dists` `[B, T, k]`) after every context of `last` `[B, T, 3]`, where `known`
        `[B, T]`.
        """
        keys, complete = contexts(last)
        spread = lambda x: jnp.repeat(x.reshape(-1, self.k), CONTEXT, axis=0)
        learns = (complete & known[:, :, None]).reshape(-1)
        return self._learn(memory, keys.reshape(-1, CONTEXT), learns, spread(ids), spread(dists))

    def _places(self, keys: Array) -> Array:
        """The slots `[..., P]` in which `keys` `[..., 3]` may lie."""
        mixed = jnp.zeros(keys.shape[:-1], jnp.uint32)
        for i in range(CONTEXT):
            mixed = (mixed ^ keys[..., i].astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            mixed = mixed ^ (mixed >> 15)
        return jnp.stack([(mixed + i) % self.slots for i in range(self.probes)], axis=-1).astype(jnp.int32)

    def _recall(self, memory: Memory, last: Array) -> tuple[Array, Array]:
        """Candidates and probabilities `[B, F, k]` after nodes whose last tokens are `last` `[B, F, 3]`."""
        keys, _ = contexts(last)
        places = self._places(keys)
        hit = jnp.all(memory.keys[places] == keys[..., None, :], axis=-1)
        batch, count = last.shape[:2]
        places, hit = places.reshape(batch, count, -1), hit.reshape(batch, count, -1)  # longest contexts first
        slot = jnp.take_along_axis(places, jnp.argmax(hit, axis=-1)[..., None], axis=-1)[..., 0]
        return memory.ids[slot], jnp.where(hit.any(axis=-1)[..., None], memory.probs[slot], 0)

    def _learn(self, memory: Memory, keys: Array, known: Array, ids: Array, probs: Array) -> Memory:
        """Averages M distributions (`ids`, `probs` `[M, k]`) into the slots of `keys` `[M, 3]`, where `known` `[M]`.

        All M are looked up in the memory as it was; if several get the same slot, the last one counts.
        """
        places = self._places(keys)
        same = jnp.all(memory.keys[places] == keys[:, None, :], axis=-1)
        seen = memory.seen[places]
        choice = jnp.argmin(jnp.where(same, -1, seen), axis=1)[:, None]
        pick = lambda x: jnp.take_along_axis(x, choice, axis=1)[:, 0]
        slot, count = pick(places), pick(jnp.where(same, seen, 0))
        ids, probs = average(memory.ids[slot], memory.probs[slot], count, ids, probs)
        slot = jnp.where(known, slot, self.slots)
        order = jnp.argsort(slot, stable=True)
        sorted_slot = slot[order]
        wins = sorted_slot != jnp.append(sorted_slot[1:], self.slots + 1)
        target = jnp.where(wins, sorted_slot, self.slots)
        put = lambda table, new: table.at[target].set(new[order], mode="drop")
        return dataclasses.replace(
            memory,
            keys=put(memory.keys, keys),
            ids=put(memory.ids, ids),
            probs=put(memory.probs, probs),
            seen=put(memory.seen, count + 1),
        )


def contexts(last: Array) -> tuple[Array, Array]:
    """The contexts of `last` `[..., 3]`: its last 3, 2 and 1 tokens, `[..., 3, 3]`, and whether each is free of -1,
    `[..., 3]`.
    """
    last = last[..., None, :]
    kept = _KEPT.reshape((1,) * (last.ndim - 2) + _KEPT.shape)
    return jnp.where(kept, last, -1), jnp.all((last >= 0) | ~kept, axis=-1)


def drawn_from(log_q: Array, ids: Array, temperature: Array, vocab: int) -> Array:
    """The distribution of a node's best candidate over the vocabulary, `[B, V]` log-probabilities; one-hot in greedy rows.

    Args:
      log_q: `[B, k]`; -inf where there is no candidate.
      ids: `[B, k]`, distinct but for -1.
      temperature: `[B]`.
      vocab: V.
    """
    heat = temperature[:, None]
    greedy = jnp.where(jax.nn.one_hot(jnp.argmax(log_q, axis=1), ids.shape[1]) > 0, log_q, -jnp.inf)
    scores = jnp.where(heat > 0, log_q / jnp.where(heat > 0, heat, 1), greedy)
    some = scores.max(axis=1, keepdims=True) > -jnp.inf
    dist = jnp.where(some, jax.nn.log_softmax(jnp.where(some, scores, 0), axis=1), -jnp.inf)
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.full((ids.shape[0], vocab), -jnp.inf).at[rows, jnp.where(ids >= 0, ids, vocab)].set(dist, mode="drop")


def average(ids: Array, probs: Array, count: Array, new_ids: Array, new_probs: Array) -> tuple[Array, Array]:
    """The average of distributions after one more, over the union of their tokens; the k likeliest stay.

    Args:
      ids: `[M, k]`, distinct but for -1.
      probs: `[M, k]`, an average over `count` distributions.
      count: `[M]`; 0 discards `ids`.
      new_ids: `[M, k]`.
      new_probs: `[M, k]`.
    """
    share = 1 / (count[:, None] + 1).astype(jnp.float32)
    same = (ids[:, :, None] == new_ids[:, None, :]) & (count[:, None, None] > 0)
    old = probs * (1 - share) + jnp.where(same, new_probs[:, None, :], 0).sum(axis=2) * share
    old = jnp.where((count[:, None] > 0) & (ids >= 0), old, -1)
    fresh = jnp.where(same.any(axis=1), -1, new_probs * share)
    union = jnp.concatenate([old, fresh], axis=1)
    best, order = jax.lax.top_k(union, ids.shape[1])
    kept = jnp.take_along_axis(jnp.concatenate([ids, new_ids], axis=1), order, axis=1)
    return jnp.where(best > 0, kept, -1).astype(jnp.int32), jnp.maximum(best, 0)
