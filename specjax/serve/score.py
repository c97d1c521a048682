"""Log-probabilities of every token of texts that continue prompts. Nothing is decoded."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specjax.lm import encodes
from specjax.models.text import check_unicode, encode_text, source_of
from specjax.models.token_ids import is_array, is_encoding, one, several, shown
from specjax.pretty import short
from specjax.serve.text_reader import Found, Reader

_RARE = ("id", "line", "error", "standard_error")


class Reads(Protocol):
    """The part of a `specjax.Engine` that scoring needs."""

    model: Any

    @property
    def max_length(self) -> int: ...

    def reader(self) -> Reader: ...

    def encode(self, prompt: Any, what: str = "prompt") -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt and a continuation to score.

    Attributes:
      prompt: as given.
      continuation: as given.
      ids: the token ids of both, concatenated; of a model with an encoder, `Model.starts` and the continuation's.
      first: the index of the continuation's first token, at least 1.
      id: the caller's name for it, or None.
      line: where it came from in an input file (from 1), or None.
      source: what a model's encoder reads of the prompt; None without an encoder. Not compared.
    """

    prompt: Any
    continuation: Any
    ids: tuple[int, ...]
    first: int
    id: str | int | None = None
    line: int | None = None
    source: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Score:
    """The log-probability of a continuation under a model. The fields are those of the JSON output.

    Attributes:
      prompt: as given.
      continuation: as given.
      logprob: the natural logarithm of the continuation's probability after the prompt; None if there is an `error`.
      logprobs: of each of its tokens, under the model's own softmax.
      tokens: its token ids.
      greedy: whether each token is the likeliest, so that greedy decoding without penalties would write it.
      id: the caller's name for it, or None.
      line: its line in the input file, or None.
      error: what went wrong, or None.
      standard_error: of a diffusion model's bound (`specjax.serve.masked_scores`); None for a model that reads from left to
        right.
    """

    prompt: Any
    continuation: Any
    logprob: float | None
    logprobs: list[float]
    tokens: list[int]
    greedy: bool
    id: str | int | None = None
    line: int | None = None
    error: str | None = None
    standard_error: float | None = None

    def __repr__(self) -> str:
        about = self.error or f"logprob {self.logprob:.4f} of {len(self.tokens)} tokens"
        return f"Score({short(self.prompt, 40)} -> {short(self.continuation, 40)}, {about})"

    def to_json(self) -> dict[str, Any]:
        """The score as a JSON object, without `id`, `line`, `error` and `standard_error` if they
        are None."""
        return {k: v for k, v in vars(self).items() if v is not None or k not in _RARE}

    @classmethod
    def failed(
        cls, prompt: Any, continuation: Any, error: str, id: str | int | None = None, line: int | None = None
    ) -> "Score":
        """The score of a pair that could not be read."""
        return cls(prompt, continuation, None, [], [], False, id=id, line=line, error=error)


class Scorer:
    """Scores pairs with the model of an engine.

    Args:
      engine: has an autoregressive model; its drafter and verifier do not matter.

    Raises:
      ValueError: for a diffusion model.
    """

    def __init__(self, engine: Reads):
        self.engine, self.reader = engine, engine.reader()

    def pair(self, prompt: Any, continuation: Any, *, id: str | int | None = None, line: int | None = None) -> Pair:
        """A checked pair; see `encode_pair`.

        Raises:
          ValueError: on an unusable prompt or continuation, or if both together do not fit into the model.
        """
        model, source = self.engine.model, None
        if encodes(model.lm):
            source, after = source_of(model, prompt), encode_alone(self.engine, continuation)
            before = model.starts
        else:
            before, after = encode_pair(self.engine, prompt, continuation)
        total, most = len(before) + len(after), self.engine.max_length
        if total > most:
            raise ValueError(
                f"{len(before)} tokens of prompt and {len(after)} of continuation are more than the {most} positions of "
                f"{model.name}: leave out the beginning of the prompt, or score the continuation in parts"
            )
        return Pair(shown(prompt), continuation, before + after, len(before), id, line, source)

    def run(self, pairs: Sequence[Pair], *, batch_size: int = 8, start: int = 0) -> Iterator[Score]:
        """Yields scores in the order of the pairs. They depend on the batch only by rounding.

        Args:
          pairs: from `pair`.
          batch_size: rows read together; fewer if there are fewer pairs.
          start: the first pair to score; it and later pairs get the same scores as in a whole run.
        """
        found = self.reader.run(pairs, batch_size=batch_size, start=start)
        yield from map(_score, map(pairs.__getitem__, range(start, len(pairs))), found)


