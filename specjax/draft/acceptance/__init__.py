"""A chain that ends where a trained head doubts a token of the draft model: SpecDec++ (arXiv:2405.19715)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.adaptive import Rule
from specjax.lm import LM
from specjax.sharding.rules import replicated

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Acceptance(Rule):
    """SpecDec++: stops once the chance that a token so far is rejected exceeds the threshold.

    A head of residual blocks reads the draft's feature after a token and predicts how likely that token is accepted.
    The test below token i covers tokens 1 to i - 1, because token i was drafted before its own feature exists. `params`
    is {`blocks`: [{`kernel` `[E, E]`, `bias` `[E]`}], `kernel` `[E, 2]`, `bias` `[2]`}; logit 1 is acceptance.

    Attributes:
      threshold: in [0, 1]; 0 stops after `shortest` tokens, 1 never stops.
      shortest: tokens that are always drafted.
      layers: residual blocks.
      draft: the model whose features the head reads; None until the rule is bound.
    """

    about = About(
        "acceptance", "a row stops where a trained head doubts a token of the draft model", "arXiv:2405.19715",
        fields=("threshold", "shortest", "layers"), loads="rule_head",
    )  # fmt: skip

    threshold: float = 0.7
    shortest: int = 2
    layers: int = 3
    draft: LM | None = None
    needs_features = True

    def __post_init__(self):
        if not 0 <= self.threshold <= 1 or self.shortest < 1 or self.layers < 0:
            raise ValueError(f"acceptance needs threshold in [0, 1], shortest >= 1 and layers >= 0, got {self}")

    def bind(self, draft: LM) -> "Acceptance":
        """The rule for a draft model."""
        return dataclasses.replace(self, draft=draft)

    def init_params(self, key: Array, draft_params: PyTree) -> PyTree:
        """A fresh head for the features of the draft model with these parameters."""
        draft = self.draft
        if draft is None:
            raise ValueError("acceptance: bind the rule to its draft model first")
        width = jax.eval_shape(lambda p: draft.embed(p, jnp.zeros((1, 1), jnp.int32)), draft_params).shape[-1]
        keys = jax.random.split(key, self.layers + 1)
        normal = jax.nn.initializers.lecun_normal()
        blocks = [{"kernel": normal(k, (width, width)), "bias": jnp.zeros((width,))} for k in keys[:-1]]
        return {"blocks": blocks, "kernel": normal(keys[-1], (width, 2)), "bias": jnp.zeros((2,))}

    @classmethod
    def objective(cls):
        from specjax.draft.acceptance.objective import TrainAcceptance

        return TrainAcceptance

    def param_shardings(self, mesh: Any, params: PyTree) -> PyTree:
        """Where the parameters lie on a mesh: whole on every device."""
        return replicated(mesh, params)

    def start(self, params, state, view, length, hidden):
        survival: list[Array] = []  # by depth: the chance that all tokens judged so far are accepted

        def goes_on(depth, confidence, carry):
            if depth == 1:  # the root is committed
                survival.append(jnp.ones_like(confidence))
            else:
                survival.append(survival[-1] * jnp.exp(accept_log_prob(params, hidden(carry))))
            if depth < self.shortest:
                return jnp.ones(confidence.shape, bool)
            return 1 - survival[-1] <= self.threshold

        return goes_on


def accept_log_prob(params: PyTree, h: Array) -> Array:
    """The acceptance head's log-probability `[...]` that a token is kept, from the feature `[..., E]` after it."""
    row = lambda bias: jnp.reshape(bias, (1,) * (h.ndim - 1) + bias.shape)
    h = h.astype(jnp.float32)
    for block in params["blocks"]:
        h = h + jax.nn.silu(h @ block["kernel"] + row(block["bias"]))
    return jax.nn.log_softmax(h @ params["kernel"] + row(params["bias"]), axis=-1)[..., 1]
