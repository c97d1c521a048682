"""ParallelBench's questions and scores, and the exact price of independence."""

import itertools
import json
import math
import shutil

import jax
import numpy as np
import pytest

from experiments.costs import independence
from specjax import cli, models
from specjax.bench.parallel import ASKED, TASKS
from specjax.bench.parallel.lists import read_answer, render
from specjax.models import LlamaLM, Masked, llama_config

LISTS = list(ASKED)
"""Tasks of lists."""


def right(question, text, strict=False):
    task = TASKS[question.task]
    return task.strict(question, text) if strict else task.score(question, text, {}) == 1


@pytest.mark.parametrize("task", LISTS)
def test_a_solver_gets_every_list_right(task):
    questions = TASKS[task].questions(100)
    assert len(questions) == 100 and questions == TASKS[task].questions(100)
    assert sorted({len(q.given.items) for q in questions}) == [3, 4, 5, 6]
    for question in questions:
        assert right(question, f"Sure: {question.answer}", strict=True) and right(question, question.answer)
        assert question.given.word is None or question.given.word not in question.given.items
        assert question.example.text != question.text and len(question.messages) == 3


@pytest.mark.parametrize("task", [task for task in LISTS if task != "copy"])
def test_the_given_list_is_no_answer(task):
    changed = [q for q in TASKS[task].questions(100) if q.given.answer != q.given.items]
    assert len(changed) > 70 and not any(right(q, render(q.given.items)) for q in changed)


def test_tasks_with_many_answers_take_each_and_no_other():
    question = TASKS["insert_random"].questions(1, 3)[0]
    items, word = question.given.items, question.given.word
    for at in range(4):
        assert right(question, render((*items[:at], word, *items[at:])))
    assert not right(question, render((word, *items[::-1])))
    question = TASKS["remove_random"].questions(1, 4)[0]
    items = question.given.items
    rights = [c for n in range(5) for c in itertools.permutations(items, n) if right(question, render(c))]
    assert rights == list(itertools.combinations(items, 3))
    question = TASKS["replace_random"].questions(1, 3)[0]
    (a, b, c), word = question.given.items, question.given.word
    assert right(question, render((a, word, c))) and not right(question, render((a, word, b)))


