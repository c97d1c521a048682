"""Diffusion models through the engine and the command line: completing, infilling, and what is refused."""

import dataclasses
import json
import types

import jax
import pytest
from support.shapes import changed

from specjax import cli, models
from specjax.assembly.registry import CACHES, UNMASKS, make_cache, make_unmask
from specjax.decode import Beam, Decode, Diffusion, SoftThinking, Speculate
from specjax.models import LlamaLM, Masked, llama_config
from specjax.serve.engine import Engine

MASK = 23
CONFIG = llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=64)


def save(folder, diffusion, config=CONFIG):
    lm = LlamaLM(config)
    params = jax.tree.map(lambda leaf: 4 * leaf, lm.init(jax.random.key(0)))
    models.save(folder, lm, params, eos_ids=(0,), diffusion=diffusion)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A diffusion model without a tokenizer."""
    return save(tmp_path_factory.mktemp("models") / "tiny", Masked(MASK, False))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "plain", None)


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(str(tiny), decode=Diffusion(unmask="threshold:threshold=0.5", block_length=8, cache="dual"))


@pytest.mark.slow
def test_completing_does_not_depend_on_the_batch(engine):
    requests = [
        engine.request(ids, max_new_tokens=16, ignore_eos=True) for ids in ([1, 2, 3], [4], [5, 6], [7, 8, 9, 10])
    ]
    together = list(engine.run(requests, batch_size=4))
    assert [r.tokens for r in engine.run(requests, batch_size=1)] == [r.tokens for r in together]
    for record in together:
        assert record.new_tokens == 16 and MASK not in record.tokens and record.finish_reason == "length"
        assert sum(n * count for n, count in enumerate(record.accepted)) == 16
        assert record.steps == sum(record.accepted) <= 16


@pytest.mark.slow
def test_any_number_of_new_tokens(engine):
    """The last block of a text is cut; what comes before it is of blocks from the prompt's end, as in Python."""
    for count in (3, 20):
        (record,) = engine.run([engine.request([1, 2, 3], max_new_tokens=count, ignore_eos=True)])
        assert record.new_tokens == count and MASK not in record.tokens and record.finish_reason == "length"
        assert sum(n * times for n, times in enumerate(record.accepted)) == count


def test_filling_in_before_a_suffix(engine):
    request = engine.request([1, 2], suffix=[9, 8, 7], max_new_tokens=5, ignore_eos=True)
    (record,) = engine.run([request])
    assert record.new_tokens == len(record.tokens) == 5 and record.suffix == [9, 8, 7]
    (other,) = engine.run([engine.request([1, 2], suffix=[3, 3, 3], max_new_tokens=5, ignore_eos=True)])
    (open_end,) = engine.run([engine.request([1, 2], max_new_tokens=5, ignore_eos=True)])
    assert record.tokens != other.tokens != open_end.tokens  # the suffix is seen


def test_a_stream_brings_the_new_text_alone(engine):
    from specjax.decoder import stream

    request = engine.request([1, 2], suffix=[9, 8, 7], max_new_tokens=5, ignore_eos=True)
    state = engine.start([request])
    tokens = [t for progress in stream(engine.decoder, engine.params, state, 1) for t in progress.tokens[0]]
    (record,) = engine.run([request])
    assert tokens[:5] == record.tokens and tokens[5:] == [9, 8, 7]


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    (
        ([1, MASK], {}, r"the prompt holds the mask token \(id 23\)"),
        ([1], {"suffix": [MASK]}, "the suffix holds the mask token"),
        ([1], {"suffix": []}, "the suffix is empty"),
        (
            [1],
            {"suffix": [2] * 60, "max_new_tokens": 8},
            "the suffix is too long: 1 tokens of prompt, 8 new ones and 60",
        ),
        ([1], {"repetition_penalty": 1.2}, "no repetition_penalty"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
    ),
)
def test_a_bad_request_is_one_clear_error(engine, prompt, options, said):
    with pytest.raises(ValueError, match=said):
        engine.request(prompt, **options)


