"""Rows of a kNN-LM: rounds of guessed tokens, which one retrieval checks.

In the shape descriptions `B` denotes rows, `V` the vocabulary, `E` the model width, `K` neighbours, `W` a prompt's width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants
from specjax.sampling.noise import gumbel, keys_of
from specjax.search.ralm.documents import answers
from specjax.search.stepwise import Asked
from specjax.settings import settled
from specjax.sharding.distributed import to_host

Array = jax.Array
ROOM = 64
"""Caches and prompts are as long as a multiple of this, so that few programs are compiled."""


@dataclasses.dataclass
class Lane:
    """One prompt's text.

    Attributes:
      text: its new tokens.
      known: entries that the row remembers, in the order in which it met them.
      failed: whether a score was not finite.
      passes: tokens that were read for it, those that were taken back included.
    """

    text: list[int] = dataclasses.field(default_factory=list)
    known: dict[int, None] = dataclasses.field(default_factory=dict)
    failed: bool = False
    passes: int = 0
    retrievals: int = 0
    guesses: int = 0
    matches: int = 0


@dataclasses.dataclass(frozen=True)
class Read:
    """One token that was read in some rows.

    Attributes:
      logits: `[B, V]` float32, on the device.
      hidden: `[B, E]` float32, on the host.
      length: by row, how many new tokens stood before the next one.
    """

    logits: Array
    hidden: np.ndarray
    length: dict[int, int]


class Rows:
    """Some prompts side by side.

    Every token is read alone, by one program. So a text that went back is computed again in the same way, and its bits are
    those of the plain loop.
    """

    def __init__(self, method: Any, model: Any, asked: Asked, temperature: float):
        self.method, self.model, self.asked = method, model, asked
        self.lanes = [Lane() for _ in asked.ids]
        self.keys = keys_of(jax.device_put(asked.keys))
        self.heats = jax.device_put(np.asarray([temperature, method.weight, method.heat], np.float32))
        width = -(-asked.longest // ROOM) * ROOM
        capacity = width + -(-asked.max_new_tokens // ROOM) * ROOM
        tokens = np.zeros((len(asked.ids), width), np.int32)
        for row, own in enumerate(asked.ids):
            tokens[row, : len(own)] = own
        counts = np.asarray([len(own) - 1 for own in asked.ids], np.int32)
        self.cache = _prefilled(model.lm, capacity, model.params, *jax.device_put((tokens, counts)))

    def run(self) -> list[Lane]:
        """Writes all texts to their end. The first check is of one token, so that rows know entries when they guess."""
        ahead = 1
        while any(not self._over(lane) for lane in self.lanes):
            self._round(ahead)
            ahead = self.method.ahead
        return self.lanes

    def _over(self, lane):
        ended = bool(lane.text) and lane.text[-1] in self.model.eos_ids
        return ended or lane.failed or len(lane.text) >= self.asked.max_new_tokens

    def _round(self, ahead):
        """Up to `ahead` tokens a row, all but the last guessed, and their check."""
        reads: list[Read] = []
        for number in range(ahead):
            rows = [row for row, lane in enumerate(self.lanes) if not self._over(lane)]
            if not rows:
                break
            reads.append(self._read(rows))
            if number < ahead - 1:
                near = {row: self._among(row, reads[-1].hidden[row]) for row in rows}
                for row, token in self._next(reads[-1], near).items():
                    self.lanes[row].text.append(token)
        self._check(reads)

    def _check(self, reads):
        """Keeps each row's text up to the first token that the retriever's neighbours do not give."""
        asked = [(number, row) for number, read in enumerate(reads) for row in read.length]
        queries = [reads[number].hidden[row] for number, row in asked]
        found = answers(self.method.retriever, queries, self.method.neighbours, len(self.method.entries.tokens))
        for row in reads[0].length:
            self.lanes[row].retrievals += 1
        near = {place: np.asarray(own[: self.method.neighbours]) for place, own in zip(asked, found, strict=True)}
        right = set(reads[0].length)
        for number, read in enumerate(reads):
            rows = [row for row in read.length if row in right]
            if not rows:
                break
            true = self._next(read, {row: near[number, row] for row in rows})
            for row in rows:
                self._learn(self.lanes[row], near[number, row])
                if not self._kept(self.lanes[row], read.length[row], true[row]):
                    right.discard(row)

    @staticmethod
    def _kept(lane, length, token):
        """Puts the true token at its place in a text; whether what was guessed after it stays."""
        guessed = len(lane.text) > length
        same = guessed and lane.text[length] == token
        lane.guesses += guessed
        lane.matches += same
        if not same:
            lane.text = lane.text[:length] + [token] * (token >= 0)
            lane.failed = token < 0
        return same

    def _learn(self, lane, ids):
        last = len(self.method.entries.tokens)
        for own in ids.tolist():
            lane.known |= dict.fromkeys(range(own, min(own + self.method.following + 1, last)))

    def _among(self, row, query):
        """The nearest of the entries that a row knows; of equal ones the smaller id is first."""
        ids = np.fromiter(self.lanes[row].known, np.int64)
        distances = self.method.entries.distances(query, ids)
        return ids[np.lexsort((ids, distances))[: self.method.neighbours]]

    def _read(self, rows):
        count = len(self.lanes)
        token, begin, live = (np.zeros(count, np.int32) for _ in range(3))
        for row, (lane, ids) in enumerate(zip(self.lanes, self.asked.ids, strict=True)):
            # a commit of no tokens may write beyond a row's length, so a row that is not read has its true place too
            token[row], begin[row], live[row] = (*ids, *lane.text)[-1], len(ids) + len(lane.text) - 1, row in rows
            lane.passes += row in rows
        given = jax.device_put((token, begin, live))
        self.cache, logits, hidden = _one(self.model.lm, self.model.params, self.cache, *given)
        return Read(logits, to_host(hidden), {row: len(self.lanes[row].text) for row in rows})

    def _next(self, read, near):
        """The next tokens by row, given their neighbours; -1 where a score is not finite."""
        form = len(self.lanes), self.method.neighbours
        distances, values = np.full(form, np.inf, np.float32), np.zeros(form, np.int32)
        place = np.zeros((len(self.lanes), 1), np.int32)
        for row, ids in near.items():
            distances[row, : len(ids)] = self.method.entries.distances(read.hidden[row], ids)
            values[row, : len(ids)] = self.method.entries.tokens[ids]
            place[row] = len(self.asked.ids[row]) + read.length[row]
        given = jax.device_put((distances, values, place))
        tokens = to_host(_mixed(read.logits, *given, self.keys, self.heats))
        return {row: int(tokens[row]) for row in near}


@functools.partial(jax.jit, static_argnums=(0, 1))
@settled
def _prefilled(lm, capacity: int, params, tokens: Array, counts: Array):
    """A cache with the first `counts` `[B]` of the tokens `[B, W]`."""
    batch, width = tokens.shape
    cache = lm.init_cache(batch, capacity, jax.tree.leaves(params)[0].dtype)
    begin = jnp.zeros(batch, jnp.int32)
    block = Block(tokens, jnp.broadcast_to(jnp.arange(width)[None], tokens.shape), begin)
    return lm.commit(cache, lm(params, block, cache, wants=Wants()).delta, None, begin, counts)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
@settled
def _one(lm, params, cache, token: Array, begin: Array, live: Array):
    """The cache with one more token in live rows, and `Read`'s logits and hidden states."""
    output = lm(params, Block(token[:, None], begin[:, None], begin), cache, wants=Wants(logits=True, final=True))
    cache = lm.commit(cache, output.delta, None, begin, live)
    return cache, output.logits[:, 0].astype(jnp.float32), output.final[:, 0].astype(jnp.float32)


@jax.jit
@settled
def _mixed(logits: Array, distances: Array, values: Array, place: Array, keys: Array, heats: Array) -> Array:
    """The next tokens `[B]` by the mixed distribution and the noise of their positions `[B, 1]`."""
    temperature, weight, heat = heats
    near = jax.nn.softmax(-distances / heat, axis=1)
    scattered = jnp.zeros_like(logits).at[jnp.arange(len(logits))[:, None], values].add(near)
    model = jax.nn.log_softmax(logits, axis=1)
    mixed = jnp.logaddexp(jnp.log1p(-weight) + model, jnp.log(weight) + jnp.log(scattered))

    def drawn():
        return mixed / temperature + gumbel(keys, place, logits.shape[1])[:, 0]

    scores = jax.lax.cond(temperature > 0, drawn, lambda: mixed)
    return jnp.where(jnp.isfinite(logits).any(axis=1), jnp.argmax(scores, axis=1), -1)
