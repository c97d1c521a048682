"""The interface of a target model: the LM protocol, and the arrays that go in and out.

In the shape descriptions `B` denotes rows (sequences), `T` the block's tokens, `P` uncommitted tokens before the block,
`S` cache slots, `V` the vocabulary, `E` the model width and `R` the width of the residual stream. R is E, unless a model has
several residual streams side by side; then the first E channels are the stream that heads read.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.arrays import Array, Bool, Float, Int, PyTree
from specjax.pretty import Pretty

Draw = Callable[[Float[Array, "B T V"]], Int[Array, "B T"]]
"""From raw logits `[B, T, V]` to token ids `[B, T]`; -1 if the logits have no finite maximum."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixture(Pretty):
    """Inputs that are weighted sums of `n` tokens' embeddings, from the embedding table of the model that reads them.

    Attributes:
      ids: `[B, T, n]` int32; the weights of equal ids add up.
      weights: `[B, T, n]` float32, which sum to 1. If one is 1 and the others are 0, the sum equals that embedding bit
        for bit.
      mixed: `[B, T]` bool, the slots that are read as mixtures; the others are read as their token.
    """

    ids: Int[Array, "B T n"]
    weights: Float[Array, "B T n"]
    mixed: Bool[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Source(Pretty):
    """What an encoder reads beside the text, one source for each row (`LM.encode`).

    Attributes:
      inputs: `[B, S]` int32 token ids, padded on the right with -1; or `[B, S, F]` float32 features, such as frames of
        audio.
      lengths: `[B]` int32, how many tokens or frames each row has, at least 1.
    """

    inputs: Any
    lengths: Any

    @classmethod
    def of(cls, rows: Sequence[Any], width: int = 0) -> "Source":
        """Sources on the host, one per row.

        Args:
          rows: lists of token ids, or arrays `[S, F]` of features.
          width: S, at least.

        Raises:
          ValueError: for anything else, and for a mixture of both.
        """
        arrays = [np.asarray(row) for row in rows]
        frames = {array.ndim == 2 and array.shape[1] for array in arrays}
        if len(frames) > 1 or not all(array.ndim in (1, 2) for array in arrays):
            raise ValueError("sources are lists of token ids, or arrays [S, F] of features with one F, for all rows")
        if not any(frames) and not all(np.issubdtype(array.dtype, np.integer) for array in arrays if array.size):
            raise ValueError("a source is a list of token ids, or an array [S, F] of features")
        lengths = np.asarray([len(array) for array in arrays], np.int32)
        shape = (len(arrays), max([width, *lengths]), *(arrays[0].shape[1:] if arrays else ()))
        inputs = np.zeros(shape, np.float32) if any(frames) else np.full(shape, -1, np.int32)
        for row, array in zip(inputs, arrays, strict=True):
            row[: len(array)] = array
        return cls(inputs, lengths)

    @property
    def is_tokens(self) -> bool:
        """Whether the sources are token ids; otherwise they are features."""
        return len(self.inputs.shape) == 2


def dtype_of(cache: PyTree) -> Any:
    """The type of a cache, for another one like it (`LM.init_cache`): that of its first floating array, if it has one."""
    leaves = jax.tree.leaves(cache)
    return next((leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)), leaves[0].dtype)


def encodes(lm: Any) -> bool:
    """Whether a model reads a source (`LM.encodes`); also of a model that does not say."""
    return bool(getattr(lm, "encodes", False))


