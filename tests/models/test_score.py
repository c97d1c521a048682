"""Scores are those of transformers, whatever the batch and the mesh; where a continuation begins; `specjax score`."""

import functools
import gzip
import io
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

import specjax
from specjax import cli, models
from specjax.serve.engine import Engine
from specjax.serve.score import Scorer, encode_pair
from specjax.serve.text_reader import CHUNK, Reading, score_program

SHAPES = [(1, 1), (1, 9), (CHUNK + 6, 5), (3, CHUNK + 30), (CHUNK, 1), (20, CHUNK - 20), (7, 3)]
"""Tokens of prompt and continuation: within a chunk, up to its end, over two, and after one of prompt alone."""


@functools.cache
def load(folder):
    return models.load(folder, dtype="float32")


def asked(shapes, seed=0):
    """Random prompts and continuations of these lengths."""
    rng = np.random.default_rng(seed)
    some = [[rng.integers(0, 128, size).tolist() for size in shape] for shape in shapes]
    return [before for before, _ in some], [after for _, after in some]


def wanted(reference, before, after):
    """Log-probabilities `[T, V]` of what follows every token of `before + after` but the last, where `after` is predicted."""
    logits = reference.logits(np.asarray([before + after]))[0, len(before) - 1 : -1]
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=1))


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_scores_are_those_of_transformers(references, name):
    reference = references(name)
    prompts, continuations = asked(SHAPES)
    for i, count in ((1, 3), (6, 2)):  # these begin as greedy decoding does: the first not to its end, the second whole
        for at in range(count + (i == 6)):
            continuations[i][at] = int(wanted(reference, prompts[i], continuations[i][: at + 1])[at].argmax())
    scores = specjax.score(load(reference.folder), prompts, continuations)
    for before, after, score in zip(prompts, continuations, scores, strict=True):
        dists = wanted(reference, before, after)
        np.testing.assert_allclose(score.logprobs, dists[np.arange(len(after)), after], atol=1e-4)
        assert score.logprob == pytest.approx(sum(score.logprobs)) and score.tokens == after
        assert score.greedy == (dists.argmax(axis=1) == after).all()
    assert scores[6].greedy and not scores[1].greedy and scores[1].prompt == prompts[1]


@pytest.mark.slow
def test_batch_order_and_mesh_are_rounding(references):
    model = load(references("llama3").folder)
    prompts, continuations = asked(SHAPES)
    alone = [specjax.score(model, [p], [c], batch_size=1)[0] for p, c in zip(prompts, continuations, strict=True)]
    backwards = specjax.score(model, prompts[::-1], continuations[::-1], batch_size=3)[::-1]
    on_mesh = specjax.score(model, prompts, continuations, mesh="data=2,model=2,context=2")
    for wanted, *others in zip(alone, backwards, on_mesh, strict=True):
        for other in others:
            np.testing.assert_allclose(other.logprobs, wanted.logprobs, atol=2e-5)
            assert other.greedy == wanted.greedy


def test_other_texts_of_such_lengths_compile_nothing(references):
    model = load(references("llama3").folder)
    specjax.score(model, *asked([(5, 5), (30, 9), (2, 50)]))
    compiled = score_program._cache_size()
    again = specjax.score(model, *asked([(9, 3), (40, 2), (1, 1), (CHUNK, 1)], seed=1))
    assert score_program._cache_size() == compiled and len(again) == 4


def test_there_are_never_logits_of_a_whole_text(references):
    model = load(references("llama3").folder)
    rows, width = 2, 4 * CHUNK
    tokens, row = jnp.zeros((rows, width + 1), jnp.int32), jnp.ones(rows, jnp.int32)
    text = str(jax.make_jaxpr(Reading(model.lm, None))(model.params, tokens, row, width * row))
    assert f"f32[{rows},{CHUNK},128]" in text and f"[{rows},{width},128]" not in text


