"""The common part of drafters over the target's features: a head's own cache, limited to committed tokens, and its vocabulary.

Feature i is the target's after token i, and is paired with token i + 1: the pair predicts token i + 2. After every step
the head reads the pairs that the step committed, so that the next proposal starts from the output for the last one.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.base import Trained, TreeDrafter
from specjax.draft.head import head_columns, params_dtype
from specjax.lm import Block, Output, Wants
from specjax.models.few_bits import embedded
from specjax.models.kv import commit_kv, init_kv, kv_axes
from specjax.sampling import Sampler

Array = jax.Array
PyTree = Any

SIZES = {
    "inner": "intermediate_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
}  # fmt: skip
"""Fields of drafters that choose the sizes of their layers, and the names of these sizes in an MLP (`inner`) and in
attention.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureDraft:
    """The state of a head.

    Attributes:
      cache: the head's own, of committed pairs; None for a head without one.
      length: `[B]` int32, committed pairs: one less than the row's tokens.
      feature: `[B, F]`, the head's output for the last pair; zeros before the first.
    """

    cache: Any
    length: Any
    feature: Any


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter, Trained):
    """Reads pairs of (feature, next token) from the target as they are committed; subclasses draft from the last one."""

    target: Any = dataclasses.field(default=None, kw_only=True)
    """The target LM; filled in by `bind`."""

    @abc.abstractmethod
    def read(
        self, params: PyTree, features: Array, block: Block, cache: PyTree, past: PyTree | None = None
    ) -> tuple[Array, PyTree]:
        """Runs the head over pairs: `features` `[B, T, ...]` of the target and the block's tokens `[B, T]` after them.

        Returns:
          `[B, T, F]` and the pairs' part of the cache (None without one).
        """

    @abc.abstractmethod
    def features(self, output: Output) -> Array:
        """`[B, T, ...]`, what the head reads of the target's output."""

    def continued(self, draft: FeatureDraft, features: Array) -> Array:
        """What the head reads of features `[B, T, ...]` that follow those of a state."""
        return features

    @property
    @abc.abstractmethod
    def feature_wants(self) -> Wants:
        """Static: what `features` needs."""

    @property
    @abc.abstractmethod
    def feature_size(self) -> int:
        """Static: F."""

    def embed(self, params: PyTree, tokens: Array) -> Array:
        """`[B, T, E]` float32 of ids `[B, T]`, by the head's own table where it has one, or the target's."""
        own = params["draft"].get("embed")
        if own is None:
            return self.target.embed(params["target"], tokens)
        return embedded(own["embedding"], tokens, self.target.vocab_size)

    @property
    def wants(self) -> Wants:
        return self.feature_wants

    @property
    def prefill_wants(self) -> Wants:
        return self.feature_wants

    def init(self, params, batch, capacity) -> PyTree:
        dtype = params_dtype(params["draft"])
        zeros = jnp.zeros((batch, self.feature_size), dtype)
        cache = None
        if self.cache_config is not None:
            cache = init_kv(self.cache_config, batch, capacity, dtype)
        return FeatureDraft(cache, jnp.zeros((batch,), jnp.int32), zeros)

    def axes(self, draft) -> PyTree:
        return FeatureDraft(kv_axes(draft.cache), ("batch",), ("batch", None))

    def prefill(self, params, draft, chunk, output) -> PyTree:
        block = dataclasses.replace(chunk.block, tokens=chunk.following)
        h, delta = self.read(params, self.continued(draft, self.features(output)), block, draft.cache)
        count = chunk.real.sum(axis=1, dtype=jnp.int32)
        feature = jnp.where((count > 0)[:, None], _row(h, jnp.maximum(count - 1, 0)), draft.feature)
        feature = feature.astype(draft.feature.dtype)
        return FeatureDraft(_commit(draft.cache, delta, block.positions[:, 0]), draft.length + count, feature)

    def observe(self, params, draft, proposal, output, verdict) -> PyTree:
        path = jnp.maximum(verdict.path, 0)
        features = self.features(output)
        features = jnp.take_along_axis(features, path.reshape(path.shape + (1,) * (features.ndim - 2)), axis=1)
        features = self.continued(draft, features)
        positions = draft.length[:, None] + jnp.arange(path.shape[1])[None]
        h, delta = self.read(params, features, Block(verdict.emitted, positions, draft.length), draft.cache)
        # As in the step, the write is made to come after the read, so that the cache is updated in place.
        after = jnp.where(jnp.isnan(h[:, 0, 0]), 0, draft.length)
        feature = _row(h, verdict.accepted).astype(draft.feature.dtype)
        return FeatureDraft(_commit(draft.cache, delta, after), draft.length + verdict.committed, feature)

    def trimmed(self, params, target_params, ids):
        """Keeps only the columns `ids` of the draft's own head, or of the target's head if the draft has none."""
        own = {name: x[..., ids] for name, x in params.get("head", {}).items()}
        head = own or head_columns(self.target, target_params, ids)
        return self, {**params, "head": head, "ids": jnp.asarray(ids, jnp.int32)}

    def restricted(self, params: PyTree, sampler: Sampler) -> Sampler:
        """The sampler for the head's distributions; `params["draft"]` holds `ids` if the head knows fewer tokens than
        the target.
        """
        return sampler.restricted(params["draft"].get("ids"), self.target.vocab_size)