def test_an_answer_beyond_the_canvas_is_one_clear_error(tiny):
    engine = Engine(str(tiny), decode=Diffusion(unmask="prophet:answer=12,length=5+fixed", block_length=8))
    with pytest.raises(
        ValueError, match="up to place 16 of the new text, which has 16 places: ask for at least 17 new tokens"
    ):
        engine.request([1, 2], max_new_tokens=16)
    with pytest.raises(ValueError, match="which has 4"):  # a text ends where the model's positions do
        engine.request([1] * 60, max_new_tokens=20)
    with pytest.raises(ValueError, match="which has 11"):
        engine.request([1, 2], suffix=[3, 4, 5], max_new_tokens=8)
    engine.request([1, 2], max_new_tokens=17)


def test_the_end_of_a_turn_is_doubted_too(tiny):
    """LLaDA's own ids, without a tokenizer; the id of the token of that name, where there is one; and once only."""
    how = Masked(126336, False)
    model = models.Model(LlamaLM(changed(CONFIG, vocab_size=126464)), None, None, (126081,), masked=how)
    doubted = lambda model: Diffusion(ends="doubted").bind(model)[0].doubted
    assert doubted(model) == (126081, 126348)
    assert Diffusion(ends="never").bind(model)[0].never == (126081,)
    words = {"a": 0, "<|eot_id|>": 7}
    named = dataclasses.replace(
        models.load(tiny), tokenizer=types.SimpleNamespace(get_vocab=lambda: words), eos_ids=(3,)
    )
    assert doubted(named) == (3, 7)
    assert doubted(dataclasses.replace(named, eos_ids=(3, 7))) == (3, 7)
    assert doubted(dataclasses.replace(named, tokenizer=None)) == (3,)


@pytest.mark.parametrize(
    ("which", "options", "said"),
    (
        (
            "tiny",
            Speculate("prompt_lookup"),
            "tiny is a diffusion model, and drafts are verified by an autoregressive one",
        ),
        ("tiny", SoftThinking(), "tiny is a diffusion model, and soft thinking needs an autoregressive one"),
        ("tiny", Beam(2), "tiny is a diffusion model, and a beam search writes from left to right"),
        ("plain", Diffusion("threshold"), "plain is an autoregressive model, which has no canvas to unmask"),
        ("tiny", {"unmask": "frob"}, "unknown unmask policy 'frob'; choose threshold"),
        ("tiny", {"unmask": "fixed+threshold"}, "'fixed' cannot stand before another"),
        ("tiny", {"cache": "frob"}, "unknown cache 'frob'; choose none"),
        ("tiny", {"block_length": 0}, "block_length must be at least 1"),
        ("tiny", {"unmask": "credit+free_dave"}, "Credit cannot stand before FreeDave"),
        ("tiny", {"unmask": "credit+rcr"}, "Credit cannot stand before RunningConfidence"),
        ("tiny", {"unmask": "end_of_text+rcr"}, "EndOfText cannot stand before RunningConfidence"),
        ("tiny", {"sub_block": 3}, "sub_block is for models whose blocks do not see later ones"),
    ),
)
def test_settings_of_the_other_kind_of_model(request, which, options, said):
    with pytest.raises(ValueError, match=said):
        Engine(str(request.getfixturevalue(which)), options if isinstance(options, Decode) else Diffusion(**options))


def test_log_probabilities_are_of_autoregressive_models(tiny):
    with pytest.raises(ValueError, match="tiny is a diffusion model, whose records have no log-probabilities"):
        Engine(str(tiny), logprobs=True)


def test_ends_of_texts_have_two_words():
    with pytest.raises(ValueError, match="ends takes the words never and doubted, not 'maybe'"):
        Diffusion(ends="never maybe")


def test_a_diffusion_model_is_no_draft(tiny, plain):
    with pytest.raises(ValueError, match="is a diffusion model: pick an autoregressive one"):
        Engine(str(plain), drafter=f"draft:model={tiny}")


