"""Training data: what becomes of each kind of line, what is refused, and batches in an order that can be taken up again."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from support import small_training as tiny

from specjax import models
from specjax.objectives.base import Kind
from specjax.train import data
from specjax.train.data import batches, read_rows


@pytest.fixture(scope="module")
def model():
    return models.load("tiny")


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def texts(rows, model):
    """Of every document (text that is read, text that is predicted), those of a row in their order."""
    found = []
    for tokens, mask, documents in zip(rows.tokens, rows.mask, rows.documents, strict=True):
        for number in range(documents.max() + 1):
            ids, own = tokens[documents == number], mask[documents == number]
            if own.any():
                found.append((model.tokenizer.decode(ids[: own.argmax()]), model.tokenizer.decode(ids[own])))
    return found


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
    assert rows.tokens.shape[1:] == (24,) and rows.tokens.dtype == np.int32
    expected = [
        ("def f():", "\n    pass" + EOS),
        ("def f():", "\n    pass" + EOS),
        ("def f():", model.tokenizer.decode([5, 6, 7])),  # a record says itself where it ended
        ("def f():", "\n    return"),
        (f"{USER} Hi{EOS}{ASSISTANT}", " There" + EOS),
        (f"{USER} Hi{EOS}{ASSISTANT}", "There" + EOS),
    ]
    assert sorted(texts(rows, model)) == sorted(expected)
    padding = rows.documents == rows.documents.max(axis=1, keepdims=True)
    assert len(rows) < 6 and not rows.tokens[padding & ~rows.mask].any()
    unpacked = read_rows([file], model, 24, kind=Kind(packed=False))
    assert len(unpacked) == 6 and sorted(texts(unpacked, model)) == sorted(expected)


def test_every_answer_of_a_conversation_is_predicted(model, tmp_path):
    turns = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    file = write(tmp_path / "a.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    rows = read_rows([file], model, 16)
    ids, mask = rows.tokens[0], rows.mask[0]
    assert model.tokenizer.decode(ids[mask]) == f" B{EOS} D{EOS}"
    whole = "".join(f"<|{role}|> {text}{EOS}" for role, text in turns)
    assert model.tokenizer.decode(ids[: mask.nonzero()[0][-1] + 1]) == whole


class Forgetful:
    """A tokenizer whose template writes the first letter alone of every answer but the last message."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, **options):
        last = len(messages) - 1
        short = lambda i, m: m["content"][:1] if m["role"] == "assistant" and i < last else m["content"]
        text = "".join(f"<|{m['role']}|> {short(i, m)}{EOS}" for i, m in enumerate(messages))
        text += ASSISTANT if add_generation_prompt else ""
        return self._inner.encode(text, add_special_tokens=False) if tokenize else text


