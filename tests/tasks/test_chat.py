"""The chat template, as tokenizers render it, and the command that prints tasks."""

import json
import os
import subprocess
import sys

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specjax.tasks import CHAT_TEMPLATE, FAMILIES, TURN_TOKENS, check, generate, messages
from specjax.tasks.__main__ import main
from specjax.tasks.chat import render

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Say yes.\n"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "Again"},
]


@pytest.mark.parametrize("prompting", (True, False))
def test_transformers_renders_the_same(prompting):
    (text,), _ = render_jinja_template([TALK], chat_template=CHAT_TEMPLATE, add_generation_prompt=prompting)
    turns = "<|system|> Be brief.<|end|><|user|> Say yes.<|end|><|assistant|> yes<|end|><|user|> Again<|end|>"
    assert text == render(TALK, prompting) == turns + "<|assistant|>" * prompting


def test_a_question_as_chat():
    (question,) = generate("math", 1, 0, 1)
    asked, answered = render(messages(question)), render(messages(question, answered=True), False)
    assert answered.startswith(asked) and answered == f"{asked} {question.answers[0]}<|end|>"
    assert all(token not in question.prompt for token in TURN_TOKENS) and asked.count("<|") == 3


def test_an_unknown_role():
    with pytest.raises(ValueError, match="a role is system, user or assistant, not tool"):
        render([{"role": "tool", "content": "x"}])


def test_the_command_prints_questions(capsys):
    words = ["--family", "fill", "--level", "2", "--seed", "1", "--count", "3"]
    assert main([*words, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    questions = generate("fill", 2, 1, 3)
    assert [record["prompt"] for record in records] == [q.prompt for q in questions]
    assert all(check(q, record["answers"][0]) for q, record in zip(questions, records, strict=True))
    assert [("left" in record) for record in records] == [q.infill is not None for q in questions]
    assert main(words) == 0 and questions[0].prompt in capsys.readouterr().out
    assert main(["--split", "train"]) == 0 and capsys.readouterr().out.count("\n--> ") == 30


@pytest.mark.parametrize(
    ("words", "said"),
    ((["--family", "frob"], "unknown family 'frob'; choose math"), (["--count", "-1"], "count must be at least 0")),
)
def test_what_the_command_cannot_use(capsys, words, said):
    assert main(words) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_another_process_makes_the_same_questions():
    """Sets and hashes differ between processes; questions do not."""
    code = "import json; from specjax.tasks import *; print(json.dumps([generate(f, 3, 0, 1)[0].prompt for f in FAMILIES]))"
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=True)
    assert json.loads(done.stdout) == [generate(family, 3, 0, 1)[0].prompt for family in FAMILIES]
