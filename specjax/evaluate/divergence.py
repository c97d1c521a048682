"""How far models are from a first one, token by token, along the texts that the first one wrote.

Texts are read as plain decoding would have written them: prompts as the decoder prefills them, then a token per pass
through the decoder's own cache. So a cache in few bits, or one that forgets, counts as it does while a model answers.

In the shape descriptions `B` denotes rows, `W` the most tokens of a text, `V` the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import Decode, Plain, Speculate
from specjax.lm import LM, Block, Wants
from specjax.objectives.losses import ForwardKL
from specjax.serve.engine import Engine
from specjax.serve.request import Request, needs_of
from specjax.serve.slots import Slots
from specjax.settings import settled
from specjax.sharding.ambient import on_mesh
from specjax.sharding.distributed import to_host
from specjax.sharding.rules import constrain
from specjax.speculative import Speculative

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Text:
    """A text that the first model wrote.

    Attributes:
      request: its request.
      tokens: the ids of the text, the end token included.
    """

    request: Request
    tokens: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Follower:
    """A pass over the next given token of every row. Static and hashable.

    Attributes:
      lm: the model, with the cache of its decoder.
      mesh: the mesh that holds parameters and rows, or None.
    """

    lm: LM
    mesh: jax.sharding.Mesh | None

    @settled
    @on_mesh
    def __call__(
        self, params: Any, cache: Any, tokens: Array, begin: Array, count: Array, step: Array
    ) -> tuple[Any, Array]:
        """The cache after one more token, and the logits `[B, V]` of the token after it.

        Args:
          params: the model's.
          cache: holds all that was read before.
          tokens: `[B, W]` int32, a prompt's last token and the text without its last.
          begin: `[B]` int32, the position of the first of them.
          count: `[B]` int32, how many a row has; a row that has no more reads its last one again.
          step: int32, which of them is read.
        """
        own = jnp.clip(step, 0, jnp.maximum(count - 1, 0))
        position = begin + own
        block = Block(jnp.take_along_axis(tokens, own[:, None], axis=1), position[:, None], position)
        output = self.lm(params, block, cache, wants=Wants(logits=True))
        real = (step < count).astype(jnp.int32)
        cache = self.lm.commit(cache, output.delta, None, position, real)
        return constrain(self.mesh, self.lm.cache_axes(cache), cache), output.logits[:, 0]


_follow = jax.jit(Follower.__call__, static_argnums=0, donate_argnums=2)


@jax.jit
@settled
def _added(total: Array, whole: Array, own: Array, count: Array, step: Array) -> Array:
    """Sums `[B]` with the divergence of one more token, of rows that have one."""
    return total + jnp.where(step < count, ForwardKL().positions(whole, own), 0.0)


def check_way(way: Decode | None, name: str) -> None:
    """Raises ValueError if a way to decode has no next-token distributions along a given text; None is a model's usual way.

    Args:
      way: from `specjax.decode`.
      name: what the error calls it.
    """
    if way is not None and not isinstance(way, (Speculate, Plain)):
        raise ValueError(
            f"{name} decodes by {type(way).__name__}, and divergence by token is of plain and speculative decoding: leave "
            "trust out, or decode with a drafter or plainly"
        )


def check(engines: Sequence[Engine], names: Sequence[str]) -> None:
    """Raises ValueError, with one line, if models cannot be compared with the first along its texts.

    Args:
      engines: the first and others.
      names: what errors call them.
    """
    first = engines[0]
    for engine, name in zip(engines, names, strict=True):
        check_way(engine.decode, name)
        if engine.model.lm.vocab_size != first.model.lm.vocab_size:
            raise ValueError(
                f"{name} has {engine.model.lm.vocab_size} tokens and {names[0]} {first.model.lm.vocab_size}: divergence is "
                "between models of one vocabulary, so leave trust out, or this model"
            )
        if engine.mesh != first.mesh:
            raise ValueError(f"{name} is on another mesh than {names[0]}: for trust, put all models on one")


def divergences(
    engines: Sequence[Engine],
    texts: Sequence[Text],
    *,
    keys: np.ndarray,
    capacity: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> np.ndarray:
    """The divergence of every other model's next-token distributions from the first's, summed over each text.

    Args:
      engines: the first and others; see `check`.
      texts: what the first wrote.
      keys: key data of the texts' requests.
      capacity: text buffer slots of a row.
      batch_size: rows read together.
      advance: called with the number of texts that were read.

    Returns:
      `[engines - 1, texts]` float64: KL(first, other) in nats, summed over the tokens of a text.
    """
    found = np.zeros((len(engines) - 1, len(texts)))
    form = needs_of(text.request for text in texts).form
    slots = [Slots(engine.served(), batch_size, capacity, form) for engine in engines]
    width = max((len(text.tokens) for text in texts), default=0)
    for at in range(0, len(texts), batch_size):
        part = texts[at : at + batch_size]
        found[:, at : at + len(part)] = _read(slots, part, keys[at : at + batch_size], width)[:, : len(part)]
        advance(len(part))
    return found


def _read(slots: Sequence[Slots], texts: Sequence[Text], keys: np.ndarray, width: int) -> np.ndarray:
    """The sums of some texts, `[engines - 1, B]`."""
    rows = slots[0].rows
    requests = [text.request for text in texts]
    caches = [own.insert(own.empty(), range(len(texts)), requests, keys).cache for own in slots]
    tokens, begin, count = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    given = slots[0].served.given
    for row, text in enumerate(texts):
        prompt = given(text.request)
        begin[row], count[row] = len(prompt) - 1, len(text.tokens)
        ids = (prompt[-1], *text.tokens[:-1])[: len(text.tokens)]
        tokens[row, : len(ids)] = ids
    tokens, begin, count = jax.device_put((tokens, begin, count))
    targets = [cast(Speculative, own.served.decoder).target for own in slots]
    followers = [Follower(target, own.served.mesh) for target, own in zip(targets, slots, strict=True)]
    totals = [jnp.zeros((rows,), jnp.float32) for _ in slots[1:]]
    for step in jax.device_put(list(np.arange(max((len(text.tokens) for text in texts), default=0), dtype=np.int32))):
        read = [
            _follow(follower, own.served.params["target"], cache, tokens, begin, count, step)
            for follower, own, cache in zip(followers, slots, caches, strict=True)
        ]
        caches, (whole, *others) = [cache for cache, _ in read], [logits for _, logits in read]
        totals = [_added(total, whole, own, count, step) for total, own in zip(totals, others, strict=True)]
    sums = np.asarray(to_host(totals), np.float64).reshape(len(totals), rows)
    return np.maximum(sums, 0.0)  # a divergence is never negative; the rounding of equal distributions may be