def test_a_template_that_rewrites_makes_a_document_a_turn(model, tmp_path):
    """Every answer is read after the conversation as it is written when that answer is due."""
    turns = [
        ("user", "A"),
        ("assistant", "Bat"),
        ("user", "C"),
        ("assistant", "Dog"),
        ("user", "E"),
        ("assistant", "F"),
    ]
    file = write(tmp_path / "a.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    rows = read_rows([file], dataclasses.replace(model, tokenizer=Forgetful(model.tokenizer)), 48)
    assert not rows.skipped
    head = f"{USER} A{EOS}{ASSISTANT}"
    later = f"{head} B{EOS}{USER} C{EOS}{ASSISTANT}"
    assert sorted(texts(rows, model)) == sorted(
        [(head, f" Bat{EOS}"), (later, f" Dog{EOS}"), (f"{later} D{EOS}{USER} E{EOS}{ASSISTANT}", f" F{EOS}")]
    )


def test_texts_share_rows(model, tmp_path):
    write(tmp_path / "a.txt", "import os")
    write(tmp_path / "b.py", "x = 1")
    write(tmp_path / "c.jsonl", {"text": "y = 2"}, {"tokens": [9, 8, 7]})
    write(tmp_path / "notes.md", "left out")
    (tmp_path / "empty.py").write_text("")
    rows = read_rows([tmp_path], model, 12, seed=1)
    said = sorted(text for _, text in texts(rows, model))
    assert said == sorted(
        f"{text}{EOS}" for text in ("import os\n", "x = 1\n", "y = 2", model.tokenizer.decode([9, 8, 7]))
    )
    assert len(rows) < 4 and not rows.tokens[~rows.mask].any()
    again = read_rows([tmp_path], model, 12, seed=1)
    assert np.array_equal(rows.tokens, again.tokens) and rows.digest == again.digest
    assert any(read_rows([tmp_path], model, 12, seed=s).digest != rows.digest for s in range(2, 6))


def test_nothing_of_a_long_example_is_lost(model, tmp_path):
    """Its answer is read after its prompt: of every row a half is what came before, and there the prompt's end comes
    first."""
    file = write(tmp_path / "a.jsonl", {"prompt": list(range(10, 19)), "tokens": list(range(20, 30))})
    rows = read_rows([file], model, 8)
    pieces = sorted(
        (tokens[mask].tolist(), tokens.tolist()) for tokens, mask in zip(rows.tokens, rows.mask, strict=True)
    )
    assert sum((own for own, _ in pieces), []) == list(range(20, 30))
    assert [whole for _, whole in pieces] == [
        [*range(15, 19), *range(20, 24)],
        [17, 18, *range(22, 28)],
        [17, 18, *range(26, 30), 0, 0],
    ]


def test_nothing_of_a_long_text_is_lost(model, tmp_path):
    rows = read_rows([write(tmp_path / "a.jsonl", {"tokens": list(range(10, 30))})], model, 8)
    assert sorted(rows.tokens[rows.mask].tolist()) == sorted([*range(10, 30), *model.eos_ids[:1]])


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
        (({"text": None},), "line 1: it needs text"),
        (({"tokens": [99999]},), "token id 99999 is outside the vocabulary of 1536"),
        (({"prompt": "", "completion": "x"},), "line 1: empty text"),
        (({"messages": []},), "line 1: messages must be a list of objects"),
        (({"messages": [{"role": "user", "content": "x"}]},), "in which the assistant answers nothing"),
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
    assert sorted(rows.tokens.tolist()) == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert sorted(rows.mask.tolist()) == [[False, True, True, False], [True, True, True, False]]
    assert "has no tokenizer" in rows.skipped[0]


def test_a_process_reads_its_own_rows_of_the_batches_of_one(monkeypatch):
    rows, read = tiny.rows(), []

    class Watched:
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            read.append(index)
            return rows[index]

    whole = batches(rows, 6, seed=5)
    monkeypatch.setattr(data, "own_rows", lambda mesh, count: np.array([2, 3]))
    own = batches(Watched(), 6, seed=5)
    for _ in range(5):  # into the second epoch
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2:4], b), next(whole), next(own))
    assert len(read) == 10 and whole.get_state() == own.get_state()


def test_batches_of_one_row_are_the_rows_of_larger_ones():
    one, three = (batches(tiny.rows(), size, seed=5) for size in (1, 3))
    for _ in range(9):  # into the second epoch
        rows = [next(one)["tokens"][0] for _ in range(3)]
        np.testing.assert_array_equal(next(three)["tokens"], rows)


def test_batches_go_on_where_they_stopped(model, tmp_path):
    file = write(tmp_path / "a.jsonl", *({"prompt": [n], "tokens": [n, n]} for n in range(1, 8)))
    rows = read_rows([file], model, 4, kind=Kind(packed=False))
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


def test_rows_in_files_are_those_in_memory(model, tmp_path, monkeypatch):
    """They are made once, and anew where the text or how it shares rows is another."""
    file = write(tmp_path / "a.jsonl", *({"prompt": [n], "tokens": [n] * n} for n in range(1, 30)), {"text": 3})
    kept = tmp_path / "kept" / "rows"
    expected, rows = read_rows([file], model, 16), read_rows([file], model, 16, folder=kept)
    assert isinstance(rows.tokens, np.memmap) and rows.digest == expected.digest and rows.skipped == expected.skipped
    assert rows.due == expected.due == expected.mask.sum()
    assert rows.counts(1536).tolist() == np.bincount(expected.tokens[expected.mask], minlength=1536).tolist()
    with monkeypatch.context() as patched:
        patched.setattr(data, "cut", None)  # nothing is tokenised
        assert read_rows([file], model, 16, folder=kept).digest == expected.digest
    assert read_rows([file], model, 12, folder=kept).digest == read_rows([file], model, 12).digest
    assert read_rows([file], model, 12, kind=Kind(packed=False), folder=kept).digest != expected.digest
    write(file, {"tokens": [7, 7]})
    assert read_rows([file], model, 12, folder=kept).tokens[0, :2].tolist() == [7, 7]
    assert [path.name for path in kept.parent.iterdir()] == ["rows"]
