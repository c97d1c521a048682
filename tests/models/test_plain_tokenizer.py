"""Tokenizers without transformers: its results on what is shipped, and everything else from itself."""

import copy
import functools
import json
import pickle
import shutil

import pytest
from jinja2 import TemplateError

from specjax import models
from specjax.models import tokenizer
from specjax.models.messages import content_text, rendered
from specjax.models.plain_tokenizer import PlainTokenizer
from specjax.models.text import encode_text

TEXTS = (
    "",
    " ",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "a  b\t\tc\r\n\r\n   d\u00a0e \u2009f , g .",
    "na\u00efve \u5f71\u97ff \U0001f600 \u0e01\u0e33 e\u0301",
    "x<|endoftext|>y <|pad|> <|mask|> <|endoftext|><|endoftext|>",
    "1234567890 " * 300,
)  # longer than the length that a tokenizer warns of, among them


@pytest.fixture(scope="module", params=models.shipped())
def both(request):
    """The shipped tokenizer as it is loaded, and transformers'."""
    folder = models.shipped()[request.param]
    return tokenizer.load(folder), tokenizer._transformers(folder)


def test_it_gives_what_transformers_does(both, monkeypatch):
    ours, theirs = both
    assert isinstance(ours, PlainTokenizer)
    monkeypatch.setitem(vars(ours), "_load", functools.partial(pytest.fail, "transformers was asked"))
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special, verbose=False)
            assert ids == theirs(text, add_special_tokens=special, verbose=False)["input_ids"]
        for options in ({}, {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}):
            assert ours.decode(ids, **options) == theirs.decode(ids, **options)
    for ids in ([], [0], [1, 0, 5], list(range(4096)), [200, 201, 70_000]):
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.get_vocab() == theirs.get_vocab()
    assert pickle.loads(pickle.dumps(ours)).encode(TEXTS[2]) == ours.encode(TEXTS[2])


def answering(tmp_path, template: str, files: tuple[str, ...] = ()):
    """A folder of a tokenizer with a chat template, loaded both ways."""
    shutil.copytree(
        models.shipped()["tiny"],
        tmp_path,
        dirs_exist_ok=True,
        ignore=lambda _, names: [name for name in names if name[-5:] != ".json"],
    )
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    for name in files:
        (tmp_path / name).write_text("another")
    return tokenizer.load(tmp_path), tokenizer._transformers(tmp_path)


PLAIN = """{% for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools, ' ~ loop.index) }}{% endif %}
    {%- if not message.content %}{% continue %}{% endif %}
<{{ message.role }}> {{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_a_chat_template_is_rendered_without_transformers(tmp_path, monkeypatch):
    ours, theirs = answering(tmp_path, PLAIN)
    monkeypatch.setitem(vars(ours), "_load", functools.partial(pytest.fail, "transformers was asked"))
    turns = [{"role": "system", "content": " a\n"}, {"role": "user", "content": ""}, {"role": "user", "content": "<b>"}]
    for messages in (turns, turns[:1]):
        for asked in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False}):
            asked = {"tokenize": False, **asked}
            assert ours.apply_chat_template(messages, **asked) == theirs.apply_chat_template(messages, **asked)
    assert ours.chat_template == theirs.chat_template and encode_text(ours, turns, "it") == encode_text(
        theirs, turns, "it"
    )
    last = [*turns, {"role": "assistant", "content": "c "}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": text} for text in ("c", " d ")]}]
    for messages in (last, parts):  # the template trims, and reads no parts
        whole = [{**m, "content": content_text(m)} for m in messages]
        continued = theirs.apply_chat_template(whole, tokenize=False, continue_final_message=True)
        assert rendered(ours, messages, "it") == continued == rendered(theirs, messages, "it")
    said = []
    for each in (ours, theirs):
        with pytest.raises(TemplateError) as raised:
            each.apply_chat_template([{"role": "tool", "content": "a"}], tokenize=False)
        said.append(str(raised.value))
    assert said == ["no tools, 1"] * 2


@pytest.mark.parametrize(
    ("template", "files", "messages"),
    [
        ("{{ eos_token }}{{ messages[0].content }}", (), [{"role": "user", "content": "a"}]),
        ("{{ strftime_now('%Y') }}", (), [{"role": "user", "content": "a"}]),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", (), [{"role": "user", "content": "a"}]),
        ("{{ messages[0].content }}", ("chat_template.jinja",), [{"role": "user", "content": "a"}]),
        ("{{ messages | length }}", (), [{"role": "user", "content": ["a", "b"]}]),
        ("{{ messages[0].reasoning }}", (), [{"role": "user", "content": "a", "reasoning_content": "b"}]),
    ],
)
def test_templates_that_read_more_are_left_to_transformers(tmp_path, template, files, messages):
    ours, theirs = answering(tmp_path, template, files)
    assert isinstance(ours, PlainTokenizer)
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert vars(ours)["_whole"] is not None


def test_all_else_is_asked_of_transformers(both):
    loaded, theirs = both
    ours = copy.copy(loaded)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = {"add_generation_prompt": True, "tokenize": False}
    if theirs.chat_template:
        assert ours.apply_chat_template(messages, **asked) == theirs.apply_chat_template(messages, **asked)
        assert encode_text(ours, messages, "it") == encode_text(theirs, messages, "it")
    assert ours(["a b", "c"]) == theirs(["a b", "c"]) and len(ours) == len(theirs)
    assert ours.decode([[5, 6], [7]]) == theirs.decode([[5, 6], [7]]) and ours.decode(5) == theirs.decode(5)
    assert ours.encode("a", return_tensors="np").tolist() == theirs.encode("a", return_tensors="np").tolist()
    names = (
        "bos_token",
        "eos_token",
        "eos_token_id",
        "mask_token_id",
        "pad_token_id",
        "chat_template",
        "model_max_length",
    )
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    ours.add_tokens(["<new>"])
    assert (
        ours.encode("<new>") == [len(theirs)] == [ours.get_vocab()["<new>"]] and ours.decode([len(theirs)]) == "<new>"
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config", {"add_bos_token": True}),
        ("tokenizer_config", {"clean_up_tokenization_spaces": True}),
        ("tokenizer_config", {"eos_token": {"content": "<|endoftext|>", "special": True}}),
        ("tokenizer_config", {"bos_token": "<|begin|>"}),
        ("tokenizer_config", {"split_special_tokens": True}),
        ("tokenizer", {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}),
        ("special_tokens_map", {}),
        ("config", {"model_type": "qwen2"}),
        ("tokenizer", {"model": {}}),
    ],
)
def test_what_may_differ_is_left_to_transformers(tmp_path, monkeypatch, name, changes):
    folder = tmp_path / "own"
    shutil.copytree(
        models.shipped()["tiny"],
        folder,
        ignore=lambda _, names: [n for n in names if n[-5:] != ".json"],
    )
    file = folder / f"{name}.json"
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))
    monkeypatch.setattr(tokenizer, "_transformers", lambda folder: "transformers'")
    assert tokenizer.load(folder) == "transformers'"