@pytest.mark.parametrize(
    ("prompts", "continuations", "said"),
    [
        (None, ["a"], "prompts are a list"),
        ([[1]], 5, "continuations are a list"),
        ([[1], [2]], [[3]], "there are 2 prompts and 1 continuations"),
        ([], [[3]], "there are 0 prompts and 1 continuations"),
        ([[1], [2]], [[3], []], "pair 2 of 2: the continuation is empty"),
        ([[]], [[3]], "pair 1 of 1: the prompt is empty, and .* has no BOS token to begin with: give"),
        ([[1]], [[128]], "continuation id 128 is outside the vocabulary of 128 tokens"),
        ([[-1]], [[1]], "prompt id -1 is outside the vocabulary"),
        ([[1]], [[1.5]], "a continuation is a string, a list of token ids"),
        ([[1]], [[{"role": "user", "content": "a"}]], "a continuation is a string or a list of token ids"),
        ([[1]], ["a"], "has no tokenizer"),
        ([[1] * 156], [[1] * 101], "156 tokens of prompt and 101 of continuation are more than the 256 positions"),
        ([[1] * 300], [[1]], "shorten the prompt"),
    ],
)
def test_what_cannot_be_scored(references, prompts, continuations, said):
    with pytest.raises(ValueError, match=said):
        specjax.score(load(references("llama3").folder), prompts, continuations)


def test_nothing_and_the_longest(references):
    model = load(references("llama3").folder)
    assert specjax.score(model, [], []) == [] and specjax.score(model, [1, 2], []) == []
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        specjax.score(model, [[1]], [[1]], batch_size=0)
    scorer = Scorer(Engine(model))
    assert len(scorer.pair([1] * 156, np.asarray([1] * 100)).ids) == 256
    one, other = specjax.score(model, [1, 2], [[3], [4]])  # one prompt for all
    assert one.prompt == other.prompt == [1, 2] and one.tokens == [3]
    every = [score.logprob for score in specjax.score(model, [5], [[i] for i in range(128)])]
    assert abs(np.logaddexp.reduce(every)) < 1e-5


def words(bos=None):
    """A tokenizer of letters and spaces, and of the pairs "ab" and " a"."""
    pieces = ["<s>", *"abcd ", "ab", " a"]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b"), (" ", "a")])
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos)


def with_words(**options):
    tokenizer, lm = words(**options), SimpleNamespace(vocab_size=8)
    model = SimpleNamespace(tokenizer=tokenizer, name="words", lm=lm, masked=None, canvas=None, any_subset=False)
    engine = object.__new__(Engine)
    engine.model = SimpleNamespace(**vars(model), max_length=100)
    return engine


@pytest.mark.parametrize(
    ("prompt", "continuation", "cut"),
    [
        ("cd", "ca", ("cd", "ca")),
        ("cd", " a", ("cd", " a")),
        ("cd ", "a", ("cd", " a")),  # the space goes over, into the token that holds it
        ("cd  ", "a", ("cd", "  a")),
        ("ca", "bd", ("ca", "bd")),  # "cabd" is c, ab, d: the continuation alone, and the prompt as it is
        (" ", "a", ("<s>", " a")),
        ("", "ab", ("<s>", "ab")),
        ([], "ab", ("<s>", "ab")),
        ([3], "ab", ("c", "ab")),
        ("ab", [4], ("ab", "d")),
        ("c ", [4], ("c ", "d")),  # ids are what they are, and so is what they follow
    ],
)
def test_the_border_between_prompt_and_continuation(prompt, continuation, cut):
    engine = with_words(bos="<s>")
    before, after = encode_pair(engine, prompt, continuation)
    text = lambda ids: "".join(engine.model.tokenizer.convert_ids_to_tokens(list(ids)))
    assert (text(before), text(after)) == cut
    assert 0 not in after


def test_an_empty_prompt_without_bos_and_text_that_is_none():
    with pytest.raises(ValueError, match="the prompt is empty, and words has no BOS"):
        encode_pair(with_words(), "  ", "ab")
    with pytest.raises(ValueError, match="the continuation is not valid Unicode"):
        encode_pair(with_words(), "a", "\ud800")
    with pytest.raises(ValueError, match="the continuation is empty"):
        encode_pair(with_words(), "a ", "")


