"""Log-probabilities of continuations: what a model gives every token of a text that follows a prompt. Nothing is decoded.

Shapes: `B` rows, `W` buffer columns, `C` columns of a chunk, `V` vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from specjax.lm import LM, Block, Wants
from specjax.pretty import short
from specjax.serve.engine import Engine
from specjax.serve.text import check_unicode, encode_text
from specjax.sharding.ambient import on_mesh
from specjax.sharding.distributed import to_devices, to_host
from specjax.sharding.rules import constrain, partition, rounded

Array = jax.Array

CHUNK = 64
"""Columns read at a time: the logits of so many are all that there ever are."""
WINDOW = 64
"""Batches whose texts are sorted by length together; results come out after every window."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt and a continuation to score.

    Attributes:
      prompt: as given.
      continuation: as given.
      ids: token ids of both, one after the other.
      first: where those of the continuation begin, at least 1.
      id: the caller's name for it, or None.
      line: where it came from in an input file (from 1), or None.
    """

    prompt: Any
    continuation: Any
    ids: tuple[int, ...]
    first: int
    id: str | None = None
    line: int | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model gives a continuation; the fields are those of the JSON output.

    Attributes:
      prompt: as given.
      continuation: as given.
      logprob: natural logarithm of the continuation's probability after the prompt; None where `error` says why.
      logprobs: of every token of it, under the model's own softmax.
      tokens: its token ids.
      greedy: whether every one of them is the likeliest, so that greedy decoding would write it.
      id: the caller's name for it, or None.
      line: its line in the input file, or None.
      error: what went wrong, or None.
    """

    prompt: Any
    continuation: Any
    logprob: float | None
    logprobs: list[float]
    tokens: list[int]
    greedy: bool
    id: str | None = None
    line: int | None = None
    error: str | None = None

    def __repr__(self) -> str:
        about = self.error or f"logprob {self.logprob:.4f} of {len(self.tokens)} tokens"
        return f"Score({short(self.prompt, 40)} -> {short(self.continuation, 40)}, {about})"

    def to_json(self) -> dict[str, Any]:
        """The score as a JSON object; `id`, `line` and `error` are left out where they are None."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None or k not in ("id", "line", "error")}

    @classmethod
    def failed(
        cls, prompt: Any, continuation: Any, error: str, id: str | None = None, line: int | None = None
    ) -> "Score":
        """The score of a pair that was never read."""
        return cls(prompt, continuation, None, [], [], False, id=id, line=line, error=error)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The program: teacher-forced log-probabilities of rows, chunk by chunk through a cache. Static and hashable.

    Attributes:
      lm: the model.
      mesh: where parameters and rows lie, or None.
    """

    lm: LM
    mesh: jax.sharding.Mesh | None

    @on_mesh
    def __call__(self, params: Any, tokens: Array, first: Array, length: Array) -> tuple[Array, Array]:
        """What the model gives tokens `first` to `length - 1` of every row.

        Args:
          params: the model's.
          tokens: `[B, W + 1]` int32, right-padded with -1; W is a multiple of `CHUNK`.
          first: `[B]` int32, at least 1; W + 1 for a row with nothing to score.
          length: `[B]` int32, tokens of a row.

        Returns:
          Log-probabilities `[B, W]` float32, column j of token j + 1, and whether that token is the likeliest; other columns
          hold anything.
        """
        rows, width = tokens.shape[0], tokens.shape[1] - 1
        dtype = jax.tree.leaves(params)[0].dtype
        cache = self.lm.init_cache(rows, rounded(self.mesh, "slots", width), dtype)

        def read(i, cache, wants):
            start = i * CHUNK
            part = jax.lax.dynamic_slice_in_dim(tokens, start, CHUNK, 1)
            positions = jnp.broadcast_to(start + jnp.arange(CHUNK, dtype=jnp.int32)[None], part.shape)
            begin = jnp.full((rows,), start, jnp.int32)
            output = self.lm(params, Block(part, positions, begin), cache, wants=wants)
            cache = self.lm.commit(cache, output.delta, None, begin)
            return constrain(self.mesh, self.lm.cache_axes(cache), cache), output.logits

        def score(i, carry):
            cache, found, likeliest = carry
            cache, logits = read(i, cache, Wants(logits=True))
            after = jax.lax.dynamic_slice_in_dim(tokens, i * CHUNK + 1, CHUNK, 1)
            own = jnp.take_along_axis(logits, jnp.maximum(after, 0)[:, :, None], axis=2)[:, :, 0]
            own = own - jax.nn.logsumexp(logits, axis=2)
            write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, i * CHUNK, 1)
            return cache, write(found, own), write(likeliest, jnp.argmax(logits, axis=2) == after)

        scored, end = (jnp.min(first) - 1) // CHUNK, -(-(jnp.max(length) - 1) // CHUNK)
        cache = jax.lax.fori_loop(0, scored, lambda i, cache: read(i, cache, Wants())[0], cache)  # prompts only
        empty = jnp.zeros((rows, width), jnp.float32), jnp.zeros((rows, width), bool)
        return jax.lax.fori_loop(scored, end, score, (cache, *empty))[1:]


