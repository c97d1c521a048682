"""Speculative Jacobi decoding: every pass draws anew at all slots of a window, and the next window is made of these draws
(Teng et al. 2024, arXiv:2410.01699).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Drafter, Proposal
from specjax.draft.prompt_lookup import copied
from specjax.lm import Wants
from specjax.sampling.noise import CHILDREN, keys_at
from specjax.tree import OfTopology, Topology, Tree

Array = jax.Array

FILLS = ("repeat", "random", "lookup")
NGRAM = 6, 2
"""The longest and the shortest suffix that the fill `lookup` looks up."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """What a row's last pass leaves for its next window.

    Attributes:
      tokens: `[B, W]` int32. In `propose` the next window's tokens, or with `logits` the last window's tokens at these
        places, which the passes of later slots have read. After `propose`, the window.
      kept: `[B]` int32, how many slots the last pass has drawn; the others are filled.
      logits: `[B, W, V]` float32, from which those slots are drawn; None if the target has drawn them already.
    """

    tokens: Array
    kept: Array
    logits: Any


@dataclasses.dataclass(frozen=True)
class Jacobi(OfTopology, Drafter):
    """A chain of the target's own draws in its last pass over a window of W tokens; no parameters.

    A pass gives the target's distribution at every slot, after the tokens that stood before it. If n tokens of the
    window are accepted, the draws at the slots after the rejected one become the next window's first W - n tokens. The
    n slots after them are filled. So every token of a window is drawn from a known distribution, or fixed by its fill.

    What the text is depends on the verifier:

    - `coupled`: the draws are the target's own, with each position's noise. So the text is plain decoding's.
    - `rejection` with `draws="own"`: speculative Jacobi decoding as published. Every pass draws independently.
    - `rejection` with `draws="shared"`: MC-SJD (arXiv:2510.24211). A position keeps its noise from pass to pass, so its
      token changes less often.

    A verifier that reads no distributions gets the target's own draws, whatever `draws` says.

    Attributes:
      length: W.
      draws: "shared" or "own": whether the passes that draw a position share its noise.
      fill: a new slot's token: "repeat", the last token of the text; "random", any token alike; "lookup", what followed
        the last n-gram earlier in the text, or else as "repeat".
      keep_q: whether the verifier reads the distributions; filled in by `recording`.
    """

    about = About(
        "jacobi", "the target's own draws in its last pass over a window", "arXiv:2410.01699",
        fields=("length", "draws", "fill"), paper="length=16,draws=own,fill=random",
    )  # fmt: skip

    length: int = 4
    draws: str = "shared"
    fill: str = "lookup"
    keep_q: bool = dataclasses.field(default=False, kw_only=True)
    vocab_size: int | None = dataclasses.field(default=None, kw_only=True)
    """Filled in from the target."""

    def __post_init__(self):
        if self.length < 1 or self.draws not in ("shared", "own") or self.fill not in FILLS:
            raise ValueError(
                f"jacobi needs length >= 1, draws=shared or draws=own, and fill={' or '.join(FILLS)}, got length="
                f"{self.length}, draws={self.draws}, fill={self.fill}"
            )

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.length)

    @property
    def children(self):
        if not self.keep_q:
            return "deterministic"
        return "coupled" if self.draws == "shared" else "iid"

    skips = False
    needs_own_verdicts = True

    @property
    def wants(self) -> Wants:
        return Wants(logits=True) if self.keep_q else Wants(draw=True)

    def bind(self, target):
        return dataclasses.replace(self, vocab_size=target.vocab_size)

    def recording(self, keep_q):
        return dataclasses.replace(self, keep_q=keep_q)

    def init(self, params, batch, capacity):
        logits = jnp.zeros((batch, self.length, self.vocab_size)) if self.keep_q else None
        return Window(jnp.full((batch, self.length), -1, jnp.int32), jnp.zeros((batch,), jnp.int32), logits)

    def axes(self, draft):
        names: tuple[Any, ...] = ("batch", None), ("batch",), None if draft.logits is None else ("batch", None, "vocab")
        return Window(*names)

    def propose(self, params, draft, view, sampler):
        slots = jnp.arange(self.length)[None]
        drawn, log_q = (draft.tokens, None) if draft.logits is None else self._drawn(draft, sampler)
        kept = (slots < draft.kept[:, None]) & (drawn >= 0)
        window = jnp.where(kept, drawn, self._filled(view, sampler))
        if log_q is not None:
            log_q = jnp.where(kept[:, :, None], log_q, self._of_fills(window, sampler))
            log_q = jnp.pad(log_q, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
        tokens = jnp.concatenate([view.root[:, None], window], axis=1)
        tree = Tree.of(self.topology, tokens, jnp.ones(tokens.shape, bool), log_q=log_q, children=self.children)
        return Proposal(tree, dataclasses.replace(draft, tokens=window))

    def _drawn(self, draft, sampler):
        """Draws of all slots, `[B, W]`, and their distributions, `[B, W, V]` log-probabilities."""
        sampler = sampler.once() if self.draws == "own" else sampler
        slots = jnp.arange(self.length)
        above = (slots[None, :-1] < slots[:, None])[None]
        paths = lambda: jnp.where(above, draft.tokens[:, None, :-1], -1)
        depth = jnp.broadcast_to(slots[None], draft.tokens.shape)
        drawn = sampler.draw(draft.logits, depth, paths, self.length - 1)
        return drawn, sampler.log_probs(draft.logits, paths)

    def _filled(self, view, sampler):
        """Tokens for all slots `[B, W]`, in case that they are new."""
        last = jnp.broadcast_to(view.root[:, None], (view.root.shape[0], self.length))
        if self.fill == "lookup":
            found = copied(view, self.length, *NGRAM)[0]
            return jnp.where(found >= 0, found, last)
        if self.fill == "repeat":
            return last
        keys = keys_at(sampler.key, view.length[:, None] + jnp.arange(self.length)[None], CHILDREN)
        vocab = self.vocab_size or 0
        any_of = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, vocab)))
        return any_of(keys).astype(jnp.int32)

    def _of_fills(self, window, sampler):
        """The distributions of filled slots, `[B, W, V]` log-probabilities: certain, unless they were drawn."""
        certain = jnp.where(jnp.arange(self.vocab_size)[None, None] == window[:, :, None], 0.0, -jnp.inf)
        if self.fill != "random":
            return certain
        sampled = (sampler.params.temperature > 0)[:, None, None]
        return jnp.where(sampled, -jnp.log(jnp.float32(self.vocab_size)), certain)

    def observe(self, params, draft, proposal, output, verdict):
        depth = verdict.accepted[:, None] + 1 + jnp.arange(self.length)[None]  # of the node that has drawn each slot
        node, there = places(proposal.tree, draft.tokens, jnp.minimum(depth, self.length))
        kept = jnp.cumprod((there & (depth <= self.length)).astype(jnp.int32), axis=1).sum(axis=1)
        if draft.logits is None:
            return dataclasses.replace(draft, tokens=jnp.take_along_axis(output.draw, node, axis=1), kept=kept)
        logits = jnp.take_along_axis(output.logits, node[:, :, None], axis=1)
        read = jnp.take_along_axis(draft.tokens, jnp.minimum(depth, self.length - 1), axis=1)
        return Window(jnp.where(depth < self.length, read, -1), kept, logits)


def places(tree: Tree, window: Array, depth: Array) -> tuple[Array, Array]:
    """The nodes of a tree that hold a chain's tokens, which may be only a part of the tree.

    Args:
      tree: `[B, N]`.
      window: `[B, W]`, the chain below the root.
      depth: `[B, M]`, at most W: which of its nodes are looked for.

    Returns:
      Nodes `[B, M]`, and whether there are such nodes `[B, M]`.
    """
    if tree.is_chain and tree.nodes == window.shape[1] + 1:
        return depth, jnp.ones(depth.shape, bool)
    width = min(window.shape[1], tree.max_depth)
    paths = tree.path_tokens()[:, :, :width]
    on_way = (paths == window[:, None, :width]) | (jnp.arange(width)[None, None] >= tree.depth[:, :, None])
    ours = jnp.all(on_way, axis=-1) & tree.valid
    found = ours[:, None] & (tree.depth[:, None] == depth[:, :, None])
    return jnp.argmax(found, axis=2), found.any(axis=2)