GOOD = [{"prompt": [1, 2], "continuation": [3, 4], "id": "x"}, {"prompt": [5], "continuation": [6] * 70, "colour": 1}]
BAD = [
    ({"prompt": [5]}, "it has no continuation"),
    ({"prompt": [5], "continuation": {}}, "continuation must be a string or a list of token ids, got an object"),
    ({"prompt": [5], "continuation": [500]}, "continuation id 500 is outside the vocabulary"),
    ({"messages": [], "continuation": [5]}, "the messages are empty"),
    ({"prompt": [], "continuation": [5]}, "the prompt is empty"),
    ({"prompt": [1], "continuation": [5], "id": 1.5}, "id must be a string or an integer"),
    ([1], "not a JSON object"),
]


@pytest.fixture
def files(references, tmp_path):
    """The options of a command, its input and the scores that it ought to give."""
    folder = references("llama3").folder
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in [GOOD[0], *[line for line, _ in BAD], GOOD[1]]))
    scores = specjax.score(load(folder), [line["prompt"] for line in GOOD], [line["continuation"] for line in GOOD])
    return ["score", "--model", str(folder), "--dtype", "float32"], source, scores


def test_the_command(files, tmp_path, capsys):
    words, source, scores = files
    target = tmp_path / "scores.jsonl.gz"
    assert cli.main([*words, "--input", str(source), "--output", str(target)]) == 1
    records = [json.loads(line) for line in gzip.open(target)]
    assert [record["line"] for record in records] == list(range(1, len(BAD) + 3))
    good = [record for record in records if "error" not in record]
    assert [record["logprob"] for record in good] == pytest.approx([score.logprob for score in scores], abs=1e-5)
    assert good[0].keys() == {"prompt", "continuation", "logprob", "logprobs", "tokens", "greedy", "id", "line"}
    assert good[0]["id"] == "x" and good[1]["tokens"] == [6] * 70 and len(good[1]["logprobs"]) == 70
    said = capsys.readouterr().err
    for record, (_, why) in zip(records[1:-1], BAD, strict=True):
        assert why in record["error"] and record["logprob"] is None
        assert f"line {record['line']}: {record['error']}" in said
    assert "fields without a meaning here are left out: 'colour'" in said
    assert "2 continuations of 72 tokens" in said

    written = target.read_bytes()
    assert cli.main([*words, "--input", str(source), "--output", str(target)]) == 1
    assert "9 of 9 records are in" in capsys.readouterr().err and target.read_bytes() == written
    assert cli.main([*words, "--input", str(source), "--strict"]) == 2
    assert "line 2: it has no continuation" in capsys.readouterr().err


def test_a_killed_command_goes_on_to_the_same_bytes(references, tmp_path, capsys):
    source, target = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    lines = [{"prompt": p, "continuation": c} for p, c in zip(*asked(SHAPES), strict=True)]
    lines.insert(2, {"prompt": [1]})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["score", "--model", str(references("llama3").folder), "--dtype", "float32", "--batch-size", "2"]
    words += ["--input", str(source), "--output", str(target)]
    assert cli.main(words) == 1
    whole = target.read_bytes()
    for kept in (1, 4):
        at = len(b"".join(whole.splitlines(True)[:kept])) + 20  # a record and a part of the next
        target.write_bytes(whole[:at])
        assert cli.main(words) == 1
        assert f"{kept} of 8 records are in" in capsys.readouterr().err and target.read_bytes() == whole
    source.write_text(json.dumps(lines[0]) + "\n")
    assert cli.main(words) == 2
    assert "belongs to another job, which differs in input" in capsys.readouterr().err
    target.with_name("scores.jsonl.job.json").unlink()
    assert cli.main(words) == 2
    assert "exists, and there is no" in capsys.readouterr().err


def test_the_command_reads_stdin_and_prints(files, monkeypatch, capsys):
    words, _, scores = files
    text = "".join(json.dumps(line) + "\n" for line in GOOD).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text), isatty=lambda: False))
    assert cli.main([*words, "--input", "-", "--batch-size", "1"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["logprob"] for record in printed] == pytest.approx([score.logprob for score in scores], abs=1e-5)