score_program = jax.jit(Reading.__call__, static_argnums=0)
"""`Reading`, compiled once for a model, a mesh, a number of rows and a width."""


class Scorer:
    """Scores pairs with the model of an engine.

    Args:
      engine: of an autoregressive model; its drafter and verifier do not matter.

    Raises:
      ValueError: for a diffusion model.
    """

    def __init__(self, engine: Engine):
        if engine.model.masked:
            raise ValueError(
                f"{engine.model.name} is a diffusion model, which gives a text no log-probabilities token by token: score "
                "with an autoregressive model"
            )
        self.engine = engine
        self.reading = Reading(engine.model.lm, engine.mesh)

    def pair(self, prompt: Any, continuation: Any, *, id: str | None = None, line: int | None = None) -> Pair:
        """A checked pair; see `encode_pair`.

        Raises:
          ValueError: on a prompt or continuation that cannot be used, or that do not fit into the model together.
        """
        before, after = encode_pair(self.engine, prompt, continuation)
        total, most = len(before) + len(after), self.engine.max_length
        if total > most:
            raise ValueError(
                f"{len(before)} tokens of prompt and {len(after)} of continuation are more than the {most} positions of "
                f"{self.engine.model.name}: leave out the beginning of the prompt, or score the continuation in parts"
            )
        return Pair(prompt, continuation, before + after, len(before), id, line)

    def run(self, pairs: Sequence[Pair], *, batch_size: int = 8) -> Iterator[Score]:
        """Scores in the order of the pairs. They depend on the batch by rounding alone.

        Args:
          pairs: from `pair`.
          batch_size: rows read together; fewer where there are fewer pairs.
        """
        rows = rounded(self.engine.mesh, "batch", min(batch_size, _power_of_two(len(pairs))))
        for start in range(0, len(pairs), WINDOW * rows):
            window = pairs[start : start + WINDOW * rows]
            order = sorted(range(len(window)), key=lambda i: -len(window[i].ids))  # rows of a batch have like lengths
            found: dict[int, Score] = {}
            for at in range(0, len(order), rows):
                some = order[at : at + rows]
                found.update(zip(some, self._batch([window[i] for i in some], rows), strict=True))
            yield from (found[i] for i in range(len(window)))

    def _batch(self, pairs: list[Pair], rows: int) -> list[Score]:
        width = max(CHUNK, _power_of_two(max(len(pair.ids) for pair in pairs) - 1))
        tokens = np.full((rows, width + 1), -1, np.int32)
        first, length = np.full(rows, width + 1, np.int32), np.zeros(rows, np.int32)
        for row, pair in enumerate(pairs):
            tokens[row, : len(pair.ids)] = pair.ids
            first[row], length[row] = pair.first, len(pair.ids)
        arrays = (self._placed(x) for x in (tokens, first, length))
        logprobs, likeliest = to_host(score_program(self.reading, self.engine.params["target"], *arrays))
        return [_score(pair, logprobs[row], likeliest[row]) for row, pair in enumerate(pairs)]

    def _placed(self, x: np.ndarray) -> Array:
        mesh = self.engine.mesh
        if mesh is None:
            return jnp.asarray(x)
        axes = ("batch", *[None] * (x.ndim - 1))
        return to_devices(x, NamedSharding(mesh, partition(mesh, axes, x.shape, {})))


