"""First-finish search: the shortest of full completions, and no step is spent on the others once it has ended."""

from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import cli
from specjax.models import LlamaLM, Model, llama_config
from specjax.search import Candidate, FirstFinish
from specjax.serve.engine import Engine
from specjax.serve.request import needs_of, several
from specjax.serve.slots import in_order

COUNT, PROMPTS = 4, ([3, 8, 13], [1, 2, 3, 4, 5])
OPTIONS = {"temperature": 1.0, "max_new_tokens": 24, "seed": 3}


@pytest.fixture(scope="module")
def toy():
    """A model of random weights that ends a text after a few tokens."""
    lm = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=128))
    params = jax.tree.map(lambda x: 2 * x, lm.init(jax.random.key(0)))
    return Model(lm, params, None, (7, 9), "toy", Path(), np.dtype("float32"))


@pytest.fixture(scope="module")
def full(toy):
    """All completions of every prompt, each written to its end."""
    records = specjax.generate(toy, PROMPTS, drafter="none", num_return_sequences=COUNT, progress=False, **OPTIONS)
    groups = [records[at : at + COUNT] for at in range(0, len(records), COUNT)]
    assert any(len({record.new_tokens for record in own}) > 2 for own in groups)
    return groups


def shortest(own):
    """Where the shortest text is that ended."""
    return min((record.new_tokens, at) for at, record in enumerate(own) if record.finish_reason == "eos")[1]


@pytest.mark.parametrize(
    ("drafter", "batch_size"),
    (("none", 8), ("none", 3), pytest.param("prompt_lookup:length=3,min_ngram=1", 3, marks=pytest.mark.slow)),
)
def test_it_is_the_shortest_of_full_completions(toy, full, drafter, batch_size):
    """Whether they run side by side, one after the other, or by several tokens per step."""
    options = {"num_return_sequences": COUNT, "select": "first_finish", "batch_size": batch_size, "progress": False}
    got = specjax.generate(toy, PROMPTS, drafter=drafter, **options, **OPTIONS)
    for taken, own in zip(got, full, strict=True):
        at = shortest(own)
        assert (taken.tokens, taken.chosen, taken.score) == (own[at].tokens, at, -own[at].new_tokens)


def written(toy, batch_size, race):
    """Steps of every completion of every prompt."""
    engine = Engine(toy, drafter="none")
    requests = [one for prompt in PROMPTS for one in several(engine.request(prompt, **OPTIONS), COUNT)]
    turns = engine.turns(requests, slots=batch_size, needs=needs_of(requests), race=race)
    steps = [record.steps for record in in_order(turns)]
    assert engine.timing.steps == sum(steps)
    return [steps[at : at + COUNT] for at in range(0, len(steps), COUNT)]


@pytest.mark.slow
def test_no_step_is_spent_behind_the_first_end(toy, full):
    """Side by side every completion has the winner's steps; in fewer rows later ones may have fewer, and none has more that
    began after it ended."""
    lengths = [min(record.new_tokens for record in own) for own in full]
    assert written(toy, 8, False) == [[record.steps for record in own] for own in full]
    assert written(toy, 8, True) == [[length] * COUNT for length in lengths]
    for own, steps in zip(full, written(toy, 1, True), strict=True):
        best, wanted = None, []
        for record in own:  # one after the other
            wanted.append(record.new_tokens if best is None else min(best, record.new_tokens))
            best = wanted[-1] if record.finish_reason == "eos" and wanted[-1] == record.new_tokens else best
        assert steps == wanted


def test_without_an_end_it_is_the_first():
    assert FirstFinish().choose([Candidate(None, length=5), Candidate("7", length=3)]) == (0, None)
    said = [Candidate("7", length=5, ended=True), Candidate(None, length=3, ended=True), Candidate("5", length=2)]
    assert FirstFinish().choose(said) == (1, -3.0)


def test_it_is_listed_and_for_texts_that_end(capsys):
    assert cli.main(["searches"]) == 0 and "\nfirst_finish" in capsys.readouterr().out
    with pytest.raises(ValueError, match="texts do not end one after the other"):
        specjax.generate("tiny-diffusion", ["a"], select="first_finish", num_return_sequences=2, temperature=1.0)


@pytest.mark.parametrize("batch_size", (8, pytest.param(3, marks=pytest.mark.slow)))
def test_limits_on_which_texts_depend_stay(toy, batch_size):
    """A token is forced at a text's last place, and not where it could still be the shortest."""
    asked = {"sampling": specjax.Sampling(forced_eos_token_id=7, **OPTIONS), "num_return_sequences": COUNT}
    records = specjax.generate(toy, PROMPTS, drafter="none", progress=False, **asked)
    got = specjax.generate(
        toy, PROMPTS, drafter="none", select="first_finish", batch_size=batch_size, progress=False, **asked
    )
    for taken, at in zip(got, range(0, len(records), COUNT), strict=True):
        own = records[at : at + COUNT]
        assert {record.finish_reason for record in own} == {"eos"}
        assert (taken.tokens, taken.chosen) == (own[shortest(own)].tokens, shortest(own))
