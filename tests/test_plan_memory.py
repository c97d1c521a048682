"""`specjax plan --memory`: what a step is predicted to hold, and the fastest setting that fits."""

import json

import jax
import pytest

from specjax import cli, models
from specjax.decode import Speculate
from specjax.plan import memory, step
from specjax.sharding import make_mesh

TINY = ("--model", "tiny", "--topology", "t4:1", "--context", "512", "--drafter", "prompt_lookup")


@pytest.fixture
def plan(capsys):
    """Runs the command and gives its exit status, stdout and stderr."""

    def go(*words):
        status = cli.main(["plan", *words])
        return status, *capsys.readouterr()

    return go


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [16, 32])
def test_predicted_bytes_are_those_of_the_compiler(nodes):
    """Of a greedy step, within 5% in all. The temporaries, which are about a tenth of them, are within a quarter."""
    mesh = make_mesh("model=1", jax.devices("cpu")[:1])
    way = Speculate(f"draft:model=tiny-draft,expander=top_k,k=4,depth=4,nodes={nodes}")
    setup = step.prepare(models.abstract("tiny", "float32", mesh), way, mesh, batch=16, context=512)
    program, _ = step.compiled(setup, sampled=False)
    found = program.memory_analysis()
    predicted, besides = sum(memory.held(setup).values()), sum(memory.transient(setup).values())
    assert predicted - besides == found.argument_size_in_bytes
    assert predicted == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.05)
    assert besides == pytest.approx(found.temp_size_in_bytes, rel=0.25)
    assert found.temp_size_in_bytes > 0.05 * predicted  # leaving temporaries out would fail the test


def test_the_fastest_fits_and_less_memory_is_slower(plan):
    answers = []
    for size in ("20MB", "300MB"):
        status, out, err = plan(*TINY, "--memory", size, "--batch", "1,4,16", "--cache-dtype", "int8", "--json")
        assert status == 0, err
        answers.append(json.loads(out))
    for found, budget in zip(answers, (20e6, 300e6), strict=True):
        best, free, least = (found[name] for name in ("best", "unconstrained", "least"))
        assert best["total"] == sum(best["held"].values()) <= budget == found["memory"]
        assert best["tokens_per_second"] <= free["tokens_per_second"]
        assert least["tokens_per_second"] >= 0.96 * free["tokens_per_second"] and least["total"] <= free["total"]
        assert best["cache_dtype"] == "int8" and best["rows"] in (1, 4, 16)
    assert answers[0]["best"]["tokens_per_second"] < answers[1]["best"]["tokens_per_second"]
    assert answers[0]["accepted"] == memory.ACCEPTED


def test_the_text_says_what_is_assumed(plan):
    status, out, err = plan(*TINY, "--memory", "300MB", "--batch", "4", "--accepted", "0.5", "--cache-dtype", "int8")
    assert status == 0, err
    assert "acceptance is given, not measured" in out and "chance 0.5" in out
    assert "the least memory with 96% of that speed" in out and "claims 96% with 65% less" in out


def test_better_drafts_make_longer_ones_pay():
    assert memory.tokens_of(9, 8, 1, 0.9) > memory.tokens_of(9, 8, 1, 0.3) > 1
    assert memory.tokens_of(16, 4, 4, 0.5) > memory.tokens_of(5, 4, 1, 0.5)  # of the same depth: more candidates


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "lots"), "is not a size"),
        (("--memory", "0GB"), "is not a size"),
        (("--memory", "24KB"), "is not a size"),
        (("--memory", "24GB"), "more than the 16.0 GB of a t4"),
        (("--memory", "5MB"), "is below the weights"),
        (("--memory", "9MB"), "has no room for one setting"),
        (("--memory", "1GB", "--accepted", "1.5"), "between 0 and 1"),
        (("--accepted", "0.5"), "--accepted goes with --memory"),
        (("--memory", "1GB", "--tokens-per-step", "2"), "leave out --tokens-per-step"),
        (("--memory", "1GB", "--mesh", "model=1", "--whole"), "leave out --mesh, --whole"),
        (("--memory", "1GB", "--drafter", "medusa"), "one --drafter"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_one_line(plan, words, said):
    status, _, err = plan(*TINY, "--batch", "8", *words)
    assert status == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("none", "no length and no expander"),
        ("prompt_lookup:length=4", "leave length out"),
        ("eagle2:k=4,nodes=16", "leave nodes and k out"),
        ("prompt_lookup+suffix", "joins several"),
        ("nonsense", "unknown drafter"),
    ],
)
def test_a_drafter_without_a_size_to_search(line, said):
    with pytest.raises(ValueError, match=said):
        list(memory.shapes(line))
