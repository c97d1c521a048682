"""Which questions that a model wrote itself are kept, and what it is asked after them."""

import pytest

from experiments.smollm2 import data


def record(text, at=0, **more):
    return {"id": at, "text": text, "finish_reason": "eos", "logprobs": [-1.0, -2.0]} | more


@pytest.mark.parametrize(
    ("text", "more", "kept"),
    [
        ("Can you explain how tides work?", {}, True),
        ("Write a short poem about rain", {}, True),
        ("The flight had its share of challenges", {}, False),  # asks for nothing
        ("Can you explain how tides work?", {"finish_reason": "length"}, False),
        ("Can you explain how tides work?", {"logprobs": [-4.0, -3.0]}, False),
        ("Why is it?", {}, False),  # too short
        ("What is it what is it what is it what is it?", {}, False),  # four words thrice
        ("Can you read <|im_start|> for me?", {}, False),
    ],
)
def test_usable_questions(text, more, kept):
    assert data.usable(record(text, **more)) == kept


def test_near_duplicates_and_questions_kept_apart_are_left_out():
    long = "How do I convert a list of integers into one string in Python"
    texts = [
        "What makes bread rise in an oven?",
        f"{long}?",
        f"Please tell me: {long}, quickly?",
        "Why is the sky blue at noon?",
    ]
    kept = lambda apart: [own["text"] for own in data.kept(map(record, texts), apart)]
    assert kept(set()) == [texts[0], texts[1], texts[3]]
    assert kept(data.runs(long.upper(), 10)) == [texts[0], texts[3]]


def test_what_is_asked_after_the_first_answers():
    prompts = list(data.first_prompts([record(f"Question {i} of some?") for i in range(4)]))
    answers = [
        record("A long answer. " * 20),
        record("Rain falls. " * 30),
        record("short"),
        record("cut", finish_reason="length"),
    ]
    encode = lambda messages: [len(message["content"]) for message in messages]
    asked = list(data.second_turns(prompts, answers, encode))
    assert [line["id"] for line in asked] == [0] and len(asked[0]["prompt"]) == 2  # the fourth has no end
    more = list(data.second_prompts(prompts, answers, [record("And then?", 0)]))
    assert [line["id"] for line in more] == [4, 5] and [line["temperature"] for line in prompts] == [0, 1, 0, 1]
    assert [message["role"] for message in more[0]["messages"]] == ["user", "assistant", "user"]
    assert "Rain falls." in more[1]["messages"][0]["content"]
