"""Tokenizers without transformers: its results on what is shipped, and everything else from itself. Tokenizers without a
`tokenizer.json`: the results of the packages whose files they have."""

import base64
import copy
import functools
import json
import pickle
import random
import shutil

import pytest
from jinja2 import TemplateError

from specjax import models
from specjax.jobs.manifest import fingerprint
from specjax.models import ModelError, tokenizer
from specjax.models.gguf.splits import SPLITS
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


PIECES = (
    "a", "b", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'", "1", "23", "4567", "\u00e9", "e\u0301", "\u65e5", "\u042f",
    "\u044f", "!", "_", "-", "/", "def ", "Hello", "world", "return ", ".", "\u00a0", "\u3000", "\U0001f600", "A", "Zz",
)  # fmt: skip


def drawn(count: int = 40) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 14))) for _ in range(count)]


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    """Bytes in the order of their ranks: every byte, and what the shipped model's merges make of them."""
    model = json.loads((models.shipped()["tiny"] / "tokenizer.json").read_text())["model"]
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    byte = {chr(i if i in visible else next(spare)): i for i in range(256)}
    made = [bytes(byte[letter] for letter in "".join(pair)) for pair in model["merges"]]
    return list(dict.fromkeys([*(bytes([i]) for i in range(256)), *made]))


def written(folder, kind="x", **files):
    """A folder with a config and these files; a dict is JSON."""
    folder.mkdir()
    for name, text in {"config.json": {"model_type": kind}, **files}.items():
        (folder / name).write_text(json.dumps(text) if isinstance(text, dict) else text)
    return folder


def lines(ranks) -> str:
    return "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks))


def tekken(ranks, special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), count=30, **more):
    """Mistral's file: one token more than its size counts, and room for special tokens."""
    listed = {
        "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(special)]
    }
    vocab = [{"rank": i, "token_bytes": base64.b64encode(x).decode(), "token_str": None} for i, x in enumerate(ranks)]
    config = {"pattern": SPLITS["tekken"][0], "default_vocab_size": len(ranks) - 1 + count}
    config |= {"num_vocab_tokens": len(ranks), "default_num_special_tokens": count, "version": "v3"}
    return {"config": config, "vocab": vocab, **(listed if special else {}), **more}


