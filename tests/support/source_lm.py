"""A model with an encoder that is a table: its next token depends on the last token, the place and the source."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.lm import BaseLM, Output


@dataclasses.dataclass(frozen=True)
class Reads(BaseLM):
    """A row's source is kept as tokens, and as one of `KINDS` numbers to which all of them contribute.

    Attributes:
      features: whether sources are features; their largest channel is then the token.
      copies: how much likelier a token is for each place of the source where it follows the last token.
    """

    vocab_size: int = 24
    features: bool = False
    copies: float = 4.0

    encodes = True
    source_features = property(lambda self: self.vocab_size if self.features else 0)

    def init_cache(self, batch, capacity, dtype=None):
        slots = 12 if self.features else capacity
        return {
            "kind": jnp.zeros((batch,), jnp.int32),
            "read": jnp.full((batch, slots), -1, jnp.int32),
            "text": jnp.zeros((batch, capacity), jnp.float32),
        }

    def encode(self, params, cache, source):
        ids = jnp.asarray(source.inputs) if source.is_tokens else jnp.argmax(source.inputs, axis=2)
        at = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        real = at < jnp.asarray(source.lengths)[:, None]
        kind = jnp.where(real, (ids + 1) * (at + 1), 0).sum(axis=1) % KINDS
        read = cache["read"].at[:, : ids.shape[1]].set(jnp.where(real, ids, -1))
        return {**cache, "kind": kind.astype(jnp.int32), "read": read}

    def source(self, cache):
        return None if self.features else cache["read"]

    def commit(self, cache, delta, src, dst, counts=None):
        return {**cache, "text": super().commit(cache["text"], delta, src, dst, counts)}

    def cache_axes(self, cache):
        return {"kind": ("batch",), "read": ("batch", "source"), "text": ("batch", "slots")}

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        last = jnp.maximum(block.tokens, 0)
        if not wants.head:
            return Output(block.tokens.astype(jnp.float32), final=self._final(cache, block) if wants.final else None)
        logits = self._logits(params, last, block.positions, cache["kind"], cache["read"])
        top = jax.lax.top_k(logits, wants.topk) if wants.topk else None
        return Output(
            block.tokens.astype(jnp.float32),
            logits=logits if wants.logits else None,
            topk=top,
            draw=draw(logits) if wants.draw else None,
            final=self._final(cache, block) if wants.final else None,
        )

    def _logits(self, params, last, positions, kind, read):
        after = jnp.pad(read, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
        follows = jax.nn.one_hot(after, self.vocab_size)[:, None] * (read[:, None] == last[:, :, None])[..., None]
        own = params["last"][last] + params["kind"][kind][:, None] + params["place"][positions % 4]
        return own + self.copies * follows.max(axis=2)

    def _final(self, cache, block):
        """All that `unembed` needs: the token, its position, and the source."""
        own = jnp.stack([jnp.maximum(block.tokens, 0), block.positions], axis=2)
        rest = jnp.concatenate([cache["kind"][:, None], cache["read"]], axis=1)
        rest = jnp.broadcast_to(rest[:, None], (*own.shape[:2], rest.shape[1]))
        return jnp.concatenate([own, rest], axis=2).astype(jnp.float32)

    def unembed(self, params, h):
        own = h.reshape(-1, h.shape[-1]).astype(jnp.int32)
        logits = self._logits(params, own[:, :1], own[:, 1:2], own[:, 2], own[:, 3:])
        return logits.reshape(*h.shape[:-1], self.vocab_size)


KINDS = 16


def reads_params(seed=0, lm=Reads()):
    """Random tables."""
    shapes = {"last": (lm.vocab_size, lm.vocab_size), "kind": (KINDS, lm.vocab_size), "place": (4, lm.vocab_size)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shapes[name]) for key, name in zip(keys, shapes, strict=True)}
