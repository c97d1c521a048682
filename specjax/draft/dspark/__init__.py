"""DSpark: DFlash's block, with a small sequential head that corrects each slot by the token before it
(deepseek-ai/DeepSpec).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.dflash import DFlash
from specjax.draft.dspark.network import KINDS, MarkovHead, sureness
from specjax.expand import Chain, Expander


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
    """DFlash, but with a bias on a slot's distribution by the token drafted before it, so that it depends on the node's path.

    The layers run once for a block, the bias once for a level. `params["draft"]` is DFlash's with `markov`, see
    MarkovHead; with `confidence` it also has `sureness`: {`kernel`, `bias`}. The adaptive rule `scored` stops by this
    head.

    Attributes:
      from_anchor: see DFlash.
      markov: the kind of bias: vanilla, gated or rnn.
      rank: of the bias.
      confidence: whether there is a head that predicts how sure the draft is.
    """

    about = About(
        "dspark",
        "DFlash with a bias by the token before",
        "deepseek-ai/DeepSpec",
        expander="chain:length=3",
        paper="expander=chain,length=7",
        loads="head",
    )
    shared = False

    expander: Expander = Chain(3)
    from_anchor: bool = True
    markov: str = "vanilla"
    rank: int = 32
    confidence: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.markov not in KINDS or self.rank < 1:
            raise ValueError(
                f"dspark: markov must be one of {', '.join(KINDS)} and rank at least 1, got {self.markov!r}, {self.rank}"
            )

    @property
    def bias(self) -> MarkovHead:
        """The module of the bias, as functions."""
        return MarkovHead(self.markov, self.rank, self.config.hidden_size)

    def init_params(self, key, target_params):
        """DFlash's parameters, a bias of zero, and an untrained confidence head."""
        params = super().init_params(key, target_params)
        dtype = params["fc"]["kernel"].dtype
        params |= {"markov": self.bias.init(jax.random.fold_in(key, 1), self.target.vocab_size, dtype)}
        if self.confidence:
            width = self.config.hidden_size + self.rank
            params |= {"confidence": {"kernel": jnp.zeros((width, 1), dtype), "bias": jnp.zeros((1,), dtype)}}
        return params

    @classmethod
    def objective(cls):
        from specjax.draft.dspark.objective import TrainDSpark

        return TrainDSpark

    @classmethod
    def layout(cls):
        from specjax.draft.dspark.published import LAYOUT

        return LAYOUT

    def trimmed(self, params, target_params, ids):
        drafter, own = super().trimmed(params, target_params, ids)
        head = {"kernel": params["markov"]["head"]["kernel"][:, ids]}
        return drafter, {**own, "markov": {**params["markov"], "head": head}}

    def widened(self, params, k, width):
        from specjax.draft.dspark.widening import beside_ranks

        return beside_ranks(self, params, k, width)

    def slot(self, params, h, tokens, states):
        """A slot's bias `[B, F, U]`, the state after it `[B, F, r]`, and how sure the draft is of its token `[B, F]`.

        Args:
          params: {"target": ..., "draft": ...}.
          h: `[B, F, E]`, the slot's output.
          tokens: `[B, F]`, the tokens before it.
          states: `[B, F, r]`.
        """
        own = params["draft"]
        before = self.bias.before(own["markov"], tokens)
        bias, states = self.bias(own["markov"], before, h, states.astype(before.dtype))
        sure = sureness(own["confidence"], h, before) if self.confidence else jnp.zeros(tokens.shape)
        return bias, states, jax.nn.sigmoid(sure)

    def propose(self, params, draft, view, sampler):
        h = self.outputs(params, draft, view)[:, : self.expander.depth]
        base = self.logits(params, h)

        def dist(depth, tokens, states):
            own = jnp.broadcast_to(h[:, depth][:, None], (*tokens.shape, h.shape[-1]))
            bias, states, sure = self.slot(params, own, tokens, states)
            return base[:, depth][:, None] + bias, states, sure[:, 0]

        def grow(carry, level):
            states, _ = carry  # after the root's slot and after every scored node's, [B, 1 + P, r]
            above = jnp.take_along_axis(states, level.parent[:, :, None] + 1, axis=1)
            dists, more, sure = dist(level.depth, level.tokens, above)
            return (jnp.concatenate([states, more], axis=1), sure), dists

        first, states, sure = dist(0, view.root[:, None], jnp.zeros((*view.root.shape, 1, self.rank)))
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, first[:, 0], grow, (states, sure), sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def score(self, carry):
        """`[B]`, the chance by `confidence` that the last drawn token is accepted, given the carry of `grow`."""
        return carry[1]
