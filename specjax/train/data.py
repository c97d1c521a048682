"""Training text: from files to rows of token ids, and batches of rows in a resumable order.

Lines of a .jsonl file are objects of one of these kinds:

- `{"text": ...}` is text; `{"tokens": [ids]}` is text in ids;
- `{"prompt": ..., "completion": ...}`: the prompt is read and not trained on. The records that `specjax generate --output`
  writes are of this kind too: their completion is `tokens`, or `text` where there are none;
- `{"messages": [...]}` goes through the chat template; what the assistant says is trained on. If the template rewrites
  earlier messages once others follow (templates that drop old reasoning do), an answer begins a new text. Content may
  be a list of text parts.

Labelled lines, for what learns which tokens are right, are of the second kind. If the completion is wrong, they also
have `wrong`: the first wrong words as the completion has them, or `[begin, end]`, in tokens of ids where the line has
ids, or in characters of its text. Tokens before it are right, those in it are wrong, and those after it are not labelled.

For a target with an encoder, lines are of the second kind too: the prompt is the source, which its encoder reads.

A prompt may be text, token ids or messages. If the last message is the assistant's, the completion continues it. Files
of other types are read as one text.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from specjax.models.messages import checked, render
from specjax.models.text import encode_text, source_of
from specjax.objectives.base import TEXT, Kind, Lines
from specjax.sharding.rows import own_rows
from specjax.train import row_files
from specjax.train.packing import DUE, READ, WRONG, Make, Packed, Piece, Pieces, cut

SUFFIXES = (".jsonl", ".txt", ".py")
_BOM = b"\xef\xbb\xbf"
_ANSWERS = ("completion", "tokens", "text")
"""Fields that hold a completion; the first that there is counts."""
_AT_A_TIME = 4096
"""Rows processed at a time."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one length, from which batches are drawn. Their arrays may be in files, which are then read row by row.

    Attributes:
      tokens: `[N, T]` int32, 0 where a row is padded.
      mask: `[N, T]` bool, which tokens are predicted.
      skipped: the error of each line that could not be used.
      documents: `[N, T]` int32, see `specjax.objectives.base.Batch`; None: a row is one document.
      wrong: `[N, T]` bool, see `specjax.objectives.base.Batch`; None: nothing is labelled.
    """

    tokens: np.ndarray
    mask: np.ndarray
    skipped: tuple[str, ...] = ()
    documents: np.ndarray | None = None
    wrong: np.ndarray | None = None

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        own = {"tokens": self.tokens, "mask": self.mask, "documents": self.documents, "wrong": self.wrong}
        return {name: array for name, array in own.items() if array is not None}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the content."""
        found = hashlib.sha256()
        for array in self._arrays.values():
            for begin in range(0, len(array), _AT_A_TIME):
                found.update(array[begin : begin + _AT_A_TIME].tobytes())
        return found.hexdigest()[:16]

    @functools.cached_property
    def due(self) -> int:
        """The number of tokens that are predicted."""
        return int(np.count_nonzero(self.mask))

    def counts(self, size: int) -> np.ndarray:
        """`[size]`, how often each token is predicted."""
        total = np.zeros(size, int)
        for begin in range(0, len(self), _AT_A_TIME):
            at = slice(begin, begin + _AT_A_TIME)
            total += np.bincount(self.tokens[at][self.mask[at]], minlength=size)
        return total


def batches(rows: Any, batch_size: int, seed: int, ahead: int = 0, mesh: Any = None) -> Any:
    """An endless iterator of the arrays of `Batch`, `[B, T]` each, by name; reshuffled each epoch.

    Its `get_state()` is a small JSON object, from which `set_state` resumes exactly. With several processes, batches
    are the same as with one, and each process reads its own rows.

    Args:
      rows: `Rows`, or `specjax.train.features.Features`.
      batch_size: B.
      seed: the seed of the order.
      ahead: how many batches threads read in advance, for large rows in files.
      mesh: the mesh of `Batch.placed`.
    """
    own = own_rows(mesh, batch_size)
    order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
    order = order.batch(batch_size, drop_remainder=True)  # of batches of one, grain cannot count an endless remainder
    order = order.map(lambda chosen: stacked(rows, chosen[own]))
    return iter(order.to_iter_dataset(grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)))


def stacked(rows: Any, chosen: np.ndarray) -> dict[str, Any]:
    """Some rows as arrays, by name. A number out of range gives a row without tokens to predict."""
    found = [rows[i] for i in chosen.tolist() if i < len(rows)]
    if len(found) < len(chosen):
        found += [jax.tree.map(np.zeros_like, rows[0])] * (len(chosen) - len(found))
    return jax.tree.map(lambda *each: np.stack(each), *found)


