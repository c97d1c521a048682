"""Kangaroo: the target's first layers and a small adapter draft, and the target continues from there (arXiv:2404.18911)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft import spine
from specjax.draft.base import Proposal, Trained, TreeDrafter
from specjax.draft.feature import head_config
from specjax.draft.head import draft_logits, head_columns
from specjax.expand.early_stop import EarlyStop
from specjax.lm import Partial, Wants
from specjax.models.kv import commit_kv, kv_axes
from specjax.models.kv_heads import merged

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A proposal's own part of the drafter's state, until the verdict is known.

    Attributes:
      cache: the adapter's, of committed tokens only; slot s holds position s, as in the target's.
      delta: the adapter's keys and values of the proposed chain, `[B, N, ...]` each.
      start: `[B]` int32, the root's position.
    """

    cache: Any
    delta: Any
    start: Array


@dataclasses.dataclass(frozen=True)
class Kangaroo(TreeDrafter, Trained):
    """Drafts a chain with layers `[0, exit_layer)`, the adapter and the target's head, and stops where it is unsure.

    Every node passes the lower layers once; the target verifies with only the other layers. The adapter's cache also
    takes over what drafting computed, because an accepted node's features are the target's own. The state is that
    cache.

    Attributes:
      exit_layer: how many of the target's layers the draft shares.
      length: the longest chain.
      threshold: the confidence below which a row stops drafting.
      config: the adapter's `ModelConfig`; None for the target's own sizes.
      target: filled in by `bind`.
    """

    about = About(
        "kangaroo",
        "the target's first layers and a small adapter",
        "arXiv:2404.18911",
        defaults={"length": 4, "threshold": 0.3},
        paper="length=6,threshold=0.6",
        loads="head",
    )
    tiles = True

    exit_layer: int = 2
    length: int = 6
    threshold: float = 0.6
    config: Any = None
    target: Any = None

    def __post_init__(self):
        EarlyStop(self.length, self.threshold)

    @property
    def expander(self) -> EarlyStop:
        return EarlyStop(self.length, self.threshold)

    plain_tree = False

    @property
    def cache_config(self):
        return self.config

    @property
    def head(self):
        """The adapter's module, as functions."""
        from specjax.draft.kangaroo import network

        return network

    @property
    def prefill_wants(self) -> Wants:
        return Wants(hidden=(self.exit_layer - 1,))

    def bind(self, target):
        if not 0 < self.exit_layer < target.num_layers:
            raise ValueError(
                f"kangaroo: exit_layer={self.exit_layer} must leave layers on both sides of a target of "
                f"{target.num_layers}: choose 1 to {target.num_layers - 1}"
            )
        own = head_config(target, "kangaroo")
        return dataclasses.replace(self, config=self.config or own.only(self.attends(own)), target=target)

    def attends(self, config):
        """The layer whose attention the adapter has: the first one with attention after the shared layers or, without any,
        the last one before.

        Raises:
          ValueError: if no layer has plain attention as its only mixer.
        """
        found = config.attention_layers
        if not found:
            raise ValueError(
                "kangaroo: the adapter is an attention like the target's, so a layer of it must have plain attention (not "
                "latent) and no other mixer"
            )
        return next((i for i in found if i >= self.exit_layer), found[-1])

    def init_params(self, key, target_params):
        """The target's next attention under its final norm: an early exit, to be trained further."""
        once = merged(target_params, self.target.config, self.target.kv_copies)
        return self.head.init(self.config, once, self.attends(self.target.config))

    @classmethod
    def objective(cls):
        from specjax.draft.kangaroo.objective import TrainKangaroo

        return TrainKangaroo

    @classmethod
    def layout(cls):
        from specjax.draft.kangaroo.published import LAYOUT

        return LAYOUT

    def init(self, params, batch, capacity):
        """Raises:
        ValueError: if the adapter's parameters belong to another target.
        """
        shapes = lambda tree: {jax.tree_util.keystr(k): x.shape for k, x in jax.tree_util.tree_leaves_with_path(tree)}
        wanted, got = shapes(self.head.abstract(self.config)), shapes(params["draft"])
        wrong = [name for name, shape in wanted.items() if got.get(name) != shape]
        if wrong:
            raise ValueError(
                f"kangaroo: the adapter is not made for this target: {wrong[0]} is {got.get(wrong[0], 'missing')}, "
                f"and the target needs {wanted[wrong[0]]}"
            )
        return self.head.init_cache(self.config, batch, capacity, jax.tree.leaves(params["draft"])[0].dtype)

    def axes(self, draft):
        return kv_axes(draft)

    def prefill(self, params, draft, chunk, output):
        h = output.hidden[self.exit_layer - 1]
        _, delta = self.head.adapt(self.config, params["draft"], h, chunk.block, draft)
        return commit_kv(draft, delta, None, chunk.block.positions[:, 0])

    def trimmed(self, params, target_params, ids):
        return self, {
            **params,
            "head": head_columns(self.target, target_params, ids),
            "ids": jnp.asarray(ids, jnp.int32),
        }

    def propose(self, params, draft, view, sampler):
        target, weights, slots = self.target, params["target"], self.nodes

        def enter(block, past):
            """The nodes' entries, and their features. `past` is the entries of the nodes above them."""
            _, below, own = past or (None, None, None)
            h = target.embed(weights, block.tokens)
            h, below = target.layers(weights, h, 0, self.exit_layer, block, view.cache, below)
            first = h[..., : self.config.hidden_size]  # of several residual streams
            features, own = self.head.adapt(self.config, params["draft"], first, block, draft, own)
            return (h, below, own), features

        dists = functools.partial(draft_logits, target, params)

        def grow(past, level):
            entries, features = enter(spine.block(view, level.tokens, [level.depth], slots), past)
            return spine.put(past, entries, level.depth), dists(features)

        first, features = enter(spine.block(view, view.root[:, None], [0], 0), None)
        logits = dists(features)[:, 0]
        sampler = sampler.restricted(params["draft"].get("ids"), target.vocab_size)
        tree, past, _ = self.expander.run(
            view.root, logits, grow, spine.room(first, slots), sampler, keep_q=view.keep_q
        )
        h, below, own = spine.complete(view, tree, past, lambda block, past: enter(block, past)[0])
        pending = Pending(draft, own, view.length - 1)
        return Proposal(tree, pending, partial=Partial(h, below, self.exit_layer))

    def observe(self, params, draft, proposal, output, verdict):
        # As in the step: a write that depends on the verdict comes after every read, and is made in place.
        start = jnp.where(verdict.accepted >= 0, draft.start, 0)
        return commit_kv(draft.cache, draft.delta, None, start)