def _score(pair: Pair, found: Found) -> Score:
    return Score(
        pair.prompt,
        pair.continuation,
        math.fsum(found.logprobs),
        found.logprobs,
        list(pair.ids[pair.first :]),
        found.greedy,
        id=pair.id,
        line=pair.line,
    )


def encode_pair(engine: Reads, prompt: Any, continuation: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The token ids of a prompt and of its continuation.

    White space at the end of a text prompt is moved to the beginning of the continuation, as in lm-evaluation-harness
    (`_encode_pair`), since a token usually holds a word with the space before it. The continuation's tokens are those
    of the joined text after the prompt's tokens.

    In two cases the continuation is tokenised on its own, without special tokens:

    - A token crosses the border, so that the joined tokens do not begin with the prompt's.
    - Only the continuation is text.

    An empty prompt is the model's BOS.

    Args:
      engine: has the tokenizer and the vocabulary.
      prompt: text, token ids or chat messages; see `Engine.encode`.
      continuation: text or token ids.

    Returns:
      The ids of the prompt and of the continuation, neither empty.

    Raises:
      ValueError: on input that `Engine.encode` refuses; on an empty prompt if the model has no BOS; on an empty
        continuation.
    """
    prompt, continuation = one(prompt), checked_continuation(continuation)
    listed = (list, tuple)
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
    return before, encode_alone(engine, continuation)


def checked_continuation(continuation: Any) -> Any:
    """A continuation as a text or a list of token ids; raises ValueError if it is neither, or empty."""
    continuation = one(continuation)
    if not isinstance(continuation, (str, list, tuple)) or len(continuation) and isinstance(continuation[0], Mapping):
        raise ValueError(f"a continuation is a string or a list of token ids, not {continuation!r:.60}")
    if not len(continuation):
        raise ValueError("the continuation is empty: give at least one token")
    return continuation


def encode_alone(engine: Reads, continuation: Any) -> tuple[int, ...]:
    """A continuation's token ids, tokenised on its own, without special tokens."""
    after, tokenizer = checked_continuation(continuation), engine.model.tokenizer
    if isinstance(after, str) and tokenizer is not None:
        check_unicode(after, "continuation")
        after = tokenizer.encode(after, add_special_tokens=False, verbose=False)
    return engine.encode(after, "continuation")


def _bos(engine: Reads) -> int:
    bos = getattr(engine.model.tokenizer, "bos_token_id", None)
    if bos is None:
        raise ValueError(
            f"the prompt is empty, and {engine.model.name} has no BOS token to begin with: give as prompt the token that its "
            "texts begin with, such as the id of its EOS"
        )
    return bos


def pair_up(prompts: Any, continuations: Any) -> list[tuple[Any, Any]]:
    """Pairs prompts with continuations; a single prompt goes with every continuation.

    Raises:
      ValueError: if one of them is not a list, or their numbers differ.
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
    """The argument as a list, and whether it was a single item."""
    if isinstance(given, str):
        return [given], True
    given = several(given) if is_array(given) or is_encoding(given) else given
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ValueError(f"{what} are a list of texts or of lists of token ids, not {given!r:.60}")
    items = several(list(given))
    alone = bool(items) and isinstance(items[0], (int, np.integer, Mapping))  # token ids, or the messages of a chat
    return ([items], True) if alone else (items, False)