@pytest.mark.slow
@pytest.mark.covers("models", "ranked_tokenizer", "splits")
def test_tiktoken_files(ranks, tmp_path, monkeypatch):
    """Against the package, whose encodings bring the patterns and the special tokens."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed: pip install tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {piece: i for i, piece in enumerate(ranks)})
    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base", "o200k_harmony"):
        made = public.ENCODING_CONSTRUCTORS[name]()
        made.pop("explicit_n_vocab", None)  # the shipped model's ranks are fewer
        theirs, file = tiktoken.Encoding(**made), f"{name.replace('harmony', 'base')}.tiktoken"
        kind = "gpt_oss" if name == "o200k_harmony" else "x"
        ours = tokenizer.load(written(tmp_path / name, kind, **{file: lines(ranks)}))
        for text in drawn(2000):
            assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text
        words = "a<|endoftext|>b"
        assert ours.encode(words) == theirs.encode(words, allowed_special="all") and ours.eos_token == "<|endoftext|>"
        vocab = {
            token: i for token, i in made["special_tokens"].items() if token != "<|reserved_200018|>"
        }  # twice named
        assert vocab.items() <= ours.get_vocab().items()


def test_qwens_tiktoken_file(ranks, tmp_path):
    """By hand: text is composed first, each digit is a word; the special tokens are those that the folder lists."""
    listed = {"2000": {"content": "<|endoftext|>", "special": True}, "2003": {"content": "<think>", "special": False}}
    settings = {
        "added_tokens_decoder": listed,
        "auto_map": {"AutoTokenizer": ["x.Y", None]},
        "chat_template": "{{ 1 }}",
    }
    files = {"qwen.tiktoken": lines([*ranks, b"12"]), "tokenizer_config.json": settings}
    made = tokenizer.load(written(tmp_path / "own", "qwen3", **files))
    assert made.encode("e\u0301") == made.encode("\u00e9") and made.encode("12") == [49, 50]
    ids = made.encode("a<think>b<|endoftext|>")
    assert ids == [97, 2003, 98, 2000] and made.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert made.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "1"
    plain = tokenizer.load(written(tmp_path / "plain", **{"qwen.tiktoken": lines(ranks)}))
    assert plain.encode("a<|im_end|><|endoftext|>") == [97, 151645, 151643]
    before = fingerprint(tmp_path / "plain")  # a job that another tokenizer began does not go on
    (tmp_path / "plain" / "qwen.tiktoken").write_text(lines(ranks[:-1]))
    assert fingerprint(tmp_path / "plain") != before


def test_a_tekken_file(ranks, tmp_path):
    """By hand, with the chat templates that lie beside it."""
    files = {"tekken.json": tekken(ranks), "chat_template.jinja": "{{ bos_token }}!"}
    made = tokenizer.load(written(tmp_path / "own", "mistral", **files))
    assert made.encode("A[INST]") == [1, 30 + 65, 3] and made.decode([1, 95, 2], skip_special_tokens=True) == "A"
    assert (made.bos_token, made.eos_token, made.unk_token, made.pad_token) == ("<s>", "</s>", "<unk>", None)
    assert made.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s>!"
    older = {"tekken.json": tekken(ranks, special=()), "chat_template.json": {"chat_template": "{{ eos_token }}?"}}
    bare = tokenizer.load(written(tmp_path / "bare", **older))
    assert [bare.convert_ids_to_tokens(i) for i in (2, 3, 11, 19, 20, 29)] == [
        "</s>", "[INST]", "<pad>", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>",
    ]  # fmt: skip
    assert bare.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "</s>?"


@pytest.mark.slow
@pytest.mark.covers("models", "ranked_tokenizer", "splits")
def test_a_tekken_file_as_transformers_reads_it(ranks, tmp_path):
    """Its converter begins no text with a token."""
    converters = pytest.importorskip("transformers.integrations.mistral.tokenizer", reason="transformers is too old")
    folder = written(tmp_path / "own", "mistral", **{"tekken.json": tekken(ranks)})
    ours, theirs = tokenizer.load(folder), converters.MistralConverter(str(folder / "tekken.json")).converted()
    for text in (*drawn(2000), "a[INST] b</s>"):
        assert ours.encode(text) == [1, *theirs.encode(text).ids]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.slow
@pytest.mark.covers("models", "ranked_tokenizer", "splits")
def test_a_tekken_file_as_mistral_reads_it(ranks, tmp_path):
    theirs = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", reason="mistral-common is not installed")
    for name, special in (("own", ("<unk>", "<s>", "</s>", "[INST]")), ("bare", ())):
        folder = written(tmp_path / name, **{"tekken.json": tekken(ranks, special)})
        ours, want = tokenizer.load(folder), theirs.Tekkenizer.from_file(folder / "tekken.json")
        for text in drawn(2000):
            assert ours.encode(text) == want.encode(text, True, False)
        assert [ours.convert_ids_to_tokens(i) for i in range(30)] == [want.id_to_piece(i) for i in range(30)]


def test_a_vocabulary_and_its_merges(tmp_path, caplog):
    """The class that the folder names or the model's type has, else GPT-2's, against that class itself."""
    transformers = pytest.importorskip("transformers")
    model = json.loads((models.shipped()["tiny"] / "tokenizer.json").read_text())["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    files = {"vocab.json": model["vocab"], "merges.txt": merges}
    pairs = {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}
    gpt2, qwen2 = (getattr(transformers, f"{name}Tokenizer")(**pairs) for name in ("GPT2", "Qwen2"))
    named = {
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2TokenizerFast",
            "eos_token": "<|end|>",
            "chat_template": "{{ 1 }}",
        }
    }
    for kind, more, want in (
        ("granite", named, gpt2),
        ("qwen3", {}, qwen2),
        ("qwen3", named, gpt2),
        ("gemma2", {}, gpt2),  # whose own class reads other files
    ):
        folder = written(tmp_path / f"{kind}{len(more)}", kind, **files, **more)
        ours = tokenizer.load(folder)
        assert [ours.encode(text) for text in drawn()] == [want.encode(text) for text in drawn()]
        assert bool(ours.chat_template) == bool(more) and (not more or ours.eos_token == "<|end|>")
        assert ("words are cut as by GPT-2" in caplog.text) == (kind == "gemma2")
    assert ours.eos_token is None and len(ours) == len(model["vocab"])


@pytest.mark.parametrize(
    ("kind", "files", "said"),
    [
        ("x", {"tekken.json": {"config": {}}}, "tekken.json cannot be read .it lacks 'vocab'"),
        ("x", {"tekken.json": "["}, "tekken.json"),
        ("x", {"tekken.json": tekken([b"a"] * 9)}, "tekken.json cannot be read .a token is there twice"),
        ("x", {"tekken.json": tekken([b"a", b"ab", b"b"])}, "tekken.json cannot be read .255 bytes have no token"),
        ("x", {"tekken.json": tekken([], count=3)}, "5 special tokens and 0 others are not the 2 of its config"),
        ("x", {"o200k_base.tiktoken": "YQ== 0\nYQ==\n"}, "o200k_base.tiktoken cannot be read .not enough values"),
        ("x", {"o200k_base.tiktoken": "YQ== 0\nYQ== 1\n"}, "o200k_base.tiktoken cannot be read .a token is there twice"),
        ("x", {"o200k_base.tiktoken": "?? 0\n"}, "o200k_base.tiktoken cannot be read"),
        ("x", {"own.tiktoken": ""}, "own.tiktoken does not say how words are cut: known are r50k_base.tiktoken, "),
        ("x", {"a.tiktoken": "", "b.tiktoken": ""}, "has several vocabularies, a.tiktoken, b.tiktoken: leave one"),
        ("qwen2", {"vocab.json": "[", "merges.txt": ""}, "vocab.json"),
        ("qwen2", {"vocab.json": {"a": 0}, "merges.txt": "a b c"}, "vocab.json cannot be read"),
        (
            "qwen2",
            {"vocab.json": {"a": 0}, "merges.txt": "", "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}},
            "tokenizer_class LlamaTokenizer does not read vocab.json and merges.txt",
        ),
    ],
)  # fmt: skip
def test_a_wrong_vocabulary_is_one_line(tmp_path, kind, files, said):
    with pytest.raises(ModelError, match=said) as error:
        tokenizer.load(written(tmp_path / "own", kind, **files))
    assert "\n" not in str(error.value)
