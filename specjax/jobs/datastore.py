"""`specjax datastore build`: builds a retrieval datastore for the drafters `rest`, `suffix` and `sam` from text files."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.draft import datastore
from specjax.models import DEFAULT_MODEL
from specjax.serve.options import option
from specjax.terminal import bad_input, note


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatastoreOptions:
    """The options of `specjax datastore`; see the help of each."""

    action: str = option(dataclasses.MISSING, "what to do", choices=("build",), positional=True)
    files: tuple[str, ...] = option(
        dataclasses.MISSING,
        "text in UTF-8, or a folder: every text file in it; of a job's .jsonl, the text of every record",
        nargs="+",
        metavar="FILE",
        positional=True,
    )
    model: str | None = option(
        None, "model with the tokenizer: folder, shipped name or hub id (default: the shipped target)"
    )
    output: str = option(dataclasses.MISSING, "where to write the datastore; replaces an older one", metavar="FOLDER")


def command(options: DatastoreOptions) -> int:
    """`specjax datastore`."""
    with bad_input():
        files, skipped = read(options.files)
        documents, size = build(files, options.model, options.output)
    if skipped:
        shown = ", ".join(map(str, skipped[:3])) + (", ..." if len(skipped) > 3 else "")
        note(f"left out {len(skipped)} files that are empty or not UTF-8 text: {shown}")
    use = f"use it with --drafter rest:datastore={options.output}"
    note(f"{documents} documents, {size} tokens in {options.output}; {use}")
    return 0


def read(paths: Sequence[str]) -> tuple[list[str], list[Path]]:
    """The texts of files, and of all files in folders (without hidden ones), in order; and the unusable files.

    A JSONL file of a job's records has a text for each of them.

    Raises:
      ValueError: if a path does not exist, a named file is not UTF-8 text, or nothing is left.
    """
    texts, skipped = [], []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"there is no file or folder {str(path)!r}")
        for file in _inside(path) if path.is_dir() else [path]:
            try:
                text = file.read_bytes().decode()
            except UnicodeDecodeError as error:
                if file == path:
                    raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
                text = ""
            if text.strip():
                texts += _records(text) if file.suffix == ".jsonl" else [text]
            else:
                skipped.append(file)
    if not texts:
        raise ValueError(f"no usable text in {', '.join(paths)}: give files of UTF-8 text")
    return texts, skipped


def _records(lines: str) -> list[str]:
    """The new texts of a job's records; lines that are none are one text, as they stand."""
    try:
        found = [json.loads(line).get("text") for line in lines.split("\n") if line.strip()]
    except (ValueError, AttributeError):
        return [lines]
    return [text for text in found if isinstance(text, str) and text.strip()] or [lines]


def _inside(folder: Path) -> list[Path]:
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(folder).parts)
    return sorted(file for file in folder.rglob("*") if file.is_file() and not hidden(file))


def build(texts: Sequence[str], model: str | None, folder: str) -> tuple[int, int]:
    """Tokenises texts, builds their datastore and saves it; returns its numbers of documents and tokens.

    Raises:
      ValueError: if the model is unknown or has no tokenizer, or the folder cannot be written.
    """
    from specjax.draft.heads.datastore import save_datastore
    from specjax.models import loading  # slow to import: flax and Orbax

    name, raw, reads, file = loading.fields_of(model or DEFAULT_MODEL)
    vocab_size = loading.architecture(raw, file)[0].vocab_size  # the weights are not needed
    words = reads()
    if words is None:
        raise ValueError(f"{name} has no tokenizer, so it cannot read text: give another --model")
    if Path(folder).is_file():
        raise ValueError(f"--output {folder!r} is a file; give a folder")
    read = lambda text: words(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [np.asarray(read(text), np.int32) for text in texts]  # a list takes nine times the memory
    store = datastore.build(ids, vocab_size)
    save_datastore(folder, store, name, vocab_size, words)
    return len(ids), sum(map(len, ids))
