"""Training data: what becomes of each kind of line, what is refused, and batches in an order that can be taken up again."""

import dataclasses
import json

import numpy as np
import pytest

from specjax import models
from specjax.train.data import batches, read_rows


@pytest.fixture(scope="module")
def model():
    return models.load("tiny")


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def texts(rows, model):
    """Each row as (text that is read, text that is predicted)."""
    decode = lambda ids: model.tokenizer.decode(ids)
    return [
        (decode(tokens[: mask.argmax()]), decode(tokens[mask]))
        for tokens, mask in zip(rows.tokens, rows.mask, strict=True)
    ]


EOS = "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"


def test_prompts_are_read_and_completions_predicted(model, tmp_path):
    ids = model.tokenizer("def f():")["input_ids"]
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "def f():", "completion": "\n    pass"},
        {"prompt": ids, "completion": "\n    pass"},
        {"prompt": "def f():", "text": "ignored", "tokens": [5, 6, 7], "finish_reason": "length"},
        {"prompt": "def f():", "text": "\n    return"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "There"}]},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": "There"},
    )
    rows = read_rows([file], model, 24)
    assert rows.tokens.shape == (6, 24) and rows.tokens.dtype == np.int32
    assert texts(rows, model) == [
        ("def f():", "\n    pass" + EOS),
        ("def f():", "\n    pass" + EOS),
        ("def f():", model.tokenizer.decode([5, 6, 7])),  # a record says itself where it ended
        ("def f():", "\n    return"),
        (f"{USER} Hi{EOS}{ASSISTANT}", " There" + EOS),
        (f"{USER} Hi{EOS}{ASSISTANT}", "There" + EOS),
    ]
    assert np.all(rows.tokens[~rows.mask & (np.arange(24) > 20)] == 0)


def test_every_answer_of_a_conversation_is_predicted(model, tmp_path):
    turns = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    file = write(tmp_path / "a.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    rows = read_rows([file], model, 16)
    ids, mask = rows.tokens[0], rows.mask[0]
    assert model.tokenizer.decode(ids[mask]) == f" B{EOS} D{EOS}"
    whole = "".join(f"<|{role}|> {text}{EOS}" for role, text in turns)
    assert model.tokenizer.decode(ids[: mask.nonzero()[0][-1] + 1]) == whole


def test_text_is_packed(model, tmp_path):
    write(tmp_path / "a.txt", "import os")
    write(tmp_path / "b.py", "x = 1")
    write(tmp_path / "c.jsonl", {"text": "y = 2"}, {"tokens": [9, 8, 7]})
    write(tmp_path / "notes.md", "left out")
    (tmp_path / "empty.py").write_text("")
    rows = read_rows([tmp_path], model, 6, seed=1)
    stream = rows.tokens.reshape(-1)[rows.mask.reshape(-1)]
    documents = model.tokenizer.decode(stream).split(EOS)
    assert sorted(documents) == sorted(["import os\n", "x = 1\n", "y = 2", model.tokenizer.decode([9, 8, 7]), ""])
    assert rows.mask[:-1].all() and not rows.tokens.reshape(-1)[~rows.mask.reshape(-1)].any()
    again = read_rows([tmp_path], model, 6, seed=1)
    assert np.array_equal(rows.tokens, again.tokens) and rows.digest == again.digest
    assert any(read_rows([tmp_path], model, 6, seed=s).digest != rows.digest for s in range(2, 6))


def test_nothing_of_a_long_example_is_lost(model, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": list(range(10, 19)), "tokens": list(range(20, 30))})
    rows = read_rows([file], model, 4)
    assert rows.tokens[rows.mask].tolist() == list(range(20, 30))
    assert rows.tokens[0].tolist() == [18, 20, 21, 22]  # rows of the prompt alone are dropped


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "a.jsonl has no usable line: it is empty"),
        (("", "  "), "no usable line: it is empty"),
        (("{",), "a.jsonl has no usable line: line 1: not valid JSON"),
        (("3",), "line 1: not a JSON object"),
        (({"frob": 1},), "line 1: it needs text, tokens, messages, or prompt and completion"),
        (({"prompt": "x"},), "line 1: it has a prompt and no completion"),
        (({"text": ""},), "line 1: empty text"),
        (({"text": 3},), "line 1: not text, token ids or messages: 3"),
        (({"text": None},), "line 1: not text"),
        (({"tokens": [99999]},), "token id 99999 is outside the vocabulary of 1536"),
        (({"prompt": "", "completion": "x"},), "line 1: empty text"),
        (({"messages": []},), "line 1: messages must be a list of objects"),
        (({"messages": [{"role": "user", "content": "x"}]},), "without an answer of the assistant"),
        (({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]},), "every message must be an object"),
        (({"prompt": "x", "error": "failed"},), "the record of a failed completion"),
    ],
)
def test_files_without_a_usable_line(model, tmp_path, lines, said):
    file = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ValueError) as error:
        read_rows([file], model, 8)
    assert str(file) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_bad_lines_are_left_out_and_told(model, tmp_path):
    file = write(tmp_path / "a.jsonl", {"text": "import os"}, "{", {"prompt": "x"})
    rows = read_rows([file], model, 8)
    assert [line.split(": ")[1] for line in rows.skipped] == ["line 2", "line 3"]


def test_paths_that_cannot_be_read(model, tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        read_rows([tmp_path / "missing.jsonl"], model, 8)
    with pytest.raises(ValueError, match="holds no .jsonl, .txt, .py file"):
        read_rows([tmp_path], model, 8)
    with pytest.raises(ValueError, match="give .jsonl, .txt, .py files"):
        read_rows([write(tmp_path / "a.csv", "x")], model, 8)
    with pytest.raises(ValueError, match=r"a\.txt has no usable line: it is empty"):
        read_rows([write(tmp_path / "a.txt", "")], model, 8)


def test_without_a_tokenizer_ids_work(model, tmp_path):
    bare = dataclasses.replace(model, tokenizer=None, eos_ids=())
    file = write(tmp_path / "a.jsonl", {"tokens": [1, 2, 3]}, {"prompt": [4], "tokens": [5, 6]}, {"text": "words"})
    rows = read_rows([file], bare, 4)
    assert rows.tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert rows.mask.tolist() == [[True, True, True, False], [False, True, True, False]]
    assert "has no tokenizer" in rows.skipped[0]


def test_batches_go_on_where_they_stopped(model, tmp_path):
    file = write(tmp_path / "a.jsonl", *({"prompt": [n], "tokens": [n, n]} for n in range(1, 8)))
    rows = read_rows([file], model, 4)
    order = lambda stream, count: [next(stream)["tokens"][:, 0].tolist() for _ in range(count)]
    stream = batches(rows, 3, seed=5)
    before = order(stream, 4)
    state = json.loads(json.dumps(stream.get_state()))
    after = order(stream, 9)
    fresh = batches(rows, 3, seed=5)
    fresh.set_state(state)
    assert order(fresh, 9) == after
    flat = [n for batch in before + after for n in batch]
    epochs = [flat[i : i + 7] for i in range(0, 35, 7)]
    assert all(sorted(epoch) == list(range(1, 8)) for epoch in epochs)  # every row once an epoch
    assert len({tuple(epoch) for epoch in epochs}) > 1  # in another order each
    assert order(batches(rows, 3, seed=6), 4) != before
    batch = next(batches(rows, 3, seed=5))
    assert batch["tokens"].shape == batch["mask"].shape == (3, 4)
