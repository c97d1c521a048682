"""Chats: messages in the model's chat template, and `chat`, texts as a user's turn of it, in Python and on the command line."""

import json
import shutil

import pytest

import specjax
from specjax import cli
from specjax.evaluate.questions import own_questions
from specjax.jobs import jsonl
from specjax.models import chat_template, hub
from specjax.models.messages import checked
from specjax.models.text import encode_text
from specjax.search import SelfAgreement
from specjax.serve.engine import Engine
from specjax.serve.prompts import read_prompts
from specjax.serve.score import Scorer
from specjax.tasks.chat import CHAT_TEMPLATE
from specjax.train.data import read_rows


def test_a_text_is_a_users_turn(tmp_path, capsys):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    options = {"max_new_tokens": 4, "drafter": "none"}
    asked = specjax.generate("tiny", [messages, [5, 6]], **options)
    chat = specjax.generate("tiny", ["def add(a, b):", [5, 6]], chat=True, **options)
    assert [r.tokens for r in chat] == [r.tokens for r in asked] and chat[0].prompt == messages
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n" + json.dumps({"prompt": [5, 6]}) + "\n")
    words = ["generate", "--model", "tiny", "--drafter", "none", "--max-new-tokens", "4", "--chat"]
    assert cli.main([*words, "--input", str(source), "--output", str(tmp_path / "out.jsonl")]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in written] == [r.tokens for r in asked]
    assert cli.main([*words[:-1], "--input", str(source), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "chat" in capsys.readouterr().err  # the file is that of another job


KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim if part.type == 'text' else '[image]' }}{% endfor %}{% endif %}</>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Templated:
    """A tokenizer whose ids are characters, and whose template jinja renders."""

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        return chat_template.render(self.chat_template, messages, add_generation_prompt)

    def encode(self, text, add_special_tokens=True, verbose=True):
        return [ord(character) for character in text]


def said(role, *texts):
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": texts[0] if len(texts) == 1 else parts}


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    (
        (KEEPS, [said("user", " a ", "b")], "<|im_start|>user\n a b<|im_end|>\n<|im_start|>assistant\n"),
        (PARTS, [said("user", " a ", "b")], "<user>ab</>\n<assistant>"),  # it trims every part
        (CHAT_TEMPLATE, [said("user", " a ", "b")], "<|user|> a b<|end|><|assistant|>"),
        (
            KEEPS,
            [said("user", "a"), said("assistant", "b ")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb ",
        ),
        (CHAT_TEMPLATE, [said("user", "a"), said("assistant", "b ")], "<|user|> a<|end|><|assistant|> b"),
        (CHAT_TEMPLATE, [said("user", "a"), said("assistant", "b", " c")], "<|user|> a<|end|><|assistant|> b c"),
        (PARTS, [said("user", "a"), said("assistant", "b", "c")], "<user>a</>\n<assistant>bc"),
        (KEEPS, [said("user", "a"), said("assistant", "")], "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
    ),
)
def test_parts_and_a_last_message_of_the_assistants(template, messages, text):
    """What `apply_chat_template` of transformers gives of these texts, with `continue_final_message` where the last is such."""
    assert "".join(map(chr, encode_text(Templated(template), messages, "it"))) == text


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}


@pytest.mark.parametrize(
    ("messages", "error"),
    (
        (
            [{"role": "user", "content": [*said("user", "a", "b")["content"], IMAGE]}],
            "part 3 of message 1 is 'image_url'",
        ),
        ([said("user", "a"), {"role": "user", "content": ["b"]}], "part 1 of message 2 is 'b'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part 1 of message 1 has no text"),
        ([{"role": "user", "content": {"text": "a"}}], "the content of message 1 must be text or a list of parts"),
        ([{"role": "user", "content": None}], "the content of message 1 must be text or a list of parts, not None"),
        (
            [said("user", "a"), said("assistant", "<think>b</think>c")],
            "does not write the last message in a way that can be continued",
        ),
    ),
)
def test_content_that_no_template_is_given(messages, error):
    """Wherever messages are read."""
    forgets = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    tokenizer = Templated(forgets)
    with pytest.raises(ValueError, match=error):
        encode_text(tokenizer, messages, "it")
    if "continued" not in error:
        with pytest.raises(ValueError, match=error):
            checked(tokenizer, messages, "it")


def test_every_reader_of_messages_reads_parts(tmp_path, monkeypatch):
    """A line of prompts, of pairs, of questions and of training text, and Python: as if the texts were one."""
    model = specjax.models.load("tiny")
    parts, whole = (
        [said("user", "Say ", "yes."), said("assistant", " y")],
        [said("user", "Say yes."), said("assistant", " y")],
    )
    engine = Engine(model, drafter="none")
    ids = model.tokenizer.encode("<|user|> Say yes.<|end|><|assistant|> y", add_special_tokens=False)
    read = []
    for name, messages in (("parts", parts), ("whole", whole)):
        line = jsonl.from_object(1, {"messages": messages})
        (request,) = jsonl.to_requests([line], engine, {})
        (question,) = own_questions([{"messages": messages, "answer": "yes"}])
        pair = Scorer(engine).pair(messages, "es")
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"messages": [*messages[:1], said("assistant", "yes")]}) + "\n")
        rows = read_rows([file], model, 16)
        assert not rows.skipped
        prompts = [prompt for prompt, _ in read_prompts(messages)]
        read.append([request.ids, engine.encode(question.prompt), pair.ids[: pair.first], rows.tokens.tolist()])
        assert [list(engine.encode(prompt)) for prompt in prompts] == [ids] == [list(own) for own in read[-1][:1]]
    assert read[0] == read[1]
    bad = [{"role": "user", "content": [IMAGE]}]
    (failed,) = jsonl.to_requests([jsonl.from_object(1, {"messages": bad})], engine, {})
    assert "part 1 of message 1 is 'image_url', and tiny reads text alone" in failed.error
    file.write_text(
        json.dumps({"messages": [*bad, said("assistant", "yes")]}) + "\n" + json.dumps({"text": "a b"}) + "\n"
    )
    assert "part 1 of message 1 is 'image_url'" in read_rows([file], model, 16).skipped[0]
    with pytest.raises(ValueError, match="the last message is the assistant's, and a question follows it"):
        SelfAgreement(samples=1)(model, [whole])
    asked = SelfAgreement(samples=1).question(parts[:1], [""])
    assert asked[0]["content"].startswith("Say yes.") and "type" not in asked[0]["content"]


def test_a_model_without_a_chat_template_says_so(tmp_path, monkeypatch):
    """And names the shipped ones that have one."""
    model = specjax.models.load("tiny")
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        specjax.generate(model, "def add(a, b):", chat=True)
    for name, drop in (("talks", ""), ("completes", "chat_template")):
        shutil.copytree(hub.shipped()["tiny"], tmp_path / name)
        file = tmp_path / name / "tokenizer_config.json"
        said = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in said.items() if key != drop}))
    monkeypatch.setattr(hub, "_PRETRAINED", tmp_path)
    with pytest.raises(ValueError, match=r"choose a model that chats \(shipped: talks\)"):
        encode_text(model.tokenizer, [{"role": "user", "content": "def add(a, b):"}], "completes")
