"""The shipped model that finds keys: what its training begins with and reads, and that it finds keys at 1k and 16k tokens."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax
from experiments.long_context import circuit
from experiments.long_context.measure import answered, line
from experiments.long_context.rows import rows
from experiments.long_context.text import OWNERS, SHIPPED, Writer, asked, told
from experiments.long_context.write import write

HERE = pathlib.Path(circuit.__file__).resolve().parent


@pytest.fixture(scope="module")
def writer():
    return Writer.shipped()


@pytest.mark.slow
def test_what_training_begins_with_finds_keys_without_its_noise(writer, tmp_path):
    write(tmp_path, writer, circuit.weights(writer, noise=0.0))
    prompts = writer.prompts("test 0", 512, 4)
    assert answered(specjax.Engine(specjax.load(tmp_path, dtype="float32")), prompts) == [True] * 4
    began = circuit.weights(writer)
    shipped = load_file(SHIPPED / "tiny-keys" / "model.safetensors")
    assert {name: x.shape for name, x in began.items()} == {name: x.shape for name, x in shipped.items()}
    assert sum(x.size for x in shipped.values()) < 3e6


def test_rows_tell_every_key_that_they_ask_for(writer):
    (text,) = rows(400, 1)
    told_part, *asked_parts = text.split(" What is the key of ")
    assert 1 <= len(asked_parts) <= 400 * 0.4 / 30 and 250 < len(writer.ids(told_part)) < 420
    for part in asked_parts:
        owner, _, answer = part.partition("?")
        assert answer.startswith(f" The key of {owner} is ") and answer.endswith(".<|end|>")
        assert told_part.count(answer.removesuffix("<|end|>")) == 1
    assert text != next(rows(400, 1, "other"))


def test_codes_are_far_from_each_other():
    found = circuit.codes(len(OWNERS), 16)
    near = found @ found.T - np.eye(len(OWNERS))
    assert near.max() < 0.25


def test_texts_tell_each_key_once(writer):
    prompts = writer.prompts("a", 600, keys=4)
    assert [one.text[: one.text.index(" What")] for one in prompts] == [
        prompts[0].text[: prompts[0].text.index(" What")]
    ] * 4
    for one in prompts:
        (owner,), (key,) = one.owners, one.keys
        assert one.text.count(told(owner, key)) == 1 and one.text.endswith(asked([owner]))
        assert one.answer == told(owner, key)
        assert 560 < len(writer.ids(one.text + one.answer)) <= 600
        assert writer.ids(one.text) == writer.tokenizer.encode(one.text).ids


def test_the_page_has_the_results():
    page = (HERE / "README.md").read_text()
    rows = [json.loads(row) for row in (HERE / "results.jsonl").read_text().splitlines()]
    assert len(rows) > 20 and all(line(row) in page for row in rows)
    plain = [row for row in rows if row["decode"] == "plain" and row["cache_dtype"] is None]
    assert [row["tokens"] for row in plain] == [1024, 4096, 16384] and min(row["low"] for row in plain) >= 0.9


def found(writer, tokens, keys, lie=False):
    model = specjax.load("tiny-keys", dtype="float32")
    prompts = writer.prompts("test 0", tokens, keys)
    if lie:  # the text tells another key than the one that is expected
        first = prompts[0]
        wrong = first.text.replace(first.answer, told(first.owners[0], f"{(int(first.keys[0]) + 1111) % 10_000:04d}"))
        prompts = [type(first)(wrong, first.answer, first.owners, first.keys), *prompts[1:]]
    return answered(specjax.Engine(model), prompts)


def test_keys_at_1k(writer):
    assert found(writer, 1024, 4) == [True] * 4


@pytest.mark.slow
def test_a_text_that_tells_another_key_is_answered_with_that(writer):
    assert found(writer, 512, 2, lie=True) == [False, True]


@pytest.mark.slow
def test_keys_at_16k(writer):
    assert sum(found(writer, 16384, 10)) >= 9