def read_rows(
    paths: Sequence[str | Path],
    model: Any,
    length: int,
    seed: int = 0,
    kind: Kind = TEXT,
    folder: Path | None = None,
) -> Rows:
    """Reads and tokenises training files, line by line.

    Documents (texts, each ended by EOS, and examples with a prompt) share rows as far as they fit, and none sees
    another. A longer document takes several rows: a text is cut, and every row of an example begins with earlier
    tokens, so that each answer follows its prompt; see `cut`.

    Args:
      paths: .jsonl, .txt or .py files, or folders that are searched for them.
      model: what `specjax.models.load` returned for the target.
      length: T.
      seed: the seed of the order of documents.
      kind: what rows are made of, see the module.
      folder: keeps the rows in files, and reuses files that were made of the same text; None: rows are in memory.

    Raises:
      ValueError: on a missing or empty file, or a file without a usable line; says which and why.
    """
    files = _files(paths)

    def tokenised(scratch: Path | None, make: Make) -> Rows:
        with Pieces(scratch) as pieces:
            return _tokenised(paths, files, pieces, model, length, seed, kind, make)

    if folder is None:
        return tokenised(None, lambda name, shape, dtype: np.zeros(shape, dtype))
    of = row_files.made_of(files, model, length, seed, kind)
    kept = row_files.kept(folder, of)
    return Rows(**(kept or row_files.written(folder, of, lambda scratch, make: tokenised(scratch, make).skipped)))


def _tokenised(
    paths: Sequence[str | Path], files: list[Path], pieces: Pieces, model: Any, length: int, seed: int, kind: Kind,
    make: Make,
) -> Rows:  # fmt: skip
    skipped: list[str] = []
    for file in files:
        usable = 0
        first = None
        for where, read in _items(file, kind.lines, model):
            try:
                documents = read()
                for ids, mask in documents:
                    _check(ids, mask, model)
                    _check_whole(ids, length, kind)
            except ValueError as error:
                first = first or f"{where}{error}"
                skipped.append(f"{file}: {where}{error}")
                continue
            usable += 1
            for ids, mask in documents:
                for piece in cut(ids, mask, length):
                    pieces.append(*piece)
        if not usable:
            raise ValueError(f"{file} has no usable line: {first or 'it is empty'}")
    if not pieces.sizes:
        raise ValueError(
            f"{', '.join(map(str, paths))}: rows of {length} tokens leave nothing to predict; raise --length"
        )
    placed = Packed.of(np.asarray(pieces.sizes), length, seed, kind.packed)
    return Rows(**placed.written(pieces, length, make, kind.lines == "labelled"), skipped=tuple(skipped))


def _files(paths: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            # an empty file in a folder (an __init__.py) is not an error
            inside = [file for file in inside if file.stat().st_size]
            if not inside:
                raise ValueError(f"the folder {str(path)!r} holds no {', '.join(SUFFIXES)} file with text in it")
            found += inside
        elif not path.is_file():
            raise ValueError(f"no training data at {str(path)!r}: there is no such file or folder")
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"training data {str(path)!r}: give {', '.join(SUFFIXES)} files, or folders of them")
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _items(file: Path, lines: Lines, model: Any) -> Iterator[tuple[str, Any]]:
    """For every line (or the whole text): its place, and a function that reads it to documents."""
    if lines != "text" and file.suffix != ".jsonl":
        what = "labels" if lines == "labelled" else "sources"
        raise ValueError(f"{file}: {what} stand in the lines of a .jsonl file")
    line_of = {"text": _line, "labelled": _labelled, "sourced": _sourced}[lines]
    try:
        with file.open("rb") as stored:
            if file.suffix != ".jsonl":
                content = stored.read().removeprefix(_BOM)
                if content.strip():
                    yield "", functools.partial(_text, content.decode(errors="replace").replace("\r\n", "\n"), model)
                return
            for number, line in enumerate(stored, start=1):
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    yield f"line {number}: ", functools.partial(line_of, line, model)
    except OSError as error:
        raise ValueError(f"cannot read the training data {str(file)!r}: {error.strerror or error}") from error


def _content(line: bytes) -> dict[str, Any]:
    """A line's object, without empty fields."""
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    content = {name: value for name, value in content.items() if value is not None}
    if content.get("error"):
        raise ValueError("the record of a failed completion")
    return content


def _line(line: bytes, model: Any) -> list[Piece]:
    content = _content(line)
    if "messages" in content and "prompt" not in content:
        return _conversation(content["messages"], model)
    if "prompt" not in content:
        if "text" not in content and "tokens" not in content:
            raise ValueError("it needs text, tokens, messages, or prompt and completion")
        return _text(content.get("text", content.get("tokens")), model)
    prompt = _ids(content["prompt"], model)
    completion, end = _completion(content, model)
    return [(prompt + completion + end, [READ] * len(prompt) + [DUE] * len(completion + end))]


def _completion(content: dict[str, Any], model: Any) -> tuple[list[int], list[int]]:
    """The completion's ids, and those that end it: a record says itself whether it ended."""
    answer = next((content[key] for key in _ANSWERS if key in content), None)
    if answer is None:
        raise ValueError("it has a prompt and no completion")
    return _ids(answer, model, special=False), list(model.eos_ids[:1]) if "completion" in content else []


