"""The contract of a cache policy of an autoregressive model, which decides how older tokens are kept.

The newest tokens are kept exactly, in a ring. A prompt is read whole, and its older tokens are then folded into a
layer's body. After that the oldest tokens of the ring are folded, a chunk at a time. The policy defines the body, and
queries see it together with the ring. In the shape descriptions `B` denotes rows, `K`
kv-heads, `G` query heads of each, `H` their width, `R` slots of a ring, `C` those of a body, `g` tokens of a chunk, `W`
queries of a window.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.about import Named
from specjax.arrays import Array, Bool, Float, Int
from specjax.kernels.kv_commit import kv_commit
from specjax.models.kv import KVDelta, Slots
from specjax.pretty import Pretty

_ENDLESS = 2**31 - 1  # positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer(Pretty):
    """The data of one layer for a fold.

    Attributes:
      key: `[B, K, g, H]`, of the chunk.
      value: as `key`.
      ring: `[B, K, R, H]`, keys of all newest tokens, including the chunk.
      ring_value: as `ring`, their values.
      query: `[B, K, W, G, H]`, scaled queries of the newest tokens of the ring.
      seen: `[B, W, R]` bool, the ring slots that these queries saw.
      fresh: `[B, W]` bool, the queries that no earlier fold was given.
      positions: `[B, g]` int32, of the chunk; they follow the last chunk's.
    """

    key: Float[Array, "B K g H"]
    value: Array
    ring: Float[Array, "B K R H"]
    ring_value: Array
    query: Float[Array, "B K W G H"]
    seen: Bool[Array, "B W R"]
    fresh: Bool[Array, "B W"]
    positions: Int[Array, "B g"]

    def attention(self, body: Array, used: Array) -> Array:
        """The attention of the window's queries to the slots of a body `[B, K, C, H]` and to the chunk.

        It is computed from plain scores, without a layer's sinks and soft cap.

        Args:
          body: keys.
          used: `[B, C]` bool, the slots in use.

        Returns:
          `[B, K, W, C + g]` float32, the mean over the query heads that share keys.
        """
        keys = jnp.concatenate([body, self.ring], axis=2)
        used = jnp.broadcast_to(used[:, None], (*self.seen.shape[:2], used.shape[1]))
        weights = attention(self.query, keys, jnp.concatenate([used, self.seen], axis=2))
        slots = body.shape[2] + self.positions % self.ring.shape[2]
        chunk = jnp.take_along_axis(weights, slots[:, None, None], axis=3)
        return jnp.concatenate([weights[..., : body.shape[2]], chunk], axis=3)

    def given(self, weights: Array) -> Array:
        """What the attention `[B, K, W, C + g]` of the window's queries adds to what slots have received, `[B, K, C + g]`.

        The slots of a body were given what earlier folds saw, so only `fresh` queries count for them. No fold has counted
        anything for the chunk, so all do.
        """
        own = weights.shape[3] - self.positions.shape[1]
        body = jnp.einsum("bkws,bw->bks", weights[..., :own], self.fresh.astype(jnp.float32))
        return jnp.concatenate([body, weights[..., own:].sum(axis=2)], axis=2)


def attention(query: Array, key: Array, seen: Array) -> Array:
    """The weights `[B, K, W, S]` of queries `[B, K, W, G, H]`, scaled, over keys `[B, K, S, H]`: means over `G`, float32.

    `seen` `[B, W, S]` says which keys a query sees.
    """
    scores = jnp.einsum("bkwgh,bksh->bkwgs", query, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(seen[:, None, :, None], scores, -1e30), axis=-1).mean(axis=3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole(Pretty):
    """One layer's part of prompts that were read, in slots by position.

    Attributes:
      key: `[B, K, S, H]`.
      value: as `key`.
      every: `[B, K, S]` float32, the attention that a slot received from all queries of the prompt, summed; a mean over
        the query heads that share keys. None if the policy uses no queries.
      last: `[B, K, S]` float32, the mean over the last W queries; None as `every`.
      query: `[B, K, W, G, H]`, these queries, scaled; None as `every`.
      asking: `[B, W]` int32, their positions; negative where the prompt was shorter.
    """

    key: Float[Array, "B K S H"]
    value: Array
    every: Float[Array, "B K S"] | None = None
    last: Float[Array, "B K S"] | None = None
    query: Float[Array, "B K W G H"] | None = None
    asking: Int[Array, "B W"] | None = None


@dataclasses.dataclass(frozen=True)
class Old(abc.ABC):
    """A policy for older tokens of a cache. Implementations are frozen dataclasses.

    Attributes:
      recent: the least number of newest tokens that are exact.
      chunk: g, how many tokens are folded at a time.
    """

    about: ClassVar[Named] = None
    """Its names in the registry."""
    recent: int = 32
    chunk: int = 32

    @property
    def asks(self) -> int:
        """W, the number of tokens whose queries are kept for `fold`; 0: none."""
        return 0

    def check(self, config: Any) -> None:
        """Raises ValueError if the policy cannot be that of a model with this `ModelConfig`; most can be any's."""
        return

    @abc.abstractmethod
    def init(self, config: Any, layer: int, batch: int, capacity: int, dtype: Any) -> Any:
        """An empty body; every leaf leads with `[B, K]`, or is `[B, C]` and shared by all heads.

        Args:
          config: a `ModelConfig`.
          layer: one of its layers.
          batch: B.
          capacity: how many positions a row may have.
          dtype: of keys and values.
        """

    @abc.abstractmethod
    def begin(
        self, bodies: tuple[Any, ...], prompts: tuple[Whole, ...], folded: Array, lengths: Array
    ) -> tuple[Any, ...]:
        """The bodies of all layers after prompts were read.

        Args:
          bodies: empty ones, of the layers with their own keys.
          prompts: what was read of these layers.
          folded: `[B]` int32, the tokens that come into the bodies, the first of every row; multiples of g.
          lengths: `[B]` int32, all tokens that were read.
        """

    @abc.abstractmethod
    def fold(self, bodies: tuple[Any, ...], layers: tuple[Layer, ...], folded: Array) -> tuple[Any, ...]:
        """The bodies of all layers with one more chunk.

        Args:
          bodies: of the layers with their own keys.
          layers: the data of these layers.
          folded: `[B]` int32, tokens already in the bodies; multiples of g.
        """

    @abc.abstractmethod
    def read(self, body: Any, folded: Array) -> tuple[Array, Array, Array]:
        """Keys and values `[B, K, C, H]` of a body, and which of them queries see, `[B, C]` bool."""

    def attend(self, body: Any) -> Any:
        """How queries attend to a body and the ring, as `tree_attention` takes an implementation; None: as the model does."""
        return None


