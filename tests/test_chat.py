"""`chat`: texts as a user's turn of the model's chat template, in Python and on the command line."""

import json
import shutil

import pytest

import specjax
from specjax import cli
from specjax.models import hub
from specjax.models.text import encode_text


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