def _sourced(line: bytes, model: Any) -> list[Piece]:
    content = _content(line)
    if "prompt" not in content:
        raise ValueError(f"it needs prompt and completion: the encoder of {model.name} reads the prompt")
    source = list(source_of(model, content["prompt"]))
    if not source:
        raise ValueError("empty prompt")
    completion, end = _completion(content, model)
    return [(source + completion + end, [READ] * len(source) + [DUE] * len(completion + end))]


def _labelled(line: bytes, model: Any) -> list[Piece]:
    content = _content(line)
    if "prompt" not in content:
        raise ValueError("a labelled line needs prompt and completion, and wrong if the completion is")
    prompt = _ids(content["prompt"], model)
    completion, end = _completion(content, model)
    labels = [DUE] * len(completion + end)
    if "wrong" in content:
        answer = next(content[key] for key in _ANSWERS if key in content)
        if isinstance(content["wrong"], str) and not isinstance(answer, str):
            answer = content.get("text", answer)
        begin, stop = _wrong(content["wrong"], answer, completion, model)
        labels[begin:] = [WRONG] * (stop - begin) + [READ] * (len(labels) - stop)
    return [(prompt + completion + end, [READ] * len(prompt) + labels)]


def _wrong(asked: Any, answer: Any, ids: list[int], model: Any) -> tuple[int, int]:
    """Which tokens of a completion are wrong: the first of them, and the first after them."""
    if asked in ("", []):
        raise ValueError("wrong is empty: leave it out of a right answer")
    if isinstance(asked, str) and isinstance(answer, str) and asked in answer:
        asked = [answer.index(asked), answer.index(asked) + len(asked)]
    pair = isinstance(asked, list) and len(asked) == 2 and all(type(at) is int for at in asked)
    if not pair or not 0 <= asked[0] < asked[1] <= len(answer):
        raise ValueError(f"wrong is neither words of the completion nor [begin, end] in it: {asked!r:.40}")
    if not isinstance(answer, str):
        return asked[0], asked[1]
    read = lambda count: len(_tokenizer(model).decode(ids[:count], skip_special_tokens=False))
    missing = len(answer) - read(len(ids))  # some tokenizers leave out a space at the beginning
    ends = [missing + read(count) for count in range(1, len(ids) + 1)]
    first = next(at for at, end in enumerate(ends) if end > asked[0])
    return first, next(at for at, end in enumerate(ends) if end >= asked[1]) + 1


def _text(text: Any, model: Any) -> list[Piece]:
    ids = _ids(text, model) + list(model.eos_ids[:1])
    return [(ids, [DUE] * len(ids))]


def _ids(content: Any, model: Any, special: bool = True) -> list[int]:
    """Token ids of text, ids or messages; `special`: including the tokens that open a text."""
    if isinstance(content, list) and content and all(type(i) is int for i in content):
        return content
    if not content or not isinstance(content, (str, list)):
        raise ValueError("empty text" if content in ("", []) else f"not text, token ids or messages: {content!r:.40}")
    if special or not isinstance(content, str):
        return encode_text(_tokenizer(model), content, model.name)
    return _tokenizer(model).encode(content, add_special_tokens=False, verbose=False)


def _tokenizer(model: Any) -> Any:
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, so it takes token ids only")
    return model.tokenizer


def _conversation(messages: Any, model: Any) -> list[Piece]:
    """Documents of a conversation: each assistant message completes the messages before it, as the template writes them
    then.

    A document continues as long as the template only adds to it.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of objects")
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[0] == 0:
        raise ValueError("messages in which the assistant answers nothing")
    messages = checked(_tokenizer(model), messages, model.name)
    documents: list[Piece] = []
    before = ""
    for turn in turns:
        prompt = render(model.tokenizer, messages[:turn], model.name, add_generation_prompt=True)
        answer = render(model.tokenizer, messages[: turn + 1], model.name)
        if not answer.startswith(prompt):
            raise ValueError(
                f"the chat template of {model.name} writes answers otherwise than it asks for them: give prompt and completion"
            )
        if not documents or not prompt.startswith(before):
            documents.append(([], []))
            before = ""
        ids, mask = documents[-1]
        for text, trained in ((prompt[len(before) :], False), (answer[len(prompt) :], True)):
            part = model.tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []
            ids += part
            mask += [DUE if trained else READ] * len(part)
        before = answer
    return documents


def _check_whole(ids: list[int], length: int, kind: Kind) -> None:
    if kind.lines == "sourced" and len(ids) > length:
        raise ValueError(f"prompt and completion have {len(ids)} tokens, and rows have {length}: raise --length")


def _check(ids: list[int], mask: list[int], model: Any) -> None:
    outside = [i for i in ids if not 0 <= i < model.lm.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {model.lm.vocab_size}")
    if len(ids) < 2 or not any(mask[1:]):
        raise ValueError("nothing to predict in it")