def kept_layers(config: Any) -> list[int]:
    """The layers of a `ModelConfig` whose older tokens a policy keeps: those with keys of their own and no window."""
    return [i for i in config.owners if config.window(i) is None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring(Pretty):
    """The newest tokens; position p is in slot p mod R.

    Attributes:
      key: `[B, K, R, H]`.
      value: as `key`.
      query: `[B, K, R, G * H]`; None if the policy uses no queries.
    """

    key: Float[Array, "B K R H"]
    value: Array
    query: Float[Array, "B K R G*H"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OldCache(Pretty):
    """The cache of a model with a policy, for the layers with their own keys and values.

    A commit folds only tokens before its own first position: these are committed, while later ones may be rejected. So
    no rejected token is ever folded. When a token is folded depends on where steps begin.

    Attributes:
      rings: a tuple over layers.
      bodies: a tuple over layers, the policy's bodies; None for a layer with a window, whose ring holds all that it sees.
      folded: `[B]` int32; positions below it are in the bodies.
      asked: `[B]` int32; queries below it were given to the policy.
      policy: static.
      ahead: static, how many positions a commit may write.
    """

    rings: tuple[Ring, ...]
    bodies: tuple[Any | None, ...]
    folded: Int[Array, " B"]
    asked: Int[Array, " B"]
    policy: Any = dataclasses.field(metadata={"static": True})
    ahead: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, policy: Old, config: Any, batch: int, capacity: int, dtype: Any, ahead: int | None) -> "OldCache":
        """An empty cache.

        Args:
          policy: the policy.
          config: a `ModelConfig`.
          batch: B.
          capacity: how many positions a row may have.
          dtype: of keys and values.
          ahead: how many positions a commit may write.

        Raises:
          ValueError: if `ahead` is None.
        """
        if ahead is None:
            raise ValueError(
                f"the cache {type(policy).__name__} forgets, and this way of decoding goes back in a text or keeps several: "
                "leave the cache out, or decode with specjax.speculative(...).with_rings(), whose rows never go back"
            )
        owners = [i for i in range(config.num_hidden_layers) if config.source(i) == i]
        windows = [config.window(i) for i in owners]
        slots = max([policy.recent + policy.chunk, *(one for one in windows if one is not None)]) + ahead
        rings = []
        for kind in map(config.attention, owners):
            heads, width = kind.num_key_value_heads, kind.head_dim
            zeros = lambda size, heads=heads: jnp.zeros((batch, heads, slots, size), dtype)
            asked = kind.num_attention_heads // heads * width
            rings.append(
                Ring(zeros(width), zeros(width), zeros(asked) if policy.asks and kind.window is None else None)
            )
        fresh = lambda i: policy.init(config, i, batch, capacity, dtype)
        bodies = tuple(fresh(i) if own is None else None for i, own in zip(owners, windows, strict=True))
        none = lambda: jnp.zeros((batch,), jnp.int32)
        return cls(tuple(rings), bodies, none(), none(), policy, ahead)

    def layer(self, index: int, length: Array) -> Slots:
        """The slots of a layer seen by queries after `length` `[B]` tokens."""
        ring, body, asks = self.rings[index], self.bodies[index], self.policy.asks > 0
        held = held_after(ring.key.shape[2], length)
        if body is None:
            return Slots(ring.key, ring.value, held, asks=asks)
        key, value, seen = self.policy.read(body, self.folded)
        seen = jnp.concatenate([seen, held >= self.folded[:, None]], axis=1)
        laid = jnp.concatenate([key, ring.key], axis=2), jnp.concatenate([value, ring.value], axis=2)
        return Slots(*laid, unseen=~seen, asks=asks, attend=self.policy.attend(body))

    def commit(self, delta: KVDelta, src: Array | None, dst: Array) -> "OldCache":
        """See `specjax.lm.LM.commit`; for runs only.

        Raises:
          ValueError: if more is written than there is room for, or if slots are named.
        """
        count = (delta.positions if src is None else src).shape[1]
        if dst.ndim != 1 or count > self.ahead:
            raise ValueError(f"a cache that forgets is written in runs of {self.ahead} tokens at most, not {count}")
        cache = self.begun(dst)
        old, structure = jax.tree.flatten([(ring.key, ring.value, ring.query) for ring in cache.rings])
        news = zip(delta.key, delta.value, delta.query or [None] * len(delta.key), strict=True)
        flat = lambda q, ring: None if ring.query is None else q.reshape(*q.shape[:3], -1)
        new = jax.tree.leaves([(k, v, flat(q, ring)) for (k, v, q), ring in zip(news, cache.rings, strict=True)])
        rings = jax.tree.unflatten(structure, kv_commit(old, new, src, dst, positions=_ENDLESS))
        return dataclasses.replace(cache, rings=tuple(Ring(*ring) for ring in rings))

    def axes(self) -> "OldCache":
        """Logical axis names of every leaf: rows and heads are split."""
        name = lambda x: ("batch", "kv_heads" if x.ndim > 2 else None, *[None] * x.ndim)[: x.ndim]
        return jax.tree.map(name, self)

    def begun(self, length: Array) -> "OldCache":
        """The cache with all chunks folded that leave `recent` tokens before `length` `[B]`, where a step begins."""
        policy, slots = self.policy, self.rings[0].key.shape[2]
        due = lambda folded: length - folded >= policy.recent + policy.chunk
        held = held_after(slots, length)

        def fold(carry):
            bodies, folded, asked = carry
            positions = folded[:, None] + jnp.arange(policy.chunk)[None]
            asking = folded[:, None] + policy.recent + policy.chunk - policy.asks + jnp.arange(policy.asks)[None]
            seen = (held[:, None] <= asking[:, :, None]) & (held >= folded[:, None])[:, None]
            layers = []
            for ring in (ring for ring, body in zip(self.rings, bodies, strict=True) if body is not None):
                take = lambda x, at: jnp.take_along_axis(x, (at % slots)[:, None, :, None], axis=2)
                width = ring.key.shape[3]
                query = ring.key if ring.query is None else ring.query  # of no tokens if the policy uses none
                query = take(query, asking).reshape(*query.shape[:2], policy.asks, query.shape[3] // width, width)
                chunk = take(ring.key, positions), take(ring.value, positions)
                layers.append(Layer(*chunk, ring.key, ring.value, query, seen, asking >= asked[:, None], positions))
            full = policy.fold(tuple(body for body in bodies if body is not None), tuple(layers), folded)
            left = iter(full)
            new = tuple(None if body is None else next(left) for body in bodies)
            chosen = lambda old, new: jnp.where(due(folded).reshape(-1, *[1] * (old.ndim - 1)), new, old)
            after = folded + jnp.where(due(folded), policy.chunk, 0)
            asked = jnp.where(due(folded), jnp.maximum(asked, after + policy.recent), asked)
            return jax.tree.map(chosen, bodies, new), after, asked

        carry = self.bodies, self.folded, self.asked
        bodies, folded, asked = jax.lax.while_loop(lambda carry: jnp.any(due(carry[1])), fold, carry)
        return dataclasses.replace(self, bodies=bodies, folded=folded, asked=asked)


def held_after(slots: int, length: Array) -> Array:
    """The positions `[B, R]` that a ring holds after `length` `[B]` tokens; negative for empty slots."""
    last = length[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots
