"""Self-speculation of a model of both kinds: its diffusion mode drafts a block, and its causal mode verifies it
(Nemotron-Labs-Diffusion, `linear_spec_generate`; after TiDAR, arXiv:2511.08923).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter, ladder
from specjax.expand import Chain, Expander
from specjax.lm import LM, Block, Wants, check_both_ways
from specjax.sampling import Sampler
from specjax.sampling.sampler import best
from specjax.sharding.rules import shardings

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class SelfDiffusion(TreeDrafter):
    """Drafts with the target itself, which reads masks after the text in both directions; the target's cache serves both.

    A pass reads the last token and D masks, for a tree of D levels. All of them see each other and the cache, and the
    output at a mask is for its own position. Nothing of this pass is kept, so the drafter has no state. No distribution
    depends on a parent in the tree, so any tree costs the same passes.

    With a `threshold`, passes are repeated until every position is written. A pass writes the tokens whose probability
    reaches it, and at least the surest one, and later passes read them. Each level then has the distribution of the pass
    that wrote its token. Tokens are written with the positions' own noise, unless the verifier reads distributions:
    these may not depend on what was drawn, so the likeliest tokens are written.

    With an adapter, `params["draft"]` holds the matrices that the drafting pass uses in place of the target's, in
    nested dicts like the target's.

    Attributes:
      mask_id: the target's mask; never proposed.
      expander: turns the distributions into a tree; the default is the chain of the authors' block of 32 tokens.
      threshold: see above; 0 is one pass.
      adapted: whether there is an adapter.
      target: filled in by `bind`.
    """

    about = About(
        "self_diffusion",
        "a model of both kinds by itself: a bidirectional pass over masks drafts, a causal one verifies",
        "Nemotron-Labs-Diffusion (NVIDIA 2026), after arXiv:2511.08923",
        fields=("threshold",),
        expander="chain:length=31",
        loads="own_mask",
    )
    shared = True

    mask_id: int
    expander: Expander = Chain(31)
    threshold: float = 0.0
    adapted: bool = dataclasses.field(default=False, kw_only=True)
    target: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"self_diffusion needs a threshold in [0, 1], got {self.threshold}")

    @property
    def needs_params(self) -> bool:
        return self.adapted

    @property
    def rungs(self):
        return ladder(self.nodes) if self.expander.is_chain else self.expander.rungs

    def bind(self, target):
        check_both_ways(target, "self_diffusion")
        if not 0 <= self.mask_id < target.vocab_size:
            raise ValueError(f"self_diffusion: mask {self.mask_id} is outside the target's {target.vocab_size} tokens")
        if self.expander.width >= target.vocab_size:
            raise ValueError(
                f"self_diffusion: the expander takes {self.expander.width} candidates of a distribution over "
                f"{target.vocab_size - 1} tokens"
            )
        return dataclasses.replace(self, target=target)

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.target.axes(params), params, self.target.axis_counts())

    def propose(self, params, draft, view, sampler):
        target: LM = self.target
        weights = replaced(params["target"], params["draft"]) if self.adapted else params["target"]
        at = view.length[:, None] - 1 + jnp.arange(self.depth + 1)[None]

        def read(tokens: Array) -> Array:
            """Logits `[B, D, V]` of the positions that hold `tokens` `[B, D]`, masks among them."""
            block = Block(jnp.concatenate([view.root[:, None], tokens], axis=1), at, view.length - 1, causal=False)
            final = target(weights, block, view.cache, wants=Wants(final=True)).final
            return target.unembed(weights, final[:, 1:]).at[:, :, self.mask_id].set(-jnp.inf)

        masks = jnp.full((len(at), self.depth), self.mask_id, jnp.int32)
        if self.threshold == 0:
            logits = read(masks)
        else:
            logits = self._written(read, masks, view.live, None if view.keep_q else sampler)
        grow = lambda carry, level: (carry, logits[:, level.depth][:, None])
        return Proposal(self.expander(view.root, logits[:, 0], grow, None, sampler, keep_q=view.keep_q), draft)

    def _written(self, read: Any, masks: Array, live: Array, sampler: Sampler | None) -> Array:
        """The logits `[B, D, V]` of each position in the pass that wrote its token; without a sampler the likeliest."""
        places = jnp.broadcast_to(jnp.arange(self.depth)[None], masks.shape)

        def still(tokens: Array) -> Array:
            return (tokens == self.mask_id) & live[:, None]

        def on(carry: tuple[Array, Array, Array]) -> Array:
            return jnp.any(still(carry[0])) & (carry[2] < self.depth)  # a draft of logits that are not finite ends too

        def once(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            tokens, logits, passes = carry
            new, left = read(tokens), still(tokens)
            scores = new if sampler is None else sampler.scores(new, places, None, self.depth - 1)
            chosen = jnp.maximum(best(scores), 0)
            sure = jnp.take_along_axis(new, chosen[:, :, None], axis=2)[:, :, 0] - jax.nn.logsumexp(new, axis=2)
            sure = jnp.where(left, jnp.exp(sure), -1.0)
            surest = places == jnp.argmax(sure, axis=1)[:, None]
            write = left & ((sure >= self.threshold) | surest)
            return jnp.where(write, chosen, tokens), jnp.where(write[:, :, None], new, logits), passes + 1

        blank = jnp.zeros((*masks.shape, self.target.vocab_size), jnp.float32)
        return jax.lax.while_loop(on, once, (masks, blank, jnp.zeros((), jnp.int32)))[1]


def replaced(params: PyTree, own: PyTree) -> PyTree:
    """Nested dicts with some of their leaves replaced by those of `own`, nested dicts of fewer entries."""
    if not isinstance(own, dict):
        return own
    return {**params, **{name: replaced(params[name], part) for name, part in own.items()}}
