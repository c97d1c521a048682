"""The shipped model that finds keys: its weights are those of its recipe, and it finds keys at 1k and 16k tokens."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax
from experiments.long_context import circuit
from experiments.long_context.measure import answered
from experiments.long_context.text import OWNERS, SHIPPED, Writer, asked, told


@pytest.fixture(scope="module")
def writer():
    return Writer.shipped()


def test_weights_are_those_of_the_recipe(writer):
    """Up to the codes' last bits, which a library of linear algebra decides."""
    own = load_file(SHIPPED / "tiny-keys" / "model.safetensors")
    made = circuit.weights(writer, writer.tokenizer.get_vocab_size())
    assert own.keys() == made.keys()
    for name, x in made.items():
        np.testing.assert_allclose(own[name].astype(np.float32), x, atol=2e-2, err_msg=name)


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
