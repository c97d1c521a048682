"""Tokenizer and batches for the shipped models."""

import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.bench import stdlib

EOS, PAD = "<|endoftext|>", "<|pad|>"
# A newline keeps the indentation after it, a name keeps one space or dot before it, digits come in threes.
SPLIT = r"(?:\r?\n)+ {0,20}|[ .]?[^\W\d]+| ?\d{1,3}| ?[^\s\w]{1,16}| {1,20}(?= )|\s"
# Message contents, one after the other: enough for inputs that come as messages. The models know no roles.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, split: str = SPLIT, special: Sequence[str] = (EOS, PAD)
) -> Tokenizer:
    """A byte-level BPE that gives back every text exactly; `split` cuts a text into what may become tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path, max_length: int, **special: str) -> None:
    """Writes the files that `transformers.AutoTokenizer` reads; `special` fields go before ours."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
        **(special or {"pad_token": PAD}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_files(tokenizer: Tokenizer, paths: list[pathlib.Path]) -> list[np.ndarray]:
    """Each file's ids, without separators."""
    encoded = tokenizer.encode_batch([stdlib.read(path) for path in paths])
    return [np.asarray(item.ids, np.int32) for item in encoded]


def epoch_rows(documents: list[np.ndarray], eos: int, length: int, seed: int, epoch: int) -> np.ndarray:
    """One pass over the documents as shuffled rows `[R, length + 1]`; row r + 1 starts at row r's last token.

    Documents are shuffled and packed behind separators, and the cuts fall elsewhere in every epoch.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(documents))
    separator = np.asarray([eos], np.int32)
    stream = np.concatenate([part for i in order for part in (separator, documents[i])] + [separator])
    stream = stream[rng.integers(length) :]
    count = (len(stream) - 1) // length
    rows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: count * length : length]
    return rows[rng.permutation(count)]


def batches(
    documents: list[np.ndarray], eos: int, length: int, rows: int, seed: int, start: int
) -> Iterator[np.ndarray]:
    """Batches `[rows, length + 1]` from batch number `start` on, the same ones in every run of the same seed."""
    size = sum(len(document) + 1 for document in documents)
    per_epoch = (size - length) // length // rows  # the same in every epoch, whatever its offset
    for number in range(start, 1 << 62):
        epoch, i = divmod(number, per_epoch)
        if i == 0 or number == start:
            packed = epoch_rows(documents, eos, length, seed, epoch)
        yield packed[i * rows : (i + 1) * rows]


def evaluation_windows(documents: list[np.ndarray], eos: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Held-out windows `[W, length + 1]` and which targets count `[W, length]`.

    Each document starts behind a separator; windows overlap by half, and each token counts once, where it has the
    longer context.
    """
    half = length // 2
    windows, counted = [], []
    for document in documents:
        stream = np.concatenate([[eos], document]).astype(np.int32)
        done = 0  # targets counted so far; target t is stream[t + 1]
        while done < len(document):
            start = max(0, done - half)
            piece = stream[start : start + length + 1]
            window = np.full(length + 1, eos, np.int32)
            window[: len(piece)] = piece
            mask = np.zeros(length, bool)
            mask[done - start : len(piece) - 1] = True
            windows.append(window)
            counted.append(mask)
            done = start + len(piece) - 1
    return np.stack(windows), np.stack(counted)
