"""ASAp, grammar-aligned decoding (Park et al. 2024, arXiv:2405.21047): texts that come nearer to the aligned distribution.

The aligned distribution is the model's own, given that the text is in a constraint's language.

In the shape descriptions `B` denotes rows (prompts), `R` samples of a row, `M` nodes of a trie, `L` the text buffer, `V` the
vocabulary.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.arrays import PyTree
from specjax.lm import LM, Block, Wants
from specjax.prompts import Prompts
from specjax.sampling.noise import gumbel_at
from specjax.sampling.warp import allowed, unrestricted
from specjax.search.base import Beams, Found, Search, SearchSettings, SearchState
from specjax.search.fork import merged, parted
from specjax.sharding.ambient import on_mesh
from specjax.state import Finish, Prefix

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk(Beams):
    """The sample that grows, `[B, 1, L]` tokens, and the trie of all visited beginnings of texts.

    A node has an upper bound of the probability that a text with this beginning is completed within the language.
    Beginnings without a node have the bound 1.

    Attributes:
      length: `[B]` int32, of the sample.
      sample: `[B]` int32, its number.
      log_prob: `[B]` float32, of its new tokens, before the constraint.
      node: `[B]` int32, the sample's node; -1 outside the trie.
      count: `[B]` int32, how many nodes there are; the first is that of the prompt.
      parent: `[B, M]` int32, of each node; -1 for none.
      token: `[B, M]` int32, the last token of each.
      log_bound: `[B, M]` float32, the logarithm of each node's bound.
      nodes: `[B, L]` int32, the node before each position of the sample.
      log_taken: `[B, L]` float32, the log-probability of the token that was drawn there.
      log_rest: `[B, L]` float32, the logarithm of the other tokens' part of that node's bound.
      origin: the target's running states after the prompt.
    """

    length: Array
    sample: Array
    log_prob: Array
    node: Array
    count: Array
    parent: Array
    token: Array
    log_bound: Array
    nodes: Array
    log_taken: Array
    log_rest: Array
    origin: PyTree

    @classmethod
    def begun(cls, state: SearchState, most: int, origin: PyTree) -> Self:
        """The first sample of every row of a state that holds prompts, and tries of `most` nodes."""
        batch, whole = state.tokens.shape[0], jnp.zeros(state.tokens.shape)
        zeros, wide = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, most), jnp.int32)
        return cls(
            tokens=state.tokens[:, None] + 0,
            scores=jnp.zeros((batch, 1)),
            length=state.prompt_length + 0,
            sample=zeros,
            log_prob=zeros.astype(jnp.float32),
            node=zeros + 0,
            count=zeros + 1,
            parent=wide - 1,
            token=wide,
            log_bound=wide.astype(jnp.float32),
            nodes=whole.astype(jnp.int32),
            log_taken=whole,
            log_rest=whole + 0,
            origin=jax.tree.map(jnp.copy, origin),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples(Found):
    """The texts of a row in the order in which they were drawn, which is also their rank: the last one is the best.

    Attributes:
      log_probs: `[B, R]` float32, of their new tokens, before the constraint.
      log_mass: `[B, R]` float32, the logarithm of the bound of the probability that a text is in the language, after all
        samples so far; the same for all texts of a row.
    """

    log_probs: Array
    log_mass: Array

    @property
    def worth(self) -> Array:
        return self.log_probs

    @property
    def log_evidence(self) -> Array:
        return self.log_mass[:, 0]

    @classmethod
    def nothing(cls, batch: int, count: int, capacity: int) -> Self:
        none = lambda: jnp.zeros((batch, count)) - jnp.inf
        return cls(**vars(Found.nothing(batch, count, capacity)), log_probs=none(), log_mass=jnp.zeros((batch, count)))


@dataclasses.dataclass(frozen=True)
class Asap(SearchSettings):
    """Draws R texts of a prompt one after the other, and learns from each what the constraint leaves of the model's mass.

    A token's probability is multiplied by the bound of the beginning that it leads to, and renormalised over the allowed
    tokens. After each text, the bounds along it fall to the sums of `probability * bound` over all allowed tokens. They
    never rise, and stay above the true probabilities. Once everything is visited, a text has the model's own distribution
    given that it is in the language. The model's own is that after all warpers except the constraint, cut at the row's
    limit.

    The row's text is the last one. Without filters such as top_p, the first one is plain decoding's at the same seed.

    Attributes:
      samples: R, which the authors set to 2,000.
      nodes: M, how many beginnings are remembered. Those after that keep the bound 1, which is still a bound.

    Raises:
      ValueError: for fewer than one of either.
    """

    about = About(
        "asap", "texts one after the other, each nearer to the model's distribution given a constraint",
        "arXiv:2405.21047", "own text", fields=("samples", "nodes"),
    )  # fmt: skip
    called = "ASAp"
    aligns = "converging"

    samples: int = 2000
    nodes: int = 65536

    def __post_init__(self):
        if not all(isinstance(count, int) and count >= 1 for count in (self.samples, self.nodes)):
            raise ValueError(f"samples and nodes must be whole numbers from 1 on, got {self.samples} and {self.nodes}")

    @property
    def per_token(self) -> str:
        return f" of the last of {self.samples} texts that each prompt had"

    def decoder(self, target: LM, mesh: Any) -> "AsapSearch":
        return AsapSearch(target, self, mesh)


@dataclasses.dataclass(frozen=True)
class AsapSearch(Search):
    """The decoder of `Asap`. A row has one cache, whose tokens after the prompt are those of the sample that grows."""

    draws = True
    ended = Samples

    how: Asap

    @property
    def obeys(self) -> bool:
        """See `Decoder.obeys`."""
        return True

    @property
    def num_texts(self) -> int:
        return self.how.samples

    @property
    def num_caches(self) -> int:
        return 1

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> SearchState:
        """See `Decoder.empty`."""
        return self._begun(super().empty(params, batch, capacity, cache_dtype, eos_width))

    def prefill(
        self, params: PyTree, state: SearchState, prompts: Prompts, prefix: Prefix | None = None
    ) -> SearchState:
        """See `Decoder.prefill`."""
        return self._begun(super().prefill(params, state, prompts, prefix))

    def _begun(self, state):
        walk = Walk.begun(state, self.how.nodes, self.target.states(merged(state.cache)))
        return self.constrained(dataclasses.replace(state, beams=walk))

    @on_mesh
    def step(self, params: PyTree, state: SearchState) -> tuple[SearchState, None]:
        """One target pass per row: its sample grows by one token, and if it ends the next one begins."""
        live, rows = ~state.done, jnp.arange(state.length.shape[0])
        walk: Any = state.beams
        length = walk.length
        last = jnp.take_along_axis(walk.tokens[:, 0], length[:, None] - 1, axis=1)
        block = Block(last, length[:, None] - 1, length - 1)
        output = self.target(params["target"], block, merged(state.cache), wants=Wants(logits=True))
        failed = jnp.isnan(output.logits[:, 0]).any(axis=1)
        token, taken, rest = self._drawn(state, output.logits, live)
        dead = live & (taken == -jnp.inf)
        eos = (token[:, None] == state.eos).any(axis=1) & ~dead
        ends = live & (eos | dead | (length + 1 >= state.limit))
        put = lambda x, new: x.at[rows, length].set(jnp.where(live, new, x[rows, length]))
        walk = dataclasses.replace(
            walk,
            tokens=put(walk.tokens[:, 0], token)[:, None],
            log_prob=walk.log_prob + jnp.where(live, taken, 0.0),
            nodes=put(walk.nodes, walk.node),
            log_taken=put(walk.log_taken, taken),
            log_rest=put(walk.log_rest, rest),
        )
        walk = dataclasses.replace(walk, log_bound=_backed_up(walk, state.prompt_length, ends, dead))
        found = _kept(state.found, walk, ends & ~dead, jnp.where(eos, Finish.EOS, Finish.LENGTH))
        over = failed | (ends & (walk.sample + 1 >= self.how.samples))
        walk = _next(_descended(walk, token, live & ~ends), state.prompt_length, live, ends)
        cache = self.target.commit(merged(state.cache), output.delta, None, length - 1, live.astype(jnp.int32))
        states = jax.tree.map(
            lambda now, old: jnp.where(ends.reshape(-1, *[1] * (now.ndim - 1)), old, now),
            self.target.states(cache),
            walk.origin,
        )
        cache = parted(self.target.with_states(cache, states), 1)
        return self._after(state, over, failed, walk, found, ~over[:, None], cache), None

    def _drawn(self, state, logits, live) -> tuple[Array, Array, Array]:
        """The next token of every sample, its log-probability, and the logarithm of the other tokens' part of the bound, `[B]`
        each; -inf both where no token is left.
        """
        walk, vocab = state.beams, logits.shape[-1]
        sampler = self._sampler(state, walk.tokens, walk.length, live)
        free = dataclasses.replace(sampler, params=unrestricted(sampler.params))
        own = free.log_probs(logits)[:, 0]
        left = jnp.where(allowed(sampler.params, sampler.text(None), vocab)[:, 0], own, -jnp.inf)
        scores = left + _of_children(walk, vocab)
        ids = walk.sample[:, None] * vocab + jnp.arange(vocab)[None]
        noise = gumbel_at(state.key, walk.length[:, None], ids[:, None])[:, 0]
        token = jnp.argmax(scores + noise, axis=1)
        chosen = jnp.arange(vocab)[None] == token[:, None]
        rest = jax.nn.logsumexp(jnp.where(chosen, -jnp.inf, scores), axis=1)
        some = scores.max(axis=1) > -jnp.inf
        taken = jnp.take_along_axis(own, token[:, None], axis=1)[:, 0]
        return token.astype(jnp.int32), jnp.where(some, taken, -jnp.inf), jnp.where(some, rest, -jnp.inf)


def _of_children(walk: Walk, vocab: int) -> Array:
    """The logarithm of the bound `[B, V]` of the beginning that each token leads to."""
    children = (walk.parent == walk.node[:, None]) & (walk.node >= 0)[:, None]
    rows = jnp.arange(walk.node.shape[0])[:, None]
    at = jnp.where(children, walk.token, vocab)
    return jnp.zeros((at.shape[0], vocab)).at[rows, at].set(walk.log_bound, mode="drop")


def _backed_up(walk: Walk, begin: Array, ends: Array, dead: Array) -> Array:
    """`log_bound` after the samples that end: along each, a bound is the drawn token's part and the others', or the old
    bound if that is lower.

    It is lower where an earlier text said more of a beginning that has no node.

    Args:
      walk: with the last token.
      begin: `[B]`, where new tokens begin.
      ends: `[B]` bool.
      dead: `[B]` bool, samples that end because no token is left.
    """
    rows, most = jnp.arange(ends.shape[0]), walk.log_bound.shape[1]

    def one(step, carry):
        bounds, below = carry
        at = jnp.maximum(walk.length - step, 0)
        here = ends & (walk.length - step >= begin)
        node = jnp.where(here & (walk.nodes[rows, at] >= 0), walk.nodes[rows, at], most)
        own = jnp.logaddexp(walk.log_rest[rows, at], walk.log_taken[rows, at] + below)
        own = jnp.minimum(own, bounds.at[rows, node].get(mode="fill", fill_value=0.0))
        bounds = bounds.at[rows, node].set(own, mode="drop")
        return bounds, jnp.where(here, own, below)

    count = jnp.max(jnp.where(ends, walk.length - begin + 1, 0))
    return jax.lax.fori_loop(0, count, one, (walk.log_bound, jnp.where(dead, -jnp.inf, 0.0)))[0]


def _kept(found: Any, walk: Walk, ends: Array, finish: Array) -> Samples:
    """The texts of a row, with the samples that end."""
    rows, count = jnp.arange(ends.shape[0]), found.scores.shape[1]
    at = jnp.where(ends, walk.sample, count)
    put = lambda x, new: x.at[rows, at].set(new, mode="drop")
    return Samples(
        put(found.tokens, walk.tokens[:, 0]),
        put(found.length, walk.length + 1),
        put(found.scores, walk.sample.astype(jnp.float32)),
        put(found.finish, finish.astype(jnp.int32)),
        put(found.log_probs, walk.log_prob),
        jnp.broadcast_to(walk.log_bound[:, :1], found.scores.shape),
    )


def _descended(walk: Walk, token: Array, goes: Array) -> Walk:
    """The walk at the node that a token leads to, `[B]` bool where it `goes` on; a new node is made while there is room."""
    rows, most = jnp.arange(token.shape[0]), walk.parent.shape[1]
    inside = goes & (walk.node >= 0)
    match = (walk.parent == walk.node[:, None]) & (walk.token == token[:, None]) & inside[:, None]
    known = match.any(axis=1)
    new = inside & ~known & (walk.count < most)
    at = jnp.where(new, walk.count, most)
    child = jnp.where(known, jnp.argmax(match, axis=1), jnp.where(new, walk.count, -1))
    return dataclasses.replace(
        walk,
        parent=walk.parent.at[rows, at].set(walk.node, mode="drop"),
        token=walk.token.at[rows, at].set(token, mode="drop"),
        count=walk.count + new,
        node=jnp.where(goes, child, walk.node).astype(jnp.int32),
    )


def _next(walk: Walk, begin: Array, live: Array, ends: Array) -> Walk:
    """The walk after a step, whose samples that end make place for the next ones."""
    return dataclasses.replace(
        walk,
        length=jnp.where(ends, begin, walk.length + live).astype(jnp.int32),
        sample=walk.sample + ends,
        log_prob=jnp.where(ends, 0.0, walk.log_prob),
        node=jnp.where(ends, 0, walk.node),
    )
