"""The base of searches: rows with several texts of one prompt, and caches that are forked.

In the shape descriptions `B` denotes rows (prompts), `K` texts of a row, `L` the text buffer, `S` cache slots.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Bool, Float, Int, PyTree
from specjax.decoder import Decode, Decoder, Needs
from specjax.lm import LM, Block, Wants, dtype_of, encodes
from specjax.pretty import Pretty
from specjax.prompts import Prompts
from specjax.sampling import Sampler
from specjax.sampling.processors import Processor, checked
from specjax.search.fork import chosen, fork, forked_axes, merged, parted, spread
from specjax.sharding.ambient import on_mesh
from specjax.sharding.rules import constrain, rounded
from specjax.speculative import Speculative, speculative
from specjax.state import Finish, Prefix, Rows, Stats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams(Pretty):
    """The texts of a row that still grow; all have the same length.

    Attributes:
      tokens: `[B, K, L]` int32, prompt and output.
      scores: `[B, K]` float32, the search's own; -inf where there is no text.
    """

    tokens: Int[Array, "B K L"]
    scores: Float[Array, "B K"]

    @classmethod
    def of(cls, prompts: Array, count: int, groups: int) -> Self:
        """So many copies of every prompt `[B, L]`; the first of each group has score 0, and the others do not count yet."""
        scores = jnp.where(jnp.arange(count) % (count // groups) == 0, 0.0, -jnp.inf)
        return cls(spread(prompts, count), spread(jnp.zeros(prompts.shape[:1]), count) + scores[None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Found(Pretty):
    """The texts of a row that have ended.

    Attributes:
      tokens: `[B, K, L]` int32, prompt and output; anything from `length` on.
      length: `[B, K]` int32.
      scores: `[B, K]` float32, the best is the highest; -inf where there is no text.
      finish: `[B, K]` int32, a `Finish` value.
    """

    tokens: Int[Array, "B K L"]
    length: Int[Array, "B K"]
    scores: Float[Array, "B K"]
    finish: Int[Array, "B K"]

    @classmethod
    def nothing(cls, batch: int, count: int, capacity: int) -> Self:
        """An empty set of texts."""
        zeros = lambda *more: jnp.zeros((batch, count, *more), jnp.int32)
        return cls(zeros(capacity), zeros(), zeros() - jnp.inf, zeros() + Finish.LENGTH)

    @property
    def worth(self) -> Array:
        """`[B, K]`: the `score` of a text's record, for a search that ranks by another number."""
        return self.scores

    @property
    def log_evidence(self) -> Array | None:
        """`[B]`: the logarithm of the estimated probability that a text is in the language; None if it is not estimated."""
        return None

    def best(self) -> "Found":
        """The best text of every row, `[B]` and `[B, L]`."""
        at = jnp.argmax(self.scores, axis=1)
        return jax.tree.map(lambda x: chosen(x, at[:, None])[:, 0], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SearchState(Rows):
    """The rows of a search. Until a row is done, its `tokens` and `length` are the prompt; then they are the best text found.

    Attributes:
      beams: the texts that still grow; they have `prompt_length + stats.steps` tokens.
      found: the texts that have ended.
      open: `[B, G]` bool, groups of a row that may still find something.
      cache: the target's, for every text: leaves `[B, K, ...]`, or `[B, 1, ...]` if all share one
        (`Search.num_caches`). The last token of a text has no entry yet.
    """

    beams: Beams
    found: Found
    open: Bool[Array, "B G"]
    cache: PyTree


@dataclasses.dataclass(frozen=True)
class SearchSettings(Decode):
    """Settings of a search. Each implementation stands beside its decoder, whose field `how` holds it.

    Attributes:
      processors: the user's own warpers (`specjax.sampling.Processor`), of log-probabilities.
    """

    called: ClassVar[str] = "a beam search"
    """Its name in error messages."""
    aligns: ClassVar[str] = "local"
    """The distribution of texts under a constraint, a key of `specjax.constrain.kinds.DISTRIBUTIONS`."""

    _: dataclasses.KW_ONLY
    processors: tuple[Processor, ...] = ()

    @property
    def per_token(self) -> str:
        """Which texts it writes, and at what cost per token, in words that follow a number of tokens."""
        return ""

    @abc.abstractmethod
    def decoder(self, target: LM, mesh: jax.sharding.Mesh | None) -> "Search":
        """The search, as a decoder of a model."""

    def params(self, model: Any, mesh: jax.sharding.Mesh | None) -> PyTree:
        """The decoder's parameters; see `Decode.bind`."""
        return {"target": model.params}

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple["Search", PyTree]:
        """See `Decode.bind`."""
        if model.masked or model.canvas:
            raise ValueError(f"{model.name} is {model.kind}, and {self.called} writes from left to right")
        if logprobs:
            raise ValueError(
                f"records of {self.called} carry a score, of the whole text: leave logprobs out, or ask `specjax score` for "
                "the log-probabilities of its tokens"
            )
        processors = checked(self.processors, model.lm.vocab_size)
        search = dataclasses.replace(self, processors=processors).decoder(model.lm, mesh)
        params = self.params(model, mesh)
        if mesh is not None and not model.abstract:
            params = jax.device_put(params, search.param_shardings(params))
        return search, params


@dataclasses.dataclass(frozen=True)
class Search(Decoder[SearchState], abc.ABC):
    """A decoder of several texts per row. Implementations are frozen dataclasses that define `step`.

    The prompt is prefilled once per row, whatever the number of its texts. A text that is continued in two ways passes
    its cache on to both.

    Attributes:
      target: the model.
      how: its settings.
      mesh: the device mesh that params and state are laid out on, or None.
      greedy: whether no row uses a warper, so that no warper is compiled.
    """

    draws: ClassVar[bool] = False
    """Whether it draws its texts, so that rows need a temperature; otherwise no row may have one."""
    growing: ClassVar[type[Beams]] = Beams
    ended: ClassVar[type[Found]] = Found

    target: LM
    how: Any
    mesh: jax.sharding.Mesh | None = None
    _: dataclasses.KW_ONLY
    greedy: bool = False

    @property
    def aligns(self) -> bool:
        """Whether it brings texts nearer to the model's distribution given a constraint than the local rule does."""
        return self.how.aligns != SearchSettings.aligns

    @property
    def called(self) -> str:
        """Its name in error messages."""
        return self.how.called

    @property
    @abc.abstractmethod
    def num_texts(self) -> int:
        """K, how many texts of a row grow, and the most that it ends with."""

    @property
    def num_caches(self) -> int:
        """The number of caches of a row: one per text, or one for all of them."""
        return self.num_texts

    @property
    def num_groups(self) -> int:
        """G, the number of groups of these texts."""
        return 1

    @property
    def reads_prefix(self) -> bool:
        return True

    @property
    def encodes(self) -> bool:
        """See `Decoder.encodes`."""
        return encodes(self.target)

    def fitted(self, needs: Needs) -> Self:
        """See `Decoder.fitted`."""
        return dataclasses.replace(self, greedy=needs.greedy)

    @property
    def _plain(self) -> Speculative:
        """The decoder that reads prompts."""
        return speculative(self.target, mesh=self.mesh)

    def axes(self, state: SearchState) -> SearchState:
        """See `Decoder.axes`."""
        axes = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)
        return dataclasses.replace(axes, cache=forked_axes(self.target, state.cache))

    def param_shardings(self, params: PyTree) -> PyTree:
        """See `specjax.speculative.Speculative.param_shardings`."""
        return {"target": self._plain.param_shardings({"target": params["target"], "draft": None})["target"]}

    def constrained(self, state: SearchState) -> SearchState:
        """The state, kept on its shardings."""
        return constrain(self.mesh, self.axes(state), state)

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> SearchState:
        """See `Decoder.empty`."""
        capacity = rounded(self.mesh, "slots", capacity)
        dtype = cache_dtype or jax.tree.leaves(params["target"])[0].dtype
        prompts = jnp.zeros((batch, capacity), jnp.int32)
        state = SearchState.blank(
            batch,
            capacity,
            0,
            eos_width,
            length=1,
            beams=self.growing.of(prompts, self.num_texts, self.num_groups),
            found=self.ended.nothing(batch, self.num_texts, capacity),
            open=jnp.ones((batch, self.num_groups), bool),
            cache=parted(self.target.init_cache(batch * self.num_caches, capacity, dtype), self.num_caches),
        )
        return self.constrained(state)

    def prefill(
        self, params: PyTree, state: SearchState, prompts: Prompts, prefix: Prefix | None = None
    ) -> SearchState:
        """See `Decoder.prefill`: plain decoding reads the prompt, and each text begins with a copy of its cache."""
        plain = self._plain.prefill(params | {"draft": None}, self._blank(params, state), prompts, prefix)
        batch, capacity = plain.tokens.shape
        rows = {field.name: getattr(plain, field.name) for field in dataclasses.fields(Rows)}
        limit = jnp.clip(
            prompts.limit, prompts.lengths, capacity - self.slack
        )  # its own limit, because plain decoding writes further
        return SearchState(
            **rows | {"limit": limit},
            beams=self.growing.of(plain.tokens, self.num_texts, self.num_groups),
            found=self.ended.nothing(batch, self.num_texts, capacity),
            open=jnp.ones((batch, self.num_groups), bool),
            cache=jax.tree.map(lambda x: spread(x, self.num_caches), plain.cache),
        )

    @on_mesh
    def read_prefix(self, params: PyTree, state: SearchState, tokens: Array) -> tuple[SearchState, Prefix]:
        """See `specjax.speculative.Speculative.read_prefix`."""
        return state, self._plain.read_prefix(params | {"draft": None}, self._blank(params, state), tokens)[1]

    @on_mesh
    def read_on(
        self, params: PyTree, state: SearchState, prefix: Prefix, begin: Array, end: Array, width: int
    ) -> tuple[SearchState, Prefix]:
        """See `Decoder.read_on`."""
        blank = self._blank(params, state)
        return state, self._plain.read_on(params | {"draft": None}, blank, prefix, begin, end, width)[1]

    def prefix_axes(self, prefix: Prefix) -> Prefix:
        """See `Decoder.prefix_axes`."""
        return self._plain.prefix_axes(prefix)

    def _blank(self, params, state):
        """A row of plain decoding with the same capacities as the state."""
        dtype = dtype_of(state.cache)
        capacity, eos_width = state.tokens.shape[1], state.eos.shape[1]
        return self._plain.empty(params | {"draft": None}, 1, capacity, dtype, eos_width)

    def _read(self, params, state, length):
        """Logits `[B, K, V]` of the next token of every text, and what the pass adds to the cache."""
        at = jnp.repeat(length - 1, self.num_texts)
        tokens = jnp.take_along_axis(merged(state.beams.tokens), at[:, None], axis=1)
        block = Block(tokens, at[:, None], at)
        output = self.target(params["target"], block, merged(state.cache), wants=Wants(logits=True))
        return parted(output.logits[:, 0], self.num_texts), output.delta

    def _forked(self, state, delta, source, length, live, moves=None):
        """The cache of the new texts: each takes the cache of the text that it continues, and what the pass added to it.

        If it is known which rows `moves` `[B]`, in the others every text continues itself.
        """
        moves = live if moves is None else moves
        whole = self.mesh is not None and self.mesh.size > 1
        axes = forked_axes(self.target, state.cache)
        axes = (
            jax.tree.map(lambda _: (), state.cache) if whole else axes
        )  # a split axis would be gathered if it were moved in pieces
        first = jnp.min(jnp.where(moves, state.prompt_length, state.tokens.shape[1])) - 1
        last = jnp.max(jnp.where(moves, length, 0))
        cache = fork(state.cache, axes, source, first, last)
        delta = merged(jax.tree.map(lambda x: chosen(x, source), parted(delta, self.num_texts)))
        at, counts = (jnp.repeat(x, self.num_texts) for x in (length - 1, live.astype(jnp.int32)))
        return parted(self.target.commit(merged(cache), delta, None, at, counts), self.num_texts)

    def _after(self, state, over, failed, beams, found, open, cache) -> SearchState:
        """The state after a step.

        Args:
          state: before the step.
          over: `[B]` bool, rows that go no further.
          failed: `[B]` bool, rows whose logits were not finite; rows that are over without a text have failed too.
          beams: the texts that grow.
          found: the texts that have ended.
          open: `[B, G]` bool, groups that go on.
          cache: the target's.
        """
        live, best = ~state.done, found.best()
        failed = failed | ~jnp.isfinite(best.scores)
        ends = live & over & ~failed
        finish = jnp.where(over, jnp.where(failed, Finish.ERROR, best.finish), Finish.RUNNING)
        new = dataclasses.replace(
            state,
            tokens=jnp.where(ends[:, None], best.tokens, state.tokens),
            length=jnp.where(ends, best.length, state.length),
            finish=jnp.where(live, finish, state.finish).astype(jnp.int32),
            stats=Stats(state.stats.steps + live, state.stats.accepted + live[:, None]),
            beams=beams,
            found=found,
            open=open,
            cache=cache,
        )
        return self.constrained(new)

    def _sampler(self, state, texts, length, live):
        """The warpers for as many rows as there are texts `[B, W, L]`."""
        repeat = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, texts.shape[1], axis=0), tree)
        return Sampler(
            repeat(state.key),
            merged(texts),
            repeat(length),
            repeat(live),
            repeat(state.sampling),
            processors=self.how.processors,
            greedy=self.greedy,
            begin=repeat(state.prompt_length),
            eos=repeat(state.eos),
            limit=repeat(state.limit),
        )
