"""A check of your own model: does it keep the contract of `specjax.lm.LM`, and what can be done with it?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import LM, Block, Wants, encodes
from specjax.pretty import Pretty

PyTree = Any
TOPMOST = 3
"""How many of the largest logits are asked for."""


class ContractError(AssertionError):
    """The first place where a model does not keep the contract; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Checked(Pretty):
    """What `check_lm` found in a model that keeps the contract.

    Attributes:
      kept: what was compared.
      serves: what more can be done with it.
      lacks: what cannot, and why.
    """

    kept: tuple[str, ...]
    serves: tuple[str, ...]
    lacks: dict[str, str]

    def __str__(self) -> str:
        lines = [f"kept    {name}" for name in self.kept] + [f"serves  {name}" for name in self.serves]
        return "\n".join(lines + [f"lacks   {name}: {why}" for name, why in self.lacks.items()])


def check_lm(lm: LM, params: PyTree, *, length: int = 24, seed: int = 0, tolerance: float | None = None) -> Checked:
    """Compares a model's passes with each other: with and without a cache, in batches and alone, in trees and along a path.

    A difference is one of float rounding if it is at most `tolerance` times the largest logit. Plain decoding and drafters that
    look tokens up need everything that is compared first. Afterwards it is tried what else the model serves.

    Args:
      lm: the model.
      params: its parameters.
      length: tokens of the longest text that is read, at least 12.
      seed: of the tokens that are read.
      tolerance: see above; None: 0.001 of parameters in float32, and eight roundings of a type with fewer bits.

    Raises:
      ContractError: names the first check that fails, with the row, the position and the logit.
      ValueError: for a model that reads a source beside the text, and for a length below 12.

    >>> from specjax.models import LlamaLM, llama_config
    >>> lm = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=64))
    >>> print(check_lm(lm, lm.init(jax.random.key(0))).lacks)
    {}
    """
    if encodes(lm):
        raise ValueError("check_lm reads no source beside the text: it is for models without an encoder")
    if length < 12:
        raise ValueError(f"length must be at least 12 tokens, got {length}")
    try:
        hash(lm)
    except TypeError as error:
        raise ContractError(f"a model must be hashable, such as a frozen dataclass: {error}") from error
    text = _Text(lm, params, length, seed, _usual_tolerance(params) if tolerance is None else tolerance)
    kept = tuple(_named(check, text) for check in _NEEDED)
    serves, lacks = [], {}
    for name, check in _MORE.items():
        try:
            check(text)
            serves.append(name)
        except ContractError as error:
            lacks[name] = str(error)
        except Exception as error:  # whatever a model raises where it was not made for this
            lacks[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Checked(kept, tuple(serves), lacks)


def _usual_tolerance(params: PyTree) -> float:
    types = [leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return max([1e-3, *(8 * float(jnp.finfo(kind).eps) for kind in types)])


def _named(check: "Callable[[_Text], None]", text: "_Text") -> str:
    name = (check.__doc__ or "").strip().rstrip(".")
    try:
        check(text)
    except ContractError:
        raise
    except Exception as error:  # whatever a model raises where it does not keep the contract
        said = str(error).strip().splitlines()[:1] or [""]
        raise ContractError(f"while it was tried whether {name}: {type(error).__name__}: {said[0]}") from error
    return name


class _Text:
    """Random rows of tokens, and the logits that one pass over them gives, to which all others are compared."""

    def __init__(self, lm: LM, params: PyTree, length: int, seed: int, tolerance: float):
        self.lm, self.params, self.length, self.tolerance = lm, params, length, tolerance
        self.rows, self.capacity = 3, 2 * length  # a run of the whole text fits after any of its tokens
        key = jax.random.key(seed)
        self.tokens = jax.random.randint(key, (self.rows, length), 0, lm.vocab_size, jnp.int32)
        self.read = jax.jit(lm, static_argnames=("wants",))
        self.lengths = jnp.asarray([length - 8, length - 5, length - 7], jnp.int32)

    @property
    def none(self) -> jax.Array:
        return jnp.zeros((self.rows,), jnp.int32)

    def empty(self, rows: int | None = None) -> PyTree:
        return self.lm.init_cache(rows or self.rows, self.capacity)

    def block(self, tokens: Any, length: Any = None, visible: Any = None, positions: Any = None) -> Block:
        length = jnp.zeros((len(tokens),), jnp.int32) if length is None else length
        positions = (
            length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
        )
        return Block(tokens, positions, length, visible)

    def logits(self, block: Block, cache: PyTree, past: PyTree = None) -> np.ndarray:
        return np.asarray(self.read(self.params, block, cache, wants=Wants(logits=True), past=past).logits, np.float32)

    def delta(self, block: Block, cache: PyTree, past: PyTree = None) -> PyTree:
        return self.read(self.params, block, cache, wants=Wants(logits=True), past=past).delta

    @property
    def whole(self) -> np.ndarray:
        if not hasattr(self, "_whole"):
            self._whole = self.logits(self.block(self.tokens), self.empty())
        return self._whole

    def prefixed(self, lengths: Any) -> PyTree:
        """The cache after the first `lengths` `[B]` tokens of the rows."""
        delta = self.delta(self.block(self.tokens), self.empty())
        return self.lm.commit(self.empty(), delta, None, self.none, lengths)

    def after(self, lengths: Any, count: int) -> jax.Array:
        """The `count` tokens after the first `lengths` of every row."""
        return jnp.take_along_axis(self.tokens, lengths[:, None] + jnp.arange(count)[None], axis=1)

    def wanted(self, lengths: Any, count: int) -> np.ndarray:
        at = np.asarray(lengths)[:, None] + np.arange(count)
        return np.take_along_axis(self.whole, at[:, :, None], axis=1)

    def same(self, found: np.ndarray, wanted: np.ndarray, said: str, positions: Any = None) -> None:
        """Raises ContractError at the largest difference of logits `[B, T, V]`, if it is too large."""
        if found.shape != wanted.shape:
            raise ContractError(f"{said}: logits have the shape {found.shape}, and {wanted.shape} was meant")
        apart = np.abs(found - wanted)
        apart = np.where(np.isnan(apart), np.inf, apart)
        if apart.max() <= self.tolerance * max(1.0, float(np.abs(wanted).max())):
            return
        row, slot, token = np.unravel_index(int(apart.argmax()), apart.shape)
        position = slot if positions is None else int(np.asarray(positions)[row, slot])
        raise ContractError(
            f"{said}: row {row}, position {position}, the logit of token {token} is {found[row, slot, token]:.4g} and not "
            f"{wanted[row, slot, token]:.4g}"
        )


def _pass(text: _Text) -> None:
    """a pass gives finite logits [B, T, V]."""
    output = text.read(text.params, text.block(text.tokens), text.empty(), wants=Wants(logits=True), past=None)
    shape = (text.rows, text.length, text.lm.vocab_size)
    if output.logits is None or output.logits.shape != shape:
        found = None if output.logits is None else output.logits.shape
        raise ContractError(f"a pass gives logits [B, T, V] = {shape}, and these are {found}")
    if not np.isfinite(np.asarray(output.logits, np.float32)).all():
        raise ContractError("logits are not finite")
    for leaf in jax.tree.leaves(output.delta):
        if leaf.shape[:2] != shape[:2]:
            raise ContractError(
                f"every array of delta begins with [B, T] = {shape[:2]}, and one has the shape {leaf.shape}"
            )


def _causal(text: _Text) -> None:
    """a token has no influence on logits before it."""
    at = text.length // 2
    other = text.tokens.at[:, at:].add(1) % text.lm.vocab_size
    found = text.logits(text.block(other), text.empty())[:, :at]
    text.same(found, text.whole[:, :at], f"tokens from position {at} on were changed")


def _alone(text: _Text) -> None:
    """a row does not depend on the rows beside it."""
    for row in range(text.rows):
        found = text.whole.copy()
        found[row] = text.logits(text.block(text.tokens[row : row + 1]), text.empty(1))[0]
        text.same(found, text.whole, "each row was read alone")


def _committed(text: _Text) -> None:
    """tokens of the cache are read like tokens of the block, also where rows have different lengths."""
    block = text.block(text.after(text.lengths, 5), text.lengths)
    found = text.logits(block, text.prefixed(text.lengths))
    said = f"the first {np.asarray(text.lengths).tolist()} tokens of the rows were committed, and the next ones read"
    text.same(found, text.wanted(text.lengths, 5), said, block.positions)


def _one_by_one(text: _Text) -> None:
    """tokens that are read and committed one by one are read like all at once."""
    cache, lengths = text.prefixed(text.lengths), text.lengths
    for _ in range(3):
        block = text.block(text.after(lengths, 1), lengths)
        text.same(text.logits(block, cache), text.wanted(lengths, 1), "tokens were read one by one", block.positions)
        cache = text.lm.commit(cache, text.delta(block, cache), None, lengths, jnp.ones_like(lengths))
        lengths = lengths + 1


def _length(text: _Text) -> None:
    """slots of the cache from `block.length` on are not read."""
    cache = text.prefixed(text.lengths)
    if jax.tree.leaves(text.lm.states(cache)):
        return  # a running state has no slots that a length could hide
    other = text.block((text.tokens[:, ::-1] + 1) % text.lm.vocab_size)
    cache = text.lm.commit(cache, text.delta(other, text.empty()), None, text.lengths, None)
    block = text.block(text.after(text.lengths, 5), text.lengths)
    said = "other tokens were written into slots from `block.length` on"
    text.same(text.logits(block, cache), text.wanted(text.lengths, 5), said, block.positions)


def _tree(text: _Text, levels: bool = False) -> tuple[Block, np.ndarray]:
    """A tree after the prefix: the next token, then two children, the text's own and another, then the own one's child.

    Returns:
      The block, and the path's logits at its slots; the other child's are those of a text with it.
    """
    own = text.after(text.lengths, 3)
    other = (own[:, 1:2] + 1) % text.lm.vocab_size
    tokens = jnp.concatenate([own[:, :1], other, own[:, 1:]], axis=1)
    visible = jnp.asarray([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    positions = text.lengths[:, None] + jnp.asarray([[0, 1, 1, 2]], jnp.int32)
    path = text.block(tokens[:, :2], text.lengths)
    beside = text.logits(path, text.prefixed(text.lengths))[:, 1:]
    wanted = text.wanted(text.lengths, 3)
    return text.block(tokens, text.lengths, visible, positions), np.concatenate(
        [wanted[:, :1], beside, wanted[:, 1:]], axis=1
    )


def _visible(text: _Text) -> None:
    """a token of a tree sees what `block.visible` says, at its own position."""
    block, wanted = _tree(text)
    text.same(text.logits(block, text.prefixed(text.lengths)), wanted, "a tree was read", block.positions)


def _path(text: _Text) -> None:
    """a path of a tree is committed by the slots of its nodes."""
    block, _ = _tree(text)
    cache = text.prefixed(text.lengths)
    src = jnp.broadcast_to(jnp.asarray([0, 2, 3], jnp.int32), (text.rows, 3))
    counts = jnp.full((text.rows,), 3, jnp.int32)
    cache = text.lm.commit(cache, text.delta(block, cache), src, text.lengths, counts)
    after = text.block(text.after(text.lengths + 3, 2), text.lengths + 3)
    said = "the slots 0, 2 and 3 of a tree were committed"
    text.same(text.logits(after, cache), text.wanted(text.lengths + 3, 2), said, after.positions)


def _padding(text: _Text) -> None:
    """a block may end with tokens -1, which change nothing before them."""
    padded = jnp.concatenate([text.tokens[:, :-4], jnp.full((text.rows, 4), -1, jnp.int32)], axis=1)
    found = text.logits(text.block(padded), text.empty())[:, :-4]
    text.same(found, text.whole[:, :-4], "the last tokens were -1")


def _drawn(text: _Text) -> None:
    """`draw` gets the logits, and its tokens come back."""
    draw = lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32)
    run = jax.jit(lambda params, block, cache: text.lm(params, block, cache, wants=Wants(draw=True), draw=draw).draw)
    found = run(text.params, text.block(text.tokens), text.empty())
    if found is None:
        raise ContractError("a pass that gets `draw` gives no tokens: end it with `specjax.lm.answered`")
    wanted = text.whole.argmax(axis=-1)
    near = np.take_along_axis(text.whole, np.asarray(found)[:, :, None] % text.lm.vocab_size, axis=2)[:, :, 0]
    if not (near >= text.whole.max(axis=-1) - text.tolerance * max(1.0, np.abs(text.whole).max())).all():
        row, slot = np.argwhere(np.asarray(found) != wanted)[0]
        raise ContractError(
            f"`draw` took the likeliest token: row {row}, position {slot}, it is {found[row, slot]} and not {wanted[row, slot]}"
        )


def _axes(text: _Text) -> None:
    """`cache_axes` names the axes of every array of the cache, rows first."""
    cache = text.empty()
    axes = text.lm.cache_axes(cache)
    for leaf, names in _paired(cache, axes, "cache_axes"):
        if len(names) != leaf.ndim:
            raise ContractError(f"cache_axes: an array of shape {leaf.shape} has the axes {names}")


_NEEDED = (_pass, _causal, _alone, _committed, _one_by_one, _length, _visible, _path, _padding, _drawn, _axes)


def _without_cache(text: _Text) -> None:
    text.same(text.logits(text.block(text.tokens), None), text.whole, "the cache was None")


def _likeliest(text: _Text) -> None:
    wants = Wants(topk=TOPMOST)
    output = text.read(text.params, text.block(text.tokens), text.empty(), wants=wants, past=None)
    if output.topk is None:
        raise ContractError("a pass does not give `topk`")
    wanted = -np.sort(-text.whole, axis=-1)[..., :TOPMOST]
    text.same(np.asarray(output.topk[0], np.float32), wanted, f"the {TOPMOST} largest logits were asked for")


def _past(text: _Text) -> None:
    block, wanted = _tree(text)
    cache = text.prefixed(text.lengths)
    visible: Any = block.visible
    first = text.block(block.tokens[:, :2], text.lengths, visible[:, :2, :2], block.positions[:, :2])
    second = text.block(block.tokens[:, 2:], text.lengths, visible[:, 2:], block.positions[:, 2:])
    found = text.logits(second, cache, past=text.delta(first, cache))
    text.same(found, wanted[:, 2:], "a tree's second half was read with its first as `past`", second.positions)


def _features(text: _Text) -> None:
    layers = text.lm.num_layers
    wants = Wants(logits=True, hidden=tuple({0, layers - 1}), final=True)
    output = text.read(text.params, text.block(text.tokens), text.empty(), wants=wants, past=None)
    if not output.hidden or output.final is None:
        raise ContractError("a pass gives neither `hidden` nor `final`")
    found = np.asarray(text.lm.unembed(text.params, output.final), np.float32)
    text.same(found, text.whole, "`unembed` got `final`")
    found = np.asarray(text.lm.norm(text.params, output.hidden[layers - 1]), np.float32)
    text.same(found, np.asarray(output.final, np.float32), "`norm` got the last layer's `hidden`")


def _layers(text: _Text) -> None:
    layers, block, cache = text.lm.num_layers, text.block(text.tokens), text.empty()
    if layers < 1:
        raise ContractError("`num_layers` is 0")
    half = layers // 2
    h = text.lm.embed(text.params, text.tokens)
    h, below = text.lm.layers(text.params, h, 0, half, block, cache) if half else (h, None)
    h, above = text.lm.layers(text.params, h, half, layers, block, cache, below=below)
    found = np.asarray(text.lm.unembed(text.params, text.lm.norm(text.params, h)), np.float32)
    text.same(found, text.whole, f"the layers were run as 0 to {half} and {half} to {layers}")
    joined = text.lm.join(below, above) if half else above
    if jax.tree.structure(joined) != jax.tree.structure(text.delta(block, cache)):
        raise ContractError("`join` gives another structure than a pass's delta")


def _mesh(text: _Text) -> None:
    axes = text.lm.axes(text.params)
    for leaf, names in _paired(text.params, axes, "axes"):
        if len(names) != leaf.ndim:
            raise ContractError(f"axes: an array of shape {leaf.shape} has the axes {names}")


def _paired(tree: PyTree, axes: PyTree, what: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """The arrays of a tree, and the names of their axes."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    try:
        jax.tree.map(lambda leaf, names: found.append((leaf, tuple(names))), tree, axes)
    except (ValueError, TypeError) as error:
        raise ContractError(
            f"{what}: it has another structure than its arrays: {str(error).splitlines()[0]}"
        ) from error
    return found


_MORE: dict[str, Callable[[_Text], None]] = {
    "scores and training, which read without a cache": _without_cache,
    "drafters that ask for the likeliest tokens": _likeliest,
    "being a draft model, which reads its own drafts as `past`": _past,
    "heads that read features": _features,
    "drafters that run some of its layers": _layers,
    "meshes": _mesh,
}
