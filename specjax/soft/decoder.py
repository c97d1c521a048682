"""Soft thinking (arXiv:2505.15778): while a row thinks, its next input is a mixture of tokens; then it is decoded plainly.

In the shape descriptions `B` denotes rows, `n` tokens of a mixture, `V` the vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.base import Proposal
from specjax.draft.none import NoDrafter
from specjax.lm import LM, Block, Mixture, Wants, check_mixtures
from specjax.sampling.processors import Processor, checked
from specjax.sharding.ambient import on_mesh
from specjax.sharding.mesh import make_mesh
from specjax.soft.base import Mixer
from specjax.soft.gumbel import GumbelSoftmax
from specjax.speculative import Speculative, StepInfo
from specjax.state import DecodeState
from specjax.tree import root_only
from specjax.verify import Coupled, Verdict

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftState(DecodeState):
    """The rows of soft thinking. `tokens` are the heaviest of every mixture; the cache holds what was read in their place.

    Attributes:
      ids: `[B, n]` int32, the tokens that the last new token is read as, the heaviest first.
      weights: `[B, n]` float32.
      thinks: `[B]` bool, whether it is read so.
      calm: `[B]` int32, for how many tokens in a row the distribution has had little entropy.
    """

    ids: Array
    weights: Array
    thinks: Array
    calm: Array

    @property
    def mixed(self) -> Array:
        """`[B]` bool, rows whose last token is read as a mixture; a prompt's last token is not."""
        return self.thinks & (self.length > self.prompt_length)


@dataclasses.dataclass(frozen=True)
class SoftThinkingDecoder(Speculative):
    """Plain decoding whose rows begin by thinking. Make one with `soft_thinking`; `params` is
    `{"target": ..., "draft": None}`.

    Rows at temperature 0 do not think. A row stops thinking when its heaviest token is `end_of_think`, or by
    `Mixer.cold_stop`, which writes that token in place of its own. One program serves both: slots that are not mixtures
    are read as their token. The text after a mixture is not a function of the text before it, so no draft could be
    verified.

    Attributes:
      mixer: makes the mixtures.
      end_of_think: a token's id; -1 for none.
    """

    mixer: Mixer = GumbelSoftmax()
    end_of_think: int = -1

    @property
    def obeys(self) -> bool:
        """See `Decoder.obeys`: `end_of_think` is written in place of a drawn token."""
        return False

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> SoftState:
        """See `Decoder.empty`."""
        plain = super().empty(params, batch, capacity, cache_dtype, eos_width)
        zeros = lambda *more: jnp.zeros((batch, *more), jnp.int32)
        count = min(self.mixer.n, self.target.vocab_size)
        own = {"ids": zeros(count), "weights": zeros(count).astype(jnp.float32), "thinks": zeros() == 0}
        return self._constrain(SoftState(**vars(plain), **own, calm=zeros()))  # type: ignore[return-value]

    @on_mesh
    def step(self, params: PyTree, state: SoftState) -> tuple[SoftState, StepInfo]:  # type: ignore[override]
        """One target pass: every live row commits one token."""
        view, sampler = self._begun(state)
        proposal = Proposal(root_only(view.root), state.draft)
        with jax.named_scope("target"):
            block = self._softened(proposal.block(view), state)
            output = self.target(params["target"], block, view.cache, wants=Wants(logits=True))
        with jax.named_scope("verify"):
            token, own = self._drawn(state, output.logits, sampler)
        zero = jnp.zeros_like(token)
        with jax.named_scope("accept"):
            new, info = self._accept(params, state, proposal, output, Verdict(zero[:, None], zero, token), sampler)
            return self._constrain(dataclasses.replace(new, **own)), info  # type: ignore[return-value]

    def _softened(self, block: Block, state: SoftState) -> Block:
        if self.greedy:
            return block
        own = Mixture(state.ids[:, None], state.weights[:, None], state.mixed[:, None])
        return dataclasses.replace(block, mixture=own)

    def _drawn(self, state, logits, sampler) -> tuple[Array, dict[str, Array]]:
        """The tokens `[B]` after logits `[B, 1, V]`, and the fields of the state that say how they are read."""
        if self.greedy:  # nobody thinks
            return sampler.draw(logits, 0)[:, 0], {}
        thinks, calm = state.thinks & (state.sampling.temperature > 0), state.calm
        if self.mixer.cold_stop:
            calm = jnp.where(thinks & (entropy(logits[:, 0]) < self.mixer.cold_stop), calm + 1, 0)
        cold = thinks & (calm >= self.mixer.cold_steps)
        mixed = self.mixer.mix(logits, sampler)
        hard = ~thinks | cold
        drawn = lambda: jnp.where(hard, self.mixer.plain(logits, sampler, mixed), mixed.token)
        token = jax.lax.cond(jnp.any(hard & ~state.done), drawn, lambda: mixed.token)
        if self.end_of_think >= 0:
            token = jnp.where(cold & (token >= 0), self.end_of_think, token)
        thinks = thinks & ~cold & (token != self.end_of_think)
        return token, {"ids": mixed.ids, "weights": mixed.weights, "thinks": thinks, "calm": calm}


def entropy(logits: Array) -> Array:
    """The entropy of the softmax of logits `[B, V]`, in nats, `[B]`; a token with probability 0 adds nothing."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0).sum(axis=-1)


def soft_thinking(
    target: LM,
    mixer: Mixer | None = None,
    *,
    end_of_think: int = -1,
    logprobs: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    processors: Sequence[Processor] = (),
) -> SoftThinkingDecoder:
    """A decoder whose rows think in mixtures of tokens. `mesh` comes from `specjax.sharding.make_mesh`.

    Args:
      target: the model.
      mixer: makes the mixtures; None is `GumbelSoftmax()`.
      end_of_think: the id of the token that ends thinking; -1 for none.
      logprobs: whether to keep log-probabilities of the emitted tokens, after the mixtures that were read.
      mesh: where parameters and state lie.
      processors: see `specjax.sampling.Processor`.

    Raises:
      ValueError: if the target reads no mixtures, or has no such token; for a mesh with other axes.
    """
    check_mixtures(target)
    if not -1 <= end_of_think < target.vocab_size:
        raise ValueError(f"end_of_think {end_of_think} is outside the vocabulary of {target.vocab_size} tokens")
    plain = NoDrafter().bind(target), Coupled()
    return SoftThinkingDecoder(
        target,
        *plain,
        logprobs,
        make_mesh(mesh),
        checked(processors, target.vocab_size),
        mixer=mixer or GumbelSoftmax(),
        end_of_think=end_of_think,
    )