def _score(pair: Pair, logprobs: np.ndarray, likeliest: np.ndarray) -> Score:
    own = slice(pair.first - 1, len(pair.ids) - 1)
    each = [float(x) for x in logprobs[own]]
    return Score(
        pair.prompt,
        pair.continuation,
        math.fsum(each),
        each,
        list(pair.ids[pair.first :]),
        bool(likeliest[own].all()),
        id=pair.id,
        line=pair.line,
    )


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def encode_pair(engine: Engine, prompt: Any, continuation: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a prompt and of what follows it.

    White space at the end of a prompt that is text is read as the continuation's beginning, as lm-evaluation-harness does
    (`_encode_pair`), since tokens hold a word with the space before it. The continuation's tokens are then those that the two
    texts together have beyond the prompt's. Where they do not begin with the prompt's, because a token reaches across the
    border, and where only the continuation is text, it is tokenised on its own, without special tokens. An empty prompt is the
    model's BOS.

    Args:
      engine: whose tokenizer and vocabulary.
      prompt: text, token ids or chat messages; see `Engine.encode`.
      continuation: text or token ids.

    Returns:
      The prompt's ids and the continuation's, neither empty.

    Raises:
      ValueError: on what `Engine.encode` refuses; on an empty prompt without a BOS; on an empty continuation.
    """
    listed = (list, tuple, np.ndarray)
    if not isinstance(continuation, (str, *listed)) or len(continuation) and isinstance(continuation[0], Mapping):
        raise ValueError(f"a continuation is a string or a list of token ids, not {continuation!r:.60}")
    if not len(continuation):
        raise ValueError("the continuation is empty: give at least one token")
    tokenizer, name = engine.model.tokenizer, engine.model.name
    whole: list[int] = []
    if isinstance(prompt, str) and isinstance(continuation, str) and tokenizer is not None:
        check_unicode(continuation, "continuation")
        kept = prompt.rstrip()
        prompt, continuation = kept, prompt[len(kept) :] + continuation
        whole = encode_text(tokenizer, kept + continuation, name)
    if isinstance(prompt, (str, *listed)) and not len(prompt):
        prompt = [_bos(engine)]
    before = engine.encode(prompt)
    if whole and tuple(whole[: len(before)]) == before:
        return before, engine.encode(whole[len(before) :], "continuation")
    after: Any = continuation
    if isinstance(continuation, str) and tokenizer is not None:
        check_unicode(continuation, "continuation")
        after = tokenizer(continuation, add_special_tokens=False, verbose=False)["input_ids"]
    return before, engine.encode(after, "continuation")


def _bos(engine: Engine) -> int:
    bos = getattr(engine.model.tokenizer, "bos_token_id", None)
    if bos is None:
        raise ValueError(
            f"the prompt is empty, and {engine.model.name} has no BOS token to begin with: give as prompt the token that its "
            "texts begin with, such as the id of its EOS"
        )
    return bos


def score(
    model: Any = None,
    prompts: Any = None,
    continuations: Any = None,
    *,
    batch_size: int = 8,
    dtype: Any = None,
    mesh: Any = None,
) -> list[Score]:
    """What a model gives continuations of prompts: a score for each, in order.

    Texts of like lengths share a compiled program; scores depend on batch and mesh by rounding alone. How texts become tokens
    at the border between the two: `encode_pair`.

    Args:
      model: an autoregressive model, as for `specjax.generate`.
      prompts: texts, lists of token ids or chats, as many as continuations; or one, which all continuations follow.
      continuations: texts or lists of token ids; or one of them, for one prompt.
      batch_size: rows read together.
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere.
      mesh: a mesh, or a line such as `"data=2,model=4"`.

    Raises:
      ValueError: one line that says what cannot be used, before anything is read; of a pair it says which (from 1).

    >>> import specjax
    >>> near, far = specjax.score(None, "def add(a, b):\\n    return a +", [" b", " zebra"])
    >>> near.logprob > far.logprob
    True
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    asked = pair_up(prompts, continuations)
    scorer = Scorer(Engine(model, dtype=dtype, mesh=mesh))
    pairs = []
    for number, (prompt, continuation) in enumerate(asked, start=1):
        try:
            pairs.append(scorer.pair(prompt, continuation))
        except ValueError as error:
            raise ValueError(f"pair {number} of {len(asked)}: {error}") from error
    return list(scorer.run(pairs, batch_size=batch_size))


def pair_up(prompts: Any, continuations: Any) -> list[tuple[Any, Any]]:
    """Prompts and continuations, side by side; one prompt goes with every continuation.

    Raises:
      ValueError: where one of them is no list, or their numbers differ.
    """
    before, alone = _listed(prompts, "prompts")
    after, _ = _listed(continuations, "continuations")
    if alone:
        before *= len(after)
    if len(before) != len(after):
        raise ValueError(
            f"there are {len(before)} prompts and {len(after)} continuations: give a continuation for every prompt, or one "
            "prompt for all"
        )
    return list(zip(before, after, strict=True))


def _listed(given: Any, what: str) -> tuple[list[Any], bool]:
    """What was given as a list, and whether it was just one."""
    if isinstance(given, str):
        return [given], True
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ValueError(f"{what} are a list of texts or of lists of token ids, not {given!r:.60}")
    items = list(given)
    one = bool(items) and isinstance(items[0], (int, np.integer, Mapping))  # ids, or the messages of a chat
    return ([items], True) if one else (items, False)
