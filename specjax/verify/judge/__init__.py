"""Judge decoding (Bachmann et al. 2025, arXiv:2501.19309), lossy: a head on the target's features says which drafted
tokens are right, even if the target would have written others.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.verify.base import Verifier
from specjax.verify.judge.head import score as score
from specjax.verify.paths import kept
from specjax.verify.top_down import judged_by

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Judge(Verifier):
    """A child passes if the head finds it right, sigmoid(w h + b) > threshold; the target's own draw always passes.

    h is the target's feature at the child itself, after its final norm. The longest path of passing nodes is kept, on a
    tie the likeliest, and the target's own draw follows it.

    Lossy in greedy rows too. At a threshold of 1 only the target's own draw passes, as in `Coupled`. Two points are
    this library's: tokens that the target's distribution rules out (a filter, a bad word) never pass, and there are
    trees.

    Its parameters, `params["verify"]`, are {`kernel`: `[E]`, `bias`: `[1]`}, trained for one target
    (`specjax train judge`).

    Attributes:
      threshold: of the head's probability, in [0, 1].
    """

    about = About(
        "judge",
        "keep another token where a trained head on the target's features finds it right",
        "arXiv:2501.19309",
        "lossy",
        loads="head",
    )

    wants = Wants(logits=True, draw=True, final=True)
    keeps_greedy = False
    needs_params = True

    threshold: float = 0.5
    target: Any = dataclasses.field(default=None, kw_only=True)
    """The target LM; filled in by `bind`."""

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"judge needs a threshold in [0, 1], got {self}")

    def bind(self, target):
        return dataclasses.replace(self, target=target)

    def init_params(self, key, target_params):
        """A random head, before any training."""
        one = jnp.zeros((1, 1), jnp.int32)
        width = jax.eval_shape(lambda params: self.target.embed(params, one), target_params).shape[-1]
        return {"kernel": jax.random.normal(key, (width,)) / width**0.5, "bias": jnp.zeros((1,))}

    @classmethod
    def objective(cls):
        from specjax.verify.judge.objective import TrainJudge

        return TrainJudge

    def given(self, params):
        return functools.partial(self, params=params)

    def __call__(self, output, tree, sampler, params=None):
        if params is None:
            raise ValueError('judge reads a trained head: give it as params["verify"]; `specjax train judge` makes one')
        p, _, offered = judged_by(output, tree, sampler, soft=True)
        rows, parent = jnp.arange(tree.tokens.shape[0])[:, None], jnp.maximum(tree.parent, 0)
        chance = p[rows, parent, jnp.maximum(tree.tokens, 0)]
        draw = output.draw[:, : tree.nodes]
        right = (jax.nn.sigmoid(score(params, output.final[:, : tree.nodes])) > self.threshold) & (chance > 0)
        return kept((right | (tree.tokens == draw[rows, parent])) & offered.valid, chance, draw, tree)