def _commit(cache, delta, dst):
    if cache is None:
        return None
    return commit_kv(cache, delta, None, dst)


def _row(x: Array, index: Array) -> Array:
    """`[B, F]` from `[B, T, F]` at `index` `[B]`."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def mask_embedding(target: Any, target_params: PyTree, mask: int = -1) -> Array:
    """`[1, E]`, the input of a mask: a token's embedding, or the mean of all embeddings if `mask` is -1.

    Raises:
      ValueError: if there is no such token.
    """
    if not -1 <= mask < target.vocab_size:
        raise ValueError(f"mask={mask} is not a token of the target's {target.vocab_size}")
    ids = jnp.arange(target.vocab_size, dtype=jnp.int32) if mask < 0 else jnp.asarray([mask], jnp.int32)
    return target.embed(target_params, ids[None]).mean(axis=1)


def head_config(target: Any, what: str) -> Any:
    """The target's `ModelConfig`, from which a head takes its sizes.

    Raises:
      ValueError: if the target has none.
    """
    config = getattr(target, "config", None)
    if config is None:
        raise ValueError(f"{what} needs a target of the Llama family, or its own config=ModelConfig(...)")
    return config


def layers_config(target: Any, what: str, layers: int = 1) -> Any:
    """The `ModelConfig` of a head's own layers: Llama's, of the target's sizes, without its sliding window.

    Raises:
      ValueError: see `head_config`.
    """
    return head_config(target, what).plain(layers)


def sized(drafter: Any, config: Any) -> Any:
    """A config with the sizes that a drafter's fields choose; 0 keeps the config's own.

    Args:
      drafter: with the fields `inner`, `heads`, `kv_heads` and `head_dim`.
      config: a `ModelConfig`.

    Raises:
      ValueError: for sizes that do not fit each other or the config's rope.
    """
    from specjax.models import AttentionConfig, MLPConfig

    name, chosen = type(drafter).__name__.lower(), {field: getattr(drafter, field) for field in SIZES}
    for field, size in chosen.items():
        if size < 0:
            raise ValueError(f"{name}: {field} must not be negative, got {size}")
    given = {field: {SIZES[field]: size} if size else {} for field, size in chosen.items()}
    own = config.every(MLPConfig, **given.pop("inner"))
    for field in given.values():
        own = own.every(AttentionConfig, **field)
    heads, kv_heads = own.near.num_attention_heads, own.near.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} heads are not a multiple of {kv_heads} kv_heads: choose both")
    rope, pairs, width = own.rope.scaling, own.near.rotary_dim // 2, own.near.head_dim
    if width % 2 or rope and (rope.rotated > pairs or len(rope.short_factor) not in (0, pairs)):
        raise ValueError(f"{name}: head_dim={width} does not fit the rope, which turns pairs of channels")
    return own


def sizes(config: Any) -> dict[str, int]:
    """The values of those fields in a config."""
    return {field: getattr(config.dense if field == "inner" else config.near, size) for field, size in SIZES.items()}