def test_a_suffix_needs_a_diffusion_model(plain):
    with pytest.raises(ValueError, match="cannot fill in before a suffix"):
        Engine(str(plain), drafter="none").request([1], suffix=[2])


def test_the_registry_makes_every_policy():
    for name in UNMASKS:
        assert make_unmask(name) == UNMASKS[name].make()
    for name in CACHES:
        assert make_cache(name) == CACHES[name].make()
    composed = make_unmask("credit:alpha=0.5+prophet+threshold:threshold=0.8")
    assert composed.alpha == 0.5 and composed.inner.inner.threshold == 0.8


def run(capsys, *words):
    status = cli.main(list(words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_generate_takes_a_file_with_suffixes(tiny, tmp_path, capsys):
    lines = [
        {"prompt": [1, 2], "suffix": [5], "max_new_tokens": 3, "id": "a"},
        {"prompt": [3], "suffix": 7},
        {"prompt": [4]},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (
        "--input",
        str(source),
        "--json",
        "--max-new-tokens",
        "8",
        "--decode",
        "diffusion:block_length=4",
        "--ignore-eos",
    )
    status, out, err = run(capsys, "generate", "--model", str(tiny), *words)
    records = [json.loads(line) for line in out.splitlines()]
    assert status == 1 and "suffix must be a string or a list of token ids" in err
    assert [len(r["tokens"]) for r in records] == [3, 0, 8] and records[0]["suffix"] == [5]
    assert "forward passes" in err
    status, out, _ = run(capsys, "generate", "--model", str(tiny), *(w for w in words if w != "--json"))
    assert status == 1 and out.count("==>") == 2  # ids for text, without a tokenizer


def test_the_command_line_says_what_does_not_go_together(tiny, plain, capsys):
    status, _, err = run(capsys, "generate", "--model", str(tiny), "--drafter", "none", "x")
    assert status == 2 and "diffusion model" in err
    status, _, err = run(capsys, "bench", "--model", str(plain), "--decode", "fixed")
    assert status == 2 and "has no canvas to unmask" in err


POLICIES = ("fixed:", "threshold:threshold=0.3,")


@pytest.mark.slow
def test_bench_compares_policies_and_caches(tiny, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [1, 2]}\n{"prompt": [3]}\n')
    words = (
        "--input",
        str(source),
        "--json",
        "--max-new-tokens",
        "8",
        "--repeats",
        "1",
    )
    lines = [f"{policy}cache={cache},block_length=4" for policy in POLICIES for cache in ("none", "(dual:refresh=1)")]
    policies = ("--decode", ",".join(lines))
    status, out, _ = run(capsys, "bench", "--model", str(tiny), *words, *policies)
    rows = {row["decoder"]: row for row in json.loads(out)["rows"]}
    assert status == 0 and list(rows) == lines
    assert rows[lines[0]]["tokens_per_step"] == 1.0 and rows[lines[1]]["identical_text"]
    assert rows[lines[2]]["tokens_per_step"] > 1


@pytest.mark.slow
def test_bench_leaves_out_pairs_that_do_not_go_together(tiny, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [1, 2], "suffix": [3]}\n')
    words = (
        "--input",
        str(source),
        "--json",
        "--max-new-tokens",
        "4",
        "--repeats",
        "1",
        "--decode",
        "wino:block_length=4,all",
    )
    status, out, err = run(capsys, "bench", "--model", str(tiny), *words)
    rows = [row["decoder"] for row in json.loads(out)["rows"]]
    assert status == 0 and rows[:2] == ["fixed:cache=none,block_length=4", "wino:block_length=4"]
    assert "left out wino:cache=prefix" in err and "threshold:cache=dual" in rows


def test_policies_are_listed(capsys):
    status, out, _ = run(capsys, "policies")
    assert status == 0 and all(name in out for name in (*UNMASKS, *CACHES))