def check_both_encode(lm: Any, target: Any, what: str) -> None:
    """Raises ValueError if only one of two models has an encoder, so that one would not know the source.

    Args:
      lm: the other model.
      target: the target.
      what: the other model's name in the error.
    """
    if encodes(lm) != encodes(target):
        has, lacks = ("the target", what) if encodes(target) else (what, "the target")
        raise ValueError(f"{has} has an encoder and {lacks} has none: choose two models that both have one, or neither")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block(Pretty):
    """The tokens of one forward pass, and which of them each may see.

    Attributes:
      tokens: `[B, T]` int32. Ids outside the vocabulary (padding is -1) are read as token 0.
      positions: `[B, T]` int32, absolute positions.
      length: `[B]` int32, how many committed cache slots every query sees (slot s holds position s).
      visible: bool `[B or 1, T or 1, P + T]` over the uncommitted past and the block itself, or None for `causal`/full.
        An `Unrolled` (`specjax.kernels.tree_attention`) if the past is earlier passes over the same slots.
      embeddings: `[B, T, E]` inputs that replace the embedding of the tokens marked in `embedded`, or None.
      embedded: `[B, T]` bool, the tokens that use `embeddings`.
      mixture: for slots that are read as several tokens at once (`LM.reads_mixtures`), or None; `tokens` holds the
        tokens of the text.
      unseen: `[B, S]` bool, committed slots below `length` that no query sees because the block contains them again; or
        None.
      causal: used without `visible`: a query sees all of the past, and the block up to itself (True) or all of it
        (False).
      split: whether a mesh may split the tokens along its axis `context`, as for a long prompt; only without `visible`.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    length: Int[Array, " B"]
    visible: Any = None
    embeddings: Float[Array, "B T E"] | None = None
    embedded: Bool[Array, "B T"] | None = None
    unseen: Bool[Array, "B S"] | None = None
    mixture: Mixture | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    split: bool = dataclasses.field(default=False, metadata={"static": True})

    def first(self, slots: int) -> "Block":
        """The block of the first `slots` slots alone; an `Unrolled` cannot be cut."""
        cut = lambda x: x[:, :slots]
        visible = self.visible
        if visible is not None:
            later = self.tokens.shape[1] - slots
            visible = visible[:, :slots, : visible.shape[2] - later]
        own = {name: getattr(self, name) for name in ("tokens", "positions", "embeddings", "embedded", "mixture")}
        return dataclasses.replace(self, visible=visible, **jax.tree.map(cut, own))


@dataclasses.dataclass(frozen=True)
class Wants:
    """The results that a forward pass must return. Static and hashable; merge two with `|`.

    Attributes:
      logits: raw logits, `[B, T, V]` float32.
      topk: the k largest raw logits and their ids, `[B, T, k]` each.
      draw: the tokens of `draw(logits)`, `[B, T]` int32, without keeping the logits.
      hidden: residual stream after these layers (0-based), `[B, T, E]` each, before any norm; the first, of several.
      final: the last layer's output after the final norm, `[B, T, E]`.
    """

    logits: bool = False
    topk: int = 0
    draw: bool = False
    hidden: tuple[int, ...] = ()
    final: bool = False

    def __or__(self, other: "Wants") -> "Wants":
        return Wants(
            self.logits or other.logits,
            max(self.topk, other.topk),
            self.draw or other.draw,
            tuple(sorted({*self.hidden, *other.hidden})),
            self.final or other.final,
        )

    @property
    def head(self) -> bool:
        """Whether the language-model head has to run at all."""
        return self.logits or self.draw or self.topk > 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output(Pretty):
    """The results that `Wants` asked for; the others are None.

    `delta` is the block's contribution to the cache. It is opaque, except that every leaf leads with `[B, T]`.
    """

    delta: PyTree
    # A caller that asked for one has it, so type checkers see arrays; an LM may leave the others out.
    logits: Float[Array, "B T V"] = None  # type: ignore[assignment]
    topk: tuple[Float[Array, "B T k"], Int[Array, "B T k"]] = None  # type: ignore[assignment]  # values, ids
    draw: Int[Array, "B T"] = None  # type: ignore[assignment]
    hidden: Mapping[int, Float[Array, "B T E"]] = None  # type: ignore[assignment]  # by layer
    final: Float[Array, "B T E"] = None  # type: ignore[assignment]

    if TYPE_CHECKING:

        def __init__(
            self, delta: PyTree, logits: Array | None = None, topk: tuple[Array, Array] | None = None,
            draw: Array | None = None, hidden: Mapping[int, Array] | None = None, final: Array | None = None,
        ) -> None: ...  # fmt: skip

        def __replace__(self, **changes: Any) -> "Output": ...

    def first(self, slots: int) -> "Output":
        """The output of the block's first `slots` slots alone."""
        if jax.tree.leaves(self)[0].shape[1] <= slots:
            return self
        return jax.tree.map(lambda x: x[:, :slots], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial(Pretty):
    """A head start: the block after layers `[0, lo)`, so that the target does not compute them again.

    Slots may begin at an inner layer. `beside` adds them after the others, and only later layers read them.

    Attributes:
      h: `[B, T, R]`, the residual stream entering layer `lo`.
      delta: the cache contribution of the layers below `lo`; None at layer 0.
      lo: the first layer still to run.
    """

    h: Float[Array, "B T R"]
    delta: PyTree
    lo: int = dataclasses.field(metadata={"static": True})

    def through(self, lm: "LM", params: PyTree, hi: int, block: Block, cache: PyTree) -> "Partial":
        """The head start after layers `[lo, hi)` as well.

        Args:
          lm: the target.
          params: its parameters.
          hi: the first layer then still to run.
          block: the slots of `h`.
          cache: the committed prefix.
        """
        if hi == self.lo:
            return self
        h, delta = lm.layers(params, self.h, self.lo, hi, block, cache, below=self.delta)
        return Partial(h, delta if self.delta is None else lm.join(self.delta, delta), hi)

    def beside(self, h: Float[Array, "B X R"]) -> "Partial":
        """The head start with X more slots, which begin at layer `lo`.

        Their part of the delta below `lo` is zeros, which nobody may commit, and which no later layer may read.
        """
        more = lambda x: jnp.pad(x, ((0, 0), (0, h.shape[1])) + ((0, 0),) * (x.ndim - 2))
        return Partial(jnp.concatenate([self.h, h], axis=1), jax.tree.map(more, self.delta), self.lo)


class LM(Protocol):
    """A model as functions over a params pytree. Hashable, so that it can be a static argument of `jax.jit`.

    Which methods are needed depends on the use:

    - Plain decoding, and drafters that look tokens up or learn them (prompt_lookup, suffix, sam, ngram_mod, iad,
      token_recycling, aded, rest, stand, jacobi, lookahead): `vocab_size`, `__call__`, `init_cache`, `begin`, `commit`
      and `cache_axes`. `BaseLM` has defaults for the last three.
    - A mesh: `axes` and `axis_counts` too.
    - Drafters that run some of the target's layers, or read its features: `num_layers`, `embed`, `layers`, `join`,
      `norm` and `unembed`.
    - Diffusion decoders: `embed` and `unembed`.
    - An encoder beside the decoder: `encodes`, `encode` and `source`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def reads_mixtures(self) -> bool:
        """Whether a pass reads `Block.mixture`, as one that begins with this module's `inputs` does. It needs `embed`."""
        ...

    @property
    def encodes(self) -> bool:
        """Whether an encoder reads a source beside the text, so that prompts need one (`Prompts.source`).

        The text is the decoder's alone; it begins with the decoder's start tokens.
        """
        ...

    @property
    def source_features(self) -> int:
        """F, if the sources are features `[B, S, F]`; 0 if they are tokens."""
        ...

    def __call__(
        self,
        params: PyTree,
        block: Block,
        cache: PyTree,
        *,
        wants: Wants,
        draw: Draw | None = None,
        past: PyTree | None = None,
        partial: Partial | None = None,
    ) -> Output:
        """Reads the committed prefix and never writes it. If `cache` is None, there is no prefix."""
        ...

    def embed(self, params: PyTree, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]: ...

    def layers(
        self,
        params: PyTree,
        h: Float[Array, "B T R"],
        lo: int,
        hi: int,
        block: Block,
        cache: PyTree,
        past: PyTree | None = None,
        skip: Bool[Array, "L 2"] | None = None,
        below: PyTree | None = None,
    ) -> tuple[Float[Array, "B T R"], PyTree]:
        """Runs layers `[lo, hi)`; the second result is their part of the delta.

        Layer 0 begins with embeddings, `[B, T, E]`; what goes from layer to layer is `[B, T, R]`.

        `cache`, `past` and `skip` are indexed from layer 0; `past` may end at layer `hi`. `skip` `[L, 2]` bool leaves
        out sublayers, attention first, then the MLP. Each is one scalar branch, so that the work is really saved. A
        skipped attention contributes zeros to the delta, which nobody may commit.

        `below` is the delta of the same block in the layers `[0, lo)`. A caller that starts at layer `lo` must pass it,
        because later layers may read keys and values of those.
        """
        ...

    def join(self, below: PyTree, above: PyTree) -> PyTree:
        """The delta of layers `[lo, hi)` from those of `[lo, mid)` and `[mid, hi)`."""
        ...

    def norm(self, params: PyTree, h: Float[Array, "B T R"]) -> Float[Array, "B T E"]: ...

    def unembed(self, params: PyTree, h: Float[Array, "B T E"]) -> Float[Array, "B T V"]: ...

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> PyTree: ...

    def reading(self, cache: PyTree, capacity: int) -> PyTree:
        """The empty cache in which prompts of up to `capacity` tokens are read, for rows like those of an empty `cache`.

        It is that cache, unless the model keeps less of a text than it reads. Then `begin` makes a cache like the given
        one of it.
        """
        ...

    def encode(self, params: PyTree, cache: PyTree, source: Source) -> PyTree:
        """The rows' cache after the encoder has read their sources.

        It is called once on fresh rows, before the first token of a prompt is read. What it computes for a row does not
        depend on other rows or on padding.

        A source of tokens has at most the cache's `capacity` tokens. `cache_axes` calls the axis of a source's slots
        `source`: such leaves are never written again, so the texts of a row share them.
        """
        ...

    def source(self, cache: PyTree) -> Int[Array, "B S"] | None:
        """The sources' tokens, -1 where there are none, as ids of the decoder's vocabulary, for drafters that copy.

        None if the sources are no such tokens.
        """
        ...

    def begin(self, params: PyTree, cache: PyTree, lengths: Int[Array, " B"]) -> PyTree:
        """The rows' cache before their first step, after all but the last token of their prompts was read (`lengths`
        `[B]`).

        For models that read something besides the text, or keep less than they read (`reading`). What it computes for a
        row must not depend on other rows.
        """
        ...

    def commit(
        self, cache: PyTree, delta: PyTree, src: Int[Array, "B M"] | None, dst: Int[Array, "B ..."],
        counts: Int[Array, " B"] | None = None,
    ) -> PyTree:  # fmt: skip
        """Writes delta's slots `src` `[B, M]` (None: all, in order) into the cache.

        `dst` `[B]` starts one run of M slots per row; `[B, M]` names every slot, and slots out of range are dropped.

        `counts` `[B]` int32 says how many of a row's M slots are real. Later ones may be written if a length hides
        them. A running state (`specjax.models.mixers`) cannot be taken back, so it is made of the real slots alone. A
        caller that does not know the counts, or writes slots again, passes None; a model with such states refuses
        that.
        """
        ...

    def states(self, cache: PyTree) -> PyTree:
        """What a cache keeps of a text that a shorter length does not take back: running states
        (`specjax.models.mixers`). Leaves lead with `[B]`; a model of slots has none."""
        ...

    def with_states(self, cache: PyTree, states: PyTree) -> PyTree:
        """The cache with these `states`."""
        ...

    def axes(self, params: PyTree) -> PyTree:
        """Logical axis names of every leaf of `params`, as tuples (see `specjax.sharding.rules`)."""
        ...

    def axis_counts(self) -> dict[str, int]:
        """How many units an axis splits into if that is not its size (whole heads), and the sizes of experts."""
        ...

    def cache_axes(self, cache: PyTree) -> PyTree:
        """Logical axis names of every leaf of `cache`."""
        ...


class BaseLM:
    """Defaults for your own model, a frozen dataclass that extends this class.

    The model must define `vocab_size`, `__call__` and `init_cache`; then plain decoding and look-up drafters work. See
    `LM` for what the other methods are for.

    The cache is a pytree of arrays `[B, S, ...]`; `Output.delta` has the same structure, `[B, T, ...]`.
    """

    num_layers: int = 0
    reads_mixtures: bool = False
    encodes: bool = False
    source_features: int = 0

    def commit(
        self, cache: PyTree, delta: PyTree, src: Int[Array, "B M"] | None, dst: Int[Array, "B ..."],
        counts: Int[Array, " B"] | None = None,
    ) -> PyTree:  # fmt: skip
        """See `LM.commit`."""

        def write(old, new):
            if src is not None:
                new = jnp.take_along_axis(new, src.reshape(*src.shape, *[1] * (new.ndim - 2)), axis=1)
            at = dst[:, None] + jnp.arange(new.shape[1])[None] if dst.ndim == 1 else dst
            return jax.vmap(lambda row, at, new: row.at[at].set(new.astype(row.dtype), mode="drop"))(old, at, new)

        return jax.tree.map(write, cache, delta)

    def cache_axes(self, cache: PyTree) -> PyTree:
        """See `LM.cache_axes`: only rows are split."""
        return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), cache)

    def begin(self, params: PyTree, cache: PyTree, lengths: Int[Array, " B"]) -> PyTree:
        """See `LM.begin`: the cache as it is."""
        return cache

    def reading(self, cache: PyTree, capacity: int) -> PyTree:
        """See `LM.reading`: the cache as it is."""
        return cache

    def encode(self, params: PyTree, cache: PyTree, source: Source) -> PyTree:
        """See `LM.encode`."""
        raise self._lacks("encode")

    def source(self, cache: PyTree) -> Int[Array, "B S"] | None:
        """See `LM.source`: there are no such tokens."""
        return None

    def states(self, cache: PyTree) -> PyTree:
        """See `LM.states`: there are none."""
        return ()

    def with_states(self, cache: PyTree, states: PyTree) -> PyTree:
        """See `LM.with_states`."""
        return cache

    def axes(self, params: PyTree) -> PyTree:
        """See `LM.axes`: nothing is split."""
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, params)

    def axis_counts(self) -> dict[str, int]:
        """See `LM.axis_counts`."""
        return {}

    def embed(self, params: PyTree, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """See `LM.embed`."""
        raise self._lacks("embed")

    def layers(
        self, params: PyTree, h: Float[Array, "B T R"], lo: int, hi: int, block: Block, cache: PyTree,
        past: PyTree | None = None, skip: Bool[Array, "L 2"] | None = None, below: PyTree | None = None,
    ) -> tuple[Float[Array, "B T R"], PyTree]:  # fmt: skip
        """See `LM.layers`."""
        raise self._lacks("layers")

    def join(self, below: PyTree, above: PyTree) -> PyTree:
        """See `LM.join`."""
        raise self._lacks("join")

    def norm(self, params: PyTree, h: Float[Array, "B T R"]) -> Float[Array, "B T E"]:
        """See `LM.norm`."""
        raise self._lacks("norm")

    def unembed(self, params: PyTree, h: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """See `LM.unembed`."""
        raise self._lacks("unembed")

    def _lacks(self, name: str) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no `{name}`, which this way of decoding needs: write it as `specjax.lm.LM` says, or "
            "take another drafter"
        )


def inputs(lm: LM, params: PyTree, block: Block) -> Float[Array, "B T E"]:
    """The input of a model's first layer, `[B, T, E]`: the embeddings of the block's tokens, or their replacements.

    A mixture gathers only `n` rows of the table per slot, wherever the table lies.

    Args:
      lm: the model whose `embed` is called.
      params: its parameters.
      block: the block to read.
    """
    h = lm.embed(params, block.tokens)
    if block.mixture is not None:
        ids, weights = block.mixture.ids, block.mixture.weights
        rows = lm.embed(params, ids.reshape(ids.shape[0], -1)).reshape(*ids.shape, -1)
        # a product and a sum instead of a matrix product, which rounds float32 on accelerators with fewer bits
        soft = (rows.astype(jnp.float32) * weights[..., None]).sum(axis=2)
        h = jnp.where(block.mixture.mixed[..., None], soft.astype(h.dtype), h)
    if block.embeddings is not None and block.embedded is not None:
        h = jnp.where(block.embedded[..., None], block.embeddings.astype(h.dtype), h)
    return h


def answered(output: Output, logits: Float[Array, "B T V"], wants: Wants, draw: Draw | None) -> Output:
    """An output with what was asked of its logits: themselves, the largest ones, or drawn tokens.

    Args:
      output: the rest of what the pass gives, its `delta` above all.
      logits: `[B, T, V]` float32.
      wants: what was asked.
      draw: as the pass was given it.
    """
    return dataclasses.replace(
        output,
        logits=logits if wants.logits else None,
        topk=jax.lax.top_k(logits, wants.topk) if wants.topk else None,
        draw=draw(logits) if wants.draw and draw is not None else None,
    )


def check_answered(lm: Any, output: Output, wants: Wants) -> Output:
    """The output, if it has what was asked of a pass.

    Raises:
      ValueError: naming what it lacks.
    """
    asked = {
        "logits": wants.logits,
        "topk": wants.topk,
        "draw": wants.draw,
        "hidden": wants.hidden,
        "final": wants.final,
    }
    if lacking := [name for name, value in asked.items() if value and getattr(output, name) is None]:
        raise ValueError(
            f"a pass of {type(lm).__name__} gives no `{lacking[0]}`, which this way of decoding needs: end it with "
            "`specjax.lm.answered`, which gives `logits`, `topk` and `draw`, or take another drafter"
        )
    return output


def check_both_ways(lm: Any, what: str) -> None:
    """Raises ValueError if layers of an LM keep a running state, which `what` cannot use since it reads a text both ways."""
    config = getattr(lm, "config", None)
    if mixers := getattr(config, "state_mixers", ()):
        raise ValueError(
            f"{what} reads a text both ways, and layers with {mixers[0].called} read it from left to right: take a model whose "
            "layers are all attention"
        )


def check_mixtures(lm: LM) -> None:
    """Raises ValueError if a model reads only tokens, so that it would ignore a mixture."""
    if not getattr(lm, "reads_mixtures", False):
        raise ValueError(
            f"{type(lm).__name__} reads tokens only, and this way of decoding mixes them: begin its pass with "
            "`specjax.lm.inputs` and set `reads_mixtures`, or decode in another way"
        )
