"""Medusa: extra heads on the last feature, each guessing one token further ahead (Cai et al. 2024, arXiv:2401.10774)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter, head_config
from specjax.draft.head import head_kernel, head_scores
from specjax.expand import Static
from specjax.lm import Wants

DEFAULT_CHOICES = ((0,), (0, 0), (1,), (0, 0, 0))


def settle_tree(drafter: Any, heads: int, called: str = "heads") -> None:
    """Gives a drafter with one head for each depth its default tree, if it has none; for its `__post_init__`.

    Raises:
      ValueError: if there is no head, or the tree is deeper than there are heads.
    """
    name = type(drafter).about.name
    if heads < 1:
        raise ValueError(f"{name}: {called} must be at least 1, got {called}={heads}")
    small = Static(tuple(choice for choice in DEFAULT_CHOICES if len(choice) <= heads))
    tree = drafter.expander or small
    if tree.depth > heads:
        raise ValueError(
            f"{name}: a tree of depth {tree.depth} needs as many {called}, there are {heads}: give more, or a smaller tree"
        )
    object.__setattr__(drafter, "expander", tree)


@dataclasses.dataclass(frozen=True)
class Medusa(FeatureDrafter):
    """All nodes of a depth share one distribution, so a whole tree costs one pass of the heads.

    `params["draft"]` is {`heads`: a list of {`blocks`: [{`kernel` `[E, E]`, `bias` `[E]`}], `kernel` `[E, U]`}}. If the
    heads know fewer tokens than the target, it also has `ids` `[U]`. Without `own_head`, the heads share one `kernel`, which is
    beside `heads`.

    Attributes:
      expander: turns the heads' distributions into a tree; no deeper than the number of heads. None for a small static
        tree.
      heads: how many.
      layers: residual blocks per head.
      own_head: whether each head has an output layer of its own. If not, they share the target's, which is not trained and not
        stored.
    """

    about = About(
        "medusa",
        "heads that each guess one token further ahead",
        "arXiv:2401.10774",
        expander="static:tree=2 | 1",
        paper="expander=static,tree=10 | 10 7 3 2 1x6 | 10 3 2 1x5 0x2 2 0x6 1 | 2",
        loads="head",
    )
    tiles = True
    shared = True

    expander: Any = None
    heads: int = 3
    layers: int = 1
    own_head: bool = True

    feature_wants = Wants(final=True)

    fewest_layers: ClassVar[int] = 0

    def __post_init__(self):
        name = type(self).__name__.lower()
        if self.heads < 1 or self.layers < self.fewest_layers:
            raise ValueError(
                f"{name}: heads must be at least 1 and layers at least {self.fewest_layers}, got heads={self.heads}, "
                f"layers={self.layers}"
            )
        settle_tree(self, self.heads)
        super().__post_init__()

    @property
    def feature_size(self) -> int:
        return head_config(self.target, type(self).__name__).hidden_size

    def bind(self, target):
        head_config(target, type(self).__name__)
        return dataclasses.replace(self, target=target)

    def init_params(self, key, target_params) -> Any:
        """Blocks start as the identity except for their bias, kernels as the target's head."""
        size = self.feature_size
        kernel = head_kernel(self.target, target_params)
        block = {"kernel": jnp.zeros((size, size), kernel.dtype), "bias": jnp.zeros((size,), kernel.dtype)}
        last = {"kernel": kernel} if self.own_head else {}
        return {"heads": [{"blocks": [dict(block) for _ in range(self.layers)], **last} for _ in range(self.heads)]}

    def completed(self, params, target_params):
        return params if self.own_head else {**params, "kernel": self.shared_kernel(target_params, params.get("ids"))}

    def shared_kernel(self, target_params, ids=None) -> Any:
        """`[E, U]`, the target's output layer, for heads without one of their own; otherwise None."""
        return None if self.own_head else head_kernel(self.target, target_params, ids)

    @classmethod
    def objective(cls) -> Any:
        from specjax.draft.medusa.objective import TrainMedusa

        return TrainMedusa

    @classmethod
    def layout(cls):
        from specjax.draft.medusa.published import LAYOUT

        return LAYOUT

    def features(self, output):
        return output.final

    def read(self, params, features, block, cache, past=None) -> Any:
        return features, None

    def trimmed(self, params, target_params, ids):
        last = ("kernel", "bias")  # of a head's own output layer
        cut = lambda head: {k: v[..., ids] if k in last else v for k, v in head.items()}
        heads = [cut(head) for head in params["heads"]]
        return self, {**cut(params), "heads": heads, "ids": jnp.asarray(ids, jnp.int32)}

    def propose(self, params, draft, view, sampler):
        own = params["draft"]

        def dist(depth):
            return head_logits(own["heads"][depth], draft.feature, own.get("kernel"))

        def grow(carry, level):
            return carry, dist(level.depth)[:, None]

        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, dist(0), grow, None, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)


def head_logits(head, h, kernel=None):
    """A head's logits `[..., U]` in float32 from features `[..., E]`, by a `kernel` that heads share or by its own."""
    for block in head["blocks"]:
        h = h.astype(block["kernel"].dtype)
        bias = jnp.reshape(block["bias"], (1,) * (h.ndim - 1) + block["bias"].shape)
        h = h + jax.nn.silu(h @ block["kernel"] + bias)
    return head_scores(h, head["kernel"] if kernel is None else kernel)
