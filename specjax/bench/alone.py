"""Engines of constraints without a model, on the same schemas: llguidance and outlines-core as their authors ship them.

Each is timed over the same texts: the schema's valid instances, spaced in two ways, and one drawn from our table. A token
counts as a mask and an advance. Texts that an engine does not take are not timed in it.
"""

import dataclasses
import inspect
import json
import marshal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.bench.schema import Made, Schema, coverage, quantiles, refused
from specjax.constrain import Table, Vocabulary
from specjax.constrain.grammar import token_set

ENGINES = ("llguidance", "outlines-core")
LONGEST = 64
"""Tokens of a text that is drawn from our table."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """What became of a schema in an engine.

    Attributes:
      made: as for our own constraints.
      token_seconds: a mask and an advance, over the texts that it takes; None if it takes none.
    """

    made: Made
    token_seconds: float | None


def texts_of(schema: Schema, vocabulary: Vocabulary, table: Any) -> list[tuple[list[int], bool]]:
    """Token ids of texts, and whether each is valid: two for every instance, then perhaps one that our table writes."""
    found: list[tuple[list[int], bool]] = []
    for one in schema.instances:
        for text in one.texts:
            tokens = vocabulary.spelled(text)
            found.append(([] if tokens is None else list(tokens), one.valid))
    return [*found, (_drawn(table, vocabulary), True)] if isinstance(table, Table) else found


def _drawn(table: Table, vocabulary: Vocabulary) -> list[int]:
    """A text that a table allows, a class of tokens drawn before a token."""
    rng, state, found = np.random.default_rng(0), 0, []
    for left in range(max(LONGEST, int(table.distance[0])), 0, -1):
        allowed = np.flatnonzero(table.allowed(state, left))
        kind = rng.choice(np.unique(table.classes[allowed]))
        token = int(rng.choice(allowed[table.classes[allowed] == kind]))
        if token in vocabulary.eos:
            break
        state = table.next(state, token)
        found.append(token)
    return found


def tried(
    engine: str, schema: Schema, vocabulary: Vocabulary, texts: Sequence[tuple[list[int], bool]], limit: float
) -> Tried:
    """Makes a schema's constraint in an engine, and walks through texts.

    Args:
      engine: one of `ENGINES`.
      schema: the schema.
      vocabulary: the model's.
      texts: from `texts_of`.
      limit: seconds for making it; one that takes longer counts as refused.

    Raises:
      ValueError: if the engine's package is not there.
    """
    asked = [tokens for tokens, _ in texts]
    content = json.dumps(schema.content, ensure_ascii=False)
    llguidance = engine == "llguidance"
    said = _by_llguidance(content, vocabulary, asked) if llguidance else _by_outlines(content, vocabulary, asked, limit)
    if isinstance(said, str):
        return Tried(Made(schema, None, said, 0.0), None)
    seconds, takes, spent, count = said
    if seconds > limit:
        return Tried(Made(schema, None, f"it took more than {limit:g} seconds", seconds), None)
    pairs = [any(takes[2 * at : 2 * at + 2]) for at in range(len(schema.instances))]
    wrong = sum(taken and not one.valid for taken, one in zip(pairs, schema.instances, strict=True))
    missed = sum(one.valid and not taken for taken, one in zip(pairs, schema.instances, strict=True))
    return Tried(Made(schema, None, "", seconds, wrong, missed), spent / count if count else None)


def own_seconds(table: Any, texts: Sequence[tuple[list[int], bool]]) -> float | None:
    """A mask and an advance of our table in numpy, over the texts that it takes; None if it takes none."""
    if not isinstance(table, Table):
        return None
    spent, count = 0.0, 0
    for tokens, _ in texts:
        if tokens and table.accepts(tokens):
            began, state = time.perf_counter(), 0
            for token in tokens:
                table.allowed(state)
                state = table.next(state, token)
            spent, count = spent + time.perf_counter() - began, count + len(tokens)
    return spent / count if count else None


def summary(found: Sequence[Tried]) -> dict[str, Any]:
    """Coverage, times and refusals of an engine over all schemas."""
    made = [one.made for one in found]
    per_token = [one.token_seconds for one in found if one.token_seconds is not None]
    return {
        **coverage(made),
        "compile_seconds": quantiles(made),
        "token_seconds": statistics.median(per_token) if per_token else None,
        "timed": len(per_token),
        "refused": refused(made),
    }


def _by_llguidance(content: str, vocabulary: Vocabulary, texts: Sequence[list[int]]) -> Any:
    guidance, tokenizer = token_set(vocabulary)
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    bits = allocate_token_bitmask(1, vocabulary.size)
    began = time.perf_counter()
    try:
        grammar = guidance.LLMatcher.grammar_from_json_schema(content)
    except ValueError as error:
        return _first(str(error))
    matcher = guidance.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return _first(matcher.get_error())
    fill_next_token_bitmask(matcher, bits, 0)
    seconds, takes, spent, count = time.perf_counter() - began, [], 0.0, 0
    for tokens in texts:
        matcher.reset()
        taken = bool(tokens) and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        takes.append(taken)
        if not taken:
            continue
        matcher.reset()
        began = time.perf_counter()
        for token in tokens:
            fill_next_token_bitmask(matcher, bits, 0)
            matcher.consume_token(token)
        spent, count = spent + time.perf_counter() - began, count + len(tokens)
    return seconds, takes, spent, count


def _by_outlines(content: str, vocabulary: Vocabulary, texts: Sequence[list[int]], limit: float) -> Any:
    """In a process of its own, since some schemas take it any time."""
    ids: dict[bytes, list[int]] = {}
    for token, own in enumerate(vocabulary.tokens):
        if own and token not in vocabulary.eos:
            ids.setdefault(own, []).append(token)
    asked = marshal.dumps((content, vocabulary.eos[0], ids, vocabulary.size, [list(one) for one in texts]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM], input=asked, capture_output=True, timeout=limit + 10
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:g} seconds"
    if done.returncode:
        return _first((done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"])[-1])
    said = marshal.loads(done.stdout)
    return _first(said) if isinstance(said, str) else said


def walk_outlines(content: str, eos: int, ids: Any, size: int, texts: Any) -> Any:
    """Seconds to the first mask, which texts outlines-core takes, seconds over these and their tokens; or why it refuses."""
    import time

    import numpy as np
    import outlines_core as core
    from outlines_core import json_schema

    vocabulary = core.Vocabulary(eos, ids)
    bits = np.zeros(-(-size // 32), np.int32)
    at = bits.ctypes.data, bits.size, bits.itemsize
    began = time.perf_counter()
    try:
        index = core.Index(json_schema.build_regex_from_schema(content), vocabulary)
    except BaseException as error:  # a panic of Rust is no Exception
        return str(error) or type(error).__name__
    core.Guide(index).write_mask_into(*at)
    seconds, takes, spent, count = time.perf_counter() - began, [], 0.0, 0
    for tokens in texts:
        guide, taken = core.Guide(index), bool(tokens)
        began = time.perf_counter()
        for token in tokens:
            guide.write_mask_into(*at)
            if not bits[token // 32] >> token % 32 & 1:
                taken = False
                break
            guide.advance(token, False)
        lasted = time.perf_counter() - began
        taken = taken and eos in guide.get_tokens()
        takes.append(taken)
        spent, count = (spent + lasted, count + len(tokens)) if taken else (spent, count)
    return seconds, takes, spent, count


_SOURCE = inspect.getsource(walk_outlines)
_PROGRAM = f"""import marshal, sys
from typing import Any
{_SOURCE}
sys.stdout.buffer.write(marshal.dumps(walk_outlines(*marshal.loads(sys.stdin.buffer.read()))))"""


def _first(error: str) -> str:
    return " ".join(error.split())[:120]
