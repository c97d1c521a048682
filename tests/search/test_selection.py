"""One of several completions: the votes by their definitions, what decoders keep for them, and prompts that are read once."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from support import diverse_beams
from support.conformance import MIXED, TARGET, Rows, params, start

import specjax
from specjax import Sampling, cli, models
from specjax import decoder as decoding
from specjax.assembly.line import extended
from specjax.assembly.registry import make_selection
from specjax.draft import PromptLookup
from specjax.models import LlamaLM, Model, llama_config
from specjax.search import Borda, Candidate, Majority, SelfCertainty
from specjax.serve.engine import Engine
from specjax.serve.request import several

ANSWER = r"answer is ([0-9]+)"


def answered(line):
    return extended(line, f'answer="{ANSWER}"')


def candidates(*pairs):
    return [Candidate(*pair) for pair in pairs]


def test_majority_takes_the_first_of_the_most_frequent():
    said = candidates(("7",), ("5",), (None,), ("5",), ("7",), (None,), (None,))
    assert Majority().choose(said) == (0, 2.0)
    assert Majority().choose(candidates((None,), ("5",), ("7",), ("7",))) == (2, 2.0)
    assert Majority().choose(candidates((None,), (None,))) == (0, None)


def test_self_certainty_takes_the_surest_with_an_answer():
    said = candidates(("7", 1.0), (None, 9.0), ("5", 3.0), ("5", 2.0))
    assert SelfCertainty().choose(said) == (2, 3.0)
    with pytest.raises(ValueError, match="logprobs=True"):
        SelfCertainty().choose(candidates(("7",)))


def test_borda_weighs_votes_by_rank():
    """Ranks 1 to 5 have 5, 4, 3, 2, 1 votes to the power: two sure ones against three others."""
    said = candidates(("a", 5.0), ("b", 3.0), ("a", 4.0), ("b", 2.0), ("b", 1.0))
    assert Borda(1.0).choose(said) == (0, 9.0) and Borda(1.0).scores(said)[1] == 3 + 2 + 1
    assert Borda(0.0).choose(said) == (1, 3.0)  # a majority
    got = Borda().scores(said)
    np.testing.assert_allclose(got[:2], [math.sqrt(5) + math.sqrt(4), math.sqrt(3) + math.sqrt(2) + 1])
    unsaid = candidates((None, 9.0), ("a", 1.0), ("b", 2.0))
    assert Borda(1.0).choose(unsaid) == (2, 2.0)
    assert Borda().choose(candidates((None, 1.0))) == (0, None)
    assert make_selection("borda:power=2") == Borda(2.0)
    with pytest.raises(ValueError, match="power of borda must be 0 or more"):
        make_selection("borda:power=-1")
    with pytest.raises(ValueError, match="unknown selection 'best'; choose majority, self_certainty, borda"):
        make_selection("best")


@pytest.mark.parametrize(
    ("said", "taken", "votes"),
    [
        ((("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 0.0)), 0, 6.0),  # the first with the answer, not the surest
        ((("b", 2.0), ("a", 1.0), ("a", 1.0)), 0, 3.0),  # equal votes: the answer that comes first
        (((None, 9.0), (None, 8.0), ("b", 1.0), ("a", 2.0), ("b", 0.0)), 2, 3.0),
        ((("a", 1.0), (None, 1.0), ("b", 1.0), ("b", 1.0)), 0, 4.0),  # equally sure: by their order
    ],
)
def test_borda_is_the_authors_program(said, taken, votes):
    """What its vote takes of these answers and certainties, at a power of 1."""
    assert Borda(1.0).choose(candidates(*said)) == (taken, votes)


def test_certainty_is_the_divergence_of_the_even_distribution():
    """At every place of a text that a drafter wrote, against scipy on distributions of whole passes."""
    from scipy.stats import entropy
    from support.margin import teacher_forced

    decoder = specjax.speculative(TARGET, PromptLookup(length=3, min_ngram=1), logprobs=True)
    rows = Rows((MIXED.prompts[2],), ("a",), ({"temperature": 1.0, "top_k": 5},), 12)
    model = {"target": params("none")["target"], "draft": None}
    state = decoding.run(decoder, model, start(decoder, rows, model=model))
    begin, end = int(state.prompt_length[0]), int(state.length[0])
    text = np.asarray(state.tokens)[0, :end].tolist()
    dists = np.asarray(jax.nn.softmax(teacher_forced(TARGET, model["target"], text), axis=-1), np.float64)
    even = np.full(dists.shape[-1], 1 / dists.shape[-1])
    wanted = [entropy(even, dists[at - 1]) for at in range(begin, end)]
    assert len(wanted) == 12 and max(wanted) > 0.1
    np.testing.assert_allclose(np.asarray(state.logprobs.certainty)[0, begin:end], wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def drawn():
    """A model, prompts, options of several completions, and all of these."""
    model = models.load("tiny", dtype="float32")
    prompts = diverse_beams.prompts(model.tokenizer)[::4][:2]
    options = {
        "temperature": 1.3,
        "num_return_sequences": 4,
        "max_new_tokens": 32,
        "progress": False,
        "drafter": "none",
    }
    return model, prompts, options, specjax.generate(model, prompts, logprobs=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("line", ("majority", "self_certainty", "borda:power=1"))
def test_generate_takes_one_a_prompt(drawn, line):
    """Of the same completions, in slots that end one after the other, and with a drafter."""
    model, prompts, options, records = drawn
    got = specjax.generate(
        model, prompts, select=answered(line), **{**options, "drafter": "prompt_lookup", "batch_size": 3}
    )
    assert len(got) == 2
    for taken, own in zip(got, (records[:4], records[4:]), strict=True):
        said = [Candidate(specjax.search.selection.answer_of(r.text, ANSWER), r.self_certainty) for r in own]
        at, score = make_selection(line).choose(said)
        assert (taken.tokens, taken.chosen, taken.sample) == (own[at].tokens, at, None)
        assert taken.score == (score if score is None else pytest.approx(score, rel=1e-4))
        assert taken.logprobs is None and "self_certainty" not in taken.to_json()


@pytest.mark.slow
def test_the_command_takes_one_a_line(drawn, tmp_path):
    model, prompts, options, _ = drawn
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    words = ["generate", "--model", "tiny", "--dtype", "float32", "--input", str(path), "--output", str(out)]
    words += ["--temperature", "1.3", "--num-return-sequences", "4", "--max-new-tokens", "32", "--drafter", "none"]
    words += ["--select", answered("borda")]
    assert cli.main(words) == 0
    lines = out.read_text().splitlines(keepends=True)
    wanted = specjax.generate(model, prompts, select=answered("borda"), **options)
    assert [json.loads(line)["tokens"] for line in lines] == [record.tokens for record in wanted]
    out.write_text(lines[0])
    assert cli.main(words) == 0 and out.read_text() == "".join(lines)
    assert cli.main([*words[:-1], answered("majority")]) == 2


@dataclasses.dataclass(frozen=True)
class Counted(LlamaLM):
    """Counts the tokens of every pass over more than one, when it runs."""

    def __call__(self, params, block, cache, **wanted):
        if block.tokens.shape[1] > 1:
            jax.debug.callback(SEEN.append, block.tokens.size)
        return super().__call__(params, block, cache, **wanted)


SEEN: list = []


@pytest.mark.parametrize("batch_size", (2, 3, 8))
def test_completions_of_a_prompt_read_it_once(batch_size):
    """Rows are refilled at other times than they began; texts are those of rows that each read their prompt."""
    lm = Counted(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=128))
    model = Model(
        lm, jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(0))), None, (7,), "toy", Path(), np.dtype("float32")
    )
    prompts = [[(5 * i + 3) % 22 for i in range(40 + n)] for n in range(3)]
    options = {
        "temperature": 1.0,
        "repetition_penalty": 1.1,
        "max_new_tokens": 12,
        "seed": 4,
    }
    SEEN.clear()
    asked = {"num_return_sequences": 3, "sampling": Sampling(**options), "batch_size": batch_size}
    records = specjax.generate(model, prompts, drafter="none", **asked)
    jax.effects_barrier()
    assert sum(map(int, SEEN)) == 3 * 48
    assert len({record.new_tokens for record in records}) > 1
    engine = Engine(model, drafter="none")
    requests = [one for prompt in prompts for one in several(engine.request(prompt, **options), 3)]
    state = decoding.run(engine.decoder, engine.params, engine.start(requests))
    lengths = np.asarray(state.length)
    wanted = [
        np.asarray(state.tokens)[row, len(request.ids) : lengths[row]].tolist() for row, request in enumerate(requests)
    ]
    assert [record.tokens for record in records] == wanted
    assert len({tuple(record.tokens) for record in records}) > 6


REFUSED = (
    ({"select": "majority"}, "set num_return_sequences to 2 or more"),
    ({"select": "majority", "num_return_sequences": 2}, "set a temperature, or leave select out"),
    ({"answer": "x"}, "it is in select here, such as majority:answer=REGEX"),
    ({"select": 'majority:answer="("', "num_return_sequences": 2}, "answer must be a regular expression"),
    ({"select": "majority", "num_return_sequences": 2, "decode": "beam"}, "a beam search ranks its texts itself"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=lambda case: str(case)[:50])
def test_what_cannot_be_chosen_from(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        specjax.generate("tiny", ["a"], **options)


def test_they_are_listed(capsys):
    assert cli.main(["searches"]) == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines[lines.index("--select, of several completions") + 1 :]
    assert [line.split()[0] for line in after] == [
        "majority",
        "majority:[answer=...]",
        "self_certainty",
        "self_certainty:[answer=...]",
        "borda",
        "borda:power=0.5,[answer=...]",
        "first_finish",
        "first_finish:[answer=...]",
        "reward",
        "reward:[module=...],aggregate=mean,vote=best,[answer=...]",
    ]
