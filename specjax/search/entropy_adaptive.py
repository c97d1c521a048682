"""Entropy-adaptive decoding (arXiv:2502.06833): two models take turns at one text; the large one writes where it is uncertain.

In the shape descriptions `B` denotes rows, `L` the text buffer, `R` recent tokens, `C` tokens of a catching-up block,
`V` the vocabulary.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.decoder import Decoder, Needs
from specjax.lm import LM, Block, Wants, check_both_encode, dtype_of, encodes
from specjax.prompts import Prompts
from specjax.sampling import Sampler
from specjax.sampling.processors import Processor, checked
from specjax.sampling.warp import carries
from specjax.search.stepwise import PairSettings
from specjax.sharding.ambient import on_mesh
from specjax.sharding.rules import constrain, rounded
from specjax.speculative import Speculative, speculative, write
from specjax.state import Rows, Stats, finish_rows

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The part of the rows' texts that a model has read.

    Attributes:
      cache: opaque.
      known: `[B]` int32, how many tokens of the text have entries; at least the last token has none.
      passes: `[B]` int32, its passes over this row since the prompt was inserted, including blocks to catch up.
    """

    cache: PyTree
    known: Array
    passes: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveState(Rows):
    """Rows that one of two models continues. `stats.steps` counts tokens; `Memory.passes` counts each model's passes.

    Attributes:
      large: what the large model has read.
      small: what the small model has read.
      on_large: `[B]` bool, whether the large model goes on.
      since: `[B]` int32, tokens since the models last changed.
      recent: `[B, R]` float32, entropies in nats of the distributions that the last tokens were drawn from, the newest
        last.
      threshold: `[B]` float32, see `EntropyAdaptive.threshold`; rows may differ.
      by_large: `[B, L]` bool, which tokens the large model wrote.
    """

    large: Memory
    small: Memory
    on_large: Array
    since: Array
    recent: Array
    threshold: Array
    by_large: Array