def test_guessing_a_shuffle_token_by_token():
    """Of 27 equally likely answers on three items 5 are right."""
    question = TASKS["shuffle"].questions(1, 3)[0]
    assert sum(right(question, render(answer)) for answer in itertools.product(question.given.items, repeat=3)) == 5


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    (
        ('["A B", "C D"]', ("A B", "C D"), ("A B", "C D")),
        ('first [x] then ["A"] end', ("A",), ("A",)),
        ("[A, 'B']", ("A", "'B'"), None),
        ('["A", "B",]', ("A", "B"), None),
        ('["A", "B", ]', ("A", "B"), None),
        ('["A, B"]', ("A", "B"), None),
        ('["A,B"]', ("A", "B"), ("A,B",)),
        ('["A",\n"B"]', ("A", '\n"B'), None),
        ('"A", "B"', ("A", "B"), None),
        ('["A","B"]', ("A", "B"), None),
        ("[]", (), None),
    ),
)
def test_reading_answers(text, loose, strict):
    """As ParallelBench's own scorer reads them."""
    assert read_answer(text) == loose and read_answer(text, strict=True) == strict


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A diffusion model that writes anything, with the shipped tokenizer."""
    shipped = models.shipped()["tiny"]
    folder = tmp_path_factory.mktemp("models") / "tiny"
    lm = LlamaLM(llama_config(1536, 16, 16, 1, 2, 1, 8, max_position_embeddings=512, tie_word_embeddings=True))
    models.save(folder, lm, lm.init(jax.random.key(0)), eos_ids=(0,), diffusion=Masked(1, False))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder)
    return str(folder)


@pytest.mark.slow
def test_the_command_scores_every_task_and_decoder(tiny, capsys):
    words = [
        "bench",
        "parallel",
        "--model",
        tiny,
        "--tasks",
        "copy:n=2,shuffle:n=2",
        "--samples",
        "4",
        "--decode",
        "fixed:steps=2,cache=none,fixed:steps=4,cache=none",
    ]
    status = cli.main([*words, "--max-new-tokens", "32", "--beside", "tiny-draft", "--json"])
    *rows, beside = json.loads(capsys.readouterr().out)["rows"]
    assert status == 0 and [row["decoder"] for row in rows] == ["fixed:steps=2,cache=none", "fixed:steps=4,cache=none"]
    assert all(set(row["accuracy"]) == {"copy:n=2", "shuffle:n=2"} and row["accuracy"]["copy:n=2"] == 0 for row in rows)
    assert [row["tokens_per_pass"] for row in rows] == [16.0, 8.0]
    assert beside["decoder"] == beside["model"] == "tiny-draft" and beside["tokens_per_pass"] <= 1
    assert rows[0]["interval"]["copy:n=2"][0] == 0 and 0.4 < rows[0]["interval"]["copy:n=2"][1] < 0.6


@pytest.mark.parametrize(
    ("words", "said"),
    (
        (["parallel", "--tasks", "frob"], "unknown task 'frob'; choose copy"),
        (["parallel", "--tasks", "copy:n=1"], "copy: n must be 2 to 50, got n=1"),
        (["parallel", "--tasks", "copy:n=50", "--max-new-tokens", "64"], "a right answer of copy:n=50 has"),
        (["parallel", "--tasks", "copy:m=2"], "task 'copy:m=2': its only setting is n"),
        (["parallel", "--tasks", "copy:n=few"], "task 'copy:n=few': its only setting is n"),
        (["parallel", "--tasks", "sudoku:n=4"], "sudoku: it takes no n, got n=4"),
        pytest.param(
            ["parallel", "--tasks", "copy", "--beside", "tiny-diffusion"],
            "--beside takes autoregressive models",
            marks=pytest.mark.slow,
        ),
        (["order", "--beside", "tiny"], "--beside is not for the suite order"),
        (["parallel", "--samples", "0"], "--samples must be at least 1"),
        (["parallel", "--plot", "x.png"], "--plot is not for the suite parallel"),
        (["--tasks", "copy"], "unknown family 'copy'; choose math"),
    ),
)
def test_what_the_command_cannot_use(tiny, capsys, words, said):
    assert cli.main(["bench", *words, "--model", tiny]) == 2
    assert said in capsys.readouterr().err


def everything(dists):
    return set(dists)


@pytest.mark.parametrize("n", (3, 4))
def test_prices_of_one_pass_have_their_closed_forms(n):
    h = lambda *p: float(-sum(x * math.log(x) for x in p if x > 0))
    binary = lambda p: h(p, 1 - p)
    want = {
        independence.permutations: n * math.log(n) - math.log(math.factorial(n)),
        independence.replace_one: n * binary(1 / n) - math.log(n),
        independence.remove_one: sum(binary((j + 1) / n) for j in range(n - 1)) - math.log(n),
        independence.insert_one: sum(h(1 / (n + 1), (n - j) / (n + 1), j / (n + 1)) for j in range(n + 1))
        - math.log(n + 1),
    }
    valid = {independence.permutations: math.factorial(n) / n**n, independence.replace_one: (1 - 1 / n) ** (n - 1)}
    for make, nats in want.items():
        joint = make(n)
        out = independence.decoded(joint, everything)
        np.testing.assert_allclose(independence.price(joint, [range(joint.ndim)]), nats, atol=1e-12)
        np.testing.assert_allclose(independence.divergence(joint, out), nats, atol=1e-12)
        np.testing.assert_allclose(out.sum(), 1)
        if make in valid:
            np.testing.assert_allclose(independence.validity(joint, out), valid[make])


def test_which_positions_matter_more_than_how_many():
    """A chain's every other token first: the rest is then free. One token per pass costs nothing."""
    joint = independence.chain(5, 0.1)
    spaced, halves = [(0, 2, 4), (1, 3)], [(0, 1, 2), (3, 4)]
    np.testing.assert_allclose(independence.price(joint, spaced), 2 * 0.2218, atol=1e-4)
    assert independence.price(joint, spaced) < independence.price(joint, halves)
    assert abs(independence.price(joint, [(i,) for i in range(5)])) < 1e-12


def test_a_higher_threshold_costs_less():
    """KL of threshold decoding falls as the threshold rises, to 0 at one token per pass."""
    joint = 0.7 * independence.chain(4, 0.2) + 0.3 * independence.chain(4, 0.05)[::-1]

    def threshold(tau):
        def policy(dists):
            sure = {i for i, dist in dists.items() if dist.max() >= tau}
            return sure or {max(dists, key=lambda i: dists[i].max())}

        return policy

    costs = [
        independence.divergence(joint, independence.decoded(joint, threshold(tau))) for tau in (0.0, 0.8, 0.9, 1.1)
    ]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(costs)) and costs[0] > 0.1 and abs(costs[-1]) < 1e-12