@dataclasses.dataclass(frozen=True)
class EntropyAdaptive(PairSettings):
    """The large model writes while the mean entropy of recent distributions is at least the threshold, otherwise the
    small model.

    Both models draw with the row's own noise. So a threshold of 0 gives the large model's text, and an infinite one the
    small model's, token for token. In between, the text is neither's.

    The model that did not write catches up when its turn comes: in blocks of `block` tokens, the last of which is its
    step. In a batch a model runs if any row needs it. So what rows save (`Memory.passes`) saves a batch time only where
    they agree.

    Attributes:
      small: the small model, of the same vocabulary: a result of `specjax.load`, or its argument.
      threshold: in nats; the paper has bits, of 0.693 nats each. Before the first token the mean counts as 0.
      window: R, the number of tokens in the mean; fewer while there are fewer.
      least: how many tokens a model writes before the other may take over, at least.
      block: C.
      processors: the user's own warpers (`specjax.sampling.Processor`).

    Raises:
      ValueError: for a threshold below 0, or counts below 1.
    """

    about = About(
        "entropy_adaptive", "two models take turns: the large one where distributions are uncertain", "arXiv:2502.06833",
        "own text", fields=("small", "threshold", "window", "least", "block"),
    )  # fmt: skip

    threshold: float = 0.5
    window: int = 8
    least: int = 4
    block: int = 16
    processors: tuple[Processor, ...] = ()

    def __post_init__(self):
        if not self.threshold >= 0:
            raise ValueError(f"threshold is an entropy of 0 nats or more, got {self.threshold}")
        for name in ("window", "least", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def bind(
        self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False
    ) -> tuple["EntropyAdaptiveDecoder", PyTree]:
        """See `Decode.bind`; `params` is `{"target": ..., "small": ...}`."""
        small = self.partner_of(model, mesh, logprobs)
        how = dataclasses.replace(self, small=None, processors=checked(self.processors, model.lm.vocab_size))
        decoder, params = EntropyAdaptiveDecoder(model.lm, small.lm, how, mesh), {"target": model.params}
        params["small"] = small.params
        if mesh is not None and not model.abstract:
            params = jax.device_put(params, decoder.param_shardings(params))
        return decoder, params


@dataclasses.dataclass(frozen=True)
class EntropyAdaptiveDecoder(Decoder[AdaptiveState]):
    """The decoder of `EntropyAdaptive`. `params` is `{"target": ..., "small": ...}`.

    Attributes:
      target: the large model.
      small: the small one.
      how: its settings.
      mesh: the device mesh that params and state are laid out on, or None.
      greedy: whether no row uses a warper, so that no warper is compiled.

    Raises:
      ValueError: for models with different vocabularies.
    """

    target: LM
    small: LM
    how: EntropyAdaptive = EntropyAdaptive()
    mesh: jax.sharding.Mesh | None = None
    _: dataclasses.KW_ONLY
    greedy: bool = False

    def __post_init__(self):
        large, small = self.target.vocab_size, self.small.vocab_size
        if large != small:
            raise ValueError(
                f"both models must have one vocabulary: the large one has {large} tokens, the small one {small}"
            )
        check_both_encode(self.small, self.target, "the small model")

    @property
    def slack(self) -> int:
        """See `Decoder.slack`: a block is written as a whole."""
        return self.how.block

    @property
    def encodes(self) -> bool:
        """See `Decoder.encodes`."""
        return encodes(self.target)

    def fitted(self, needs: Needs) -> Self:
        """See `Decoder.fitted`."""
        return dataclasses.replace(self, greedy=needs.greedy)

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Decoder.needs`."""
        return ("target", "small")

    def axes(self, state: AdaptiveState) -> AdaptiveState:
        """See `Decoder.axes`."""
        axes = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)
        large = dataclasses.replace(axes.large, cache=self.target.cache_axes(state.large.cache))
        small = dataclasses.replace(axes.small, cache=self.small.cache_axes(state.small.cache))
        return dataclasses.replace(axes, large=large, small=small)

    def param_shardings(self, params: PyTree) -> PyTree:
        """See `specjax.speculative.Speculative.param_shardings`."""
        own = lambda lm, name: self._plain(lm).param_shardings({"target": params[name], "draft": None})["target"]
        return {"target": own(self.target, "target"), "small": own(self.small, "small")}

    def _plain(self, lm) -> Speculative:
        """The decoder that reads prompts."""
        return speculative(lm, mesh=self.mesh)

    def _constrain(self, state):
        return constrain(self.mesh, self.axes(state), state)

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> AdaptiveState:
        """See `Decoder.empty`."""
        capacity = rounded(self.mesh, "slots", capacity)
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        memory = lambda lm, own: Memory(
            lm.init_cache(batch, capacity, cache_dtype or jax.tree.leaves(own)[0].dtype), zeros(), zeros()
        )
        state = AdaptiveState.blank(
            batch,
            capacity,
            0,
            eos_width,
            length=1,
            large=memory(self.target, params["target"]),
            small=memory(self.small, params["small"]),
            on_large=zeros() > 0,
            since=zeros(),
            recent=jnp.zeros((batch, self.how.window)),
            threshold=jnp.full((batch,), self.how.threshold, jnp.float32),
            by_large=zeros(capacity) > 0,
        )
        return self._constrain(state)

    def prefill(self, params: PyTree, state: AdaptiveState, prompts: Prompts) -> AdaptiveState:
        """See `Decoder.prefill`; both models read the prompt.

        Raises:
          ValueError: for a sampler that carries a sum (mirostat).
        """
        if carries(prompts.sampling) and not self.greedy:
            raise ValueError("entropy-adaptive decoding does not keep the sum that mirostat reads: leave mirostat out")
        count, lengths = prompts.tokens.shape[0], jnp.asarray(prompts.lengths)
        capacity, eos_width = state.tokens.shape[1], state.eos.shape[1]
        memories: dict[str, Any] = {}
        for name, lm, own in (("large", self.target, "target"), ("small", self.small, "small")):
            plain, model = self._plain(lm), {"target": params[own], "draft": None}
            dtype = dtype_of(getattr(state, name).cache)
            read = plain.prefill(model, plain.empty(model, 1, capacity, dtype, eos_width), prompts)
            memories[name] = Memory(read.cache, lengths - 1, jnp.zeros_like(lengths))
        shared = {field.name: getattr(read, field.name) for field in dataclasses.fields(Rows)}
        threshold = jnp.full((count,), self.how.threshold, jnp.float32)
        return dataclasses.replace(
            self.empty(params, count, capacity, None, eos_width),
            **(shared | {"limit": jnp.clip(prompts.limit, lengths, capacity - self.slack)}),
            **memories,
            threshold=threshold,
            on_large=threshold <= 0,
        )

    @on_mesh
    def step(self, params: PyTree, state: AdaptiveState) -> tuple[AdaptiveState, None]:
        """One token per row, from the model whose turn it is."""
        live = ~state.done
        logits = jnp.zeros((live.shape[0], self.target.vocab_size), jnp.float32)
        with jax.named_scope("large"):
            turn = live & state.on_large
            logits, large = self._pass(self.target, params["target"], state, state.large, turn, logits)
        with jax.named_scope("small"):
            turn = live & ~state.on_large
            logits, small = self._pass(self.small, params["small"], state, state.small, turn, logits)
        sampler = Sampler(
            state.key,
            state.tokens,
            state.length,
            live,
            state.sampling,
            processors=self.how.processors,
            greedy=self.greedy,
            begin=state.prompt_length,
            eos=state.eos,
            limit=state.limit,
        )
        token = sampler.draw(logits[:, None], 0)[:, 0]
        failed = live & (token < 0)
        moves = live & ~failed
        length = state.length + moves
        ended = moves & (token[:, None] == state.eos).any(axis=1)
        here = jnp.where(moves, state.length, state.length - 1)
        kept = lambda buffer: jnp.take_along_axis(buffer, here[:, None], axis=1)[:, 0]
        put = lambda buffer, new: write(buffer, jnp.where(moves, new, kept(buffer))[:, None], here)
        new = dataclasses.replace(
            state,
            tokens=put(state.tokens, token),
            length=length,
            finish=finish_rows(state, length, ended, failed),
            stats=Stats(state.stats.steps + live, state.stats.accepted + live[:, None]),
            large=large,
            small=small,
            by_large=put(state.by_large, state.on_large),
            **self._turns(state, logits, moves, length),
        )
        return self._constrain(new), None

    def _turns(self, state, logits, moves, length):
        """Which model's turn it is after a token from these logits `[B, V]`."""
        dist = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(dist > -jnp.inf, jnp.exp(dist) * dist, 0.0), axis=1)
        recent = jnp.concatenate([state.recent[:, 1:], entropy[:, None]], axis=1)
        count = jnp.minimum(length - state.prompt_length, self.how.window)
        mean = jnp.sum(recent, axis=1) / jnp.maximum(count, 1)  # places without a token hold 0
        wanted, since = mean >= state.threshold, state.since + 1
        changes = moves & (wanted != state.on_large) & (since >= self.how.least)
        return {
            "recent": jnp.where(moves[:, None], recent, state.recent),
            "on_large": state.on_large ^ changes,
            "since": jnp.where(changes, 0, jnp.where(moves, since, state.since)),
        }

    def _pass(self, lm, params, state, memory, turn, logits):
        """Logits `[B, V]` with this model's in the rows whose `turn` it is, and what the model has read afterwards."""

        def read(memory, width, rows, wants):
            at = memory.known[:, None] + jnp.arange(width)[None]
            tokens = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
            output = lm(params, Block(tokens, at, memory.known), memory.cache, wants=wants)
            # entries after the text, and those of rows whose turn it is not, are garbage that `known` hides
            known = jnp.where(rows, jnp.minimum(memory.known + width, state.length), memory.known)
            cache = lm.commit(memory.cache, output.delta, None, memory.known, known - memory.known)
            return Memory(cache, known, memory.passes + rows), output.logits

        def behind(memory):
            return turn & (state.length - memory.known > self.how.block)

        def last(width):
            def run(memory):
                index = jnp.clip(state.length - memory.known - 1, 0, width - 1)
                after, said = read(memory, width, turn, Wants(logits=True))
                own = jnp.take_along_axis(said, index[:, None, None], axis=1)[:, 0]
                return jnp.where(turn[:, None], own, logits), after

            return run

        def go(memory):
            memory = jax.lax.while_loop(
                lambda memory: jnp.any(behind(memory)),
                lambda memory: read(memory, self.how.block, behind(memory), Wants())[0],
                memory,
            )
            lags = jnp.any(turn & (state.length - memory.known > 1))
            return jax.lax.cond(lags, last(self.how.block), last(1), memory)

        return jax.lax.cond(jnp.any(turn), go, lambda memory: (logits, memory), memory)
