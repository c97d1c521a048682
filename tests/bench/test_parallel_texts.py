"""ParallelBench's puzzles and free texts: their questions, their scores, and what is missing for some of them."""

import itertools
import sys
import types

import pytest

from specjax.bench.options import BenchOptions
from specjax.bench.parallel import TASKS, measures
from specjax.bench.parallel.measures import tools_of
from specjax.bench.parallel.puzzles import every_grid, read_grid
from specjax.bench.parallel.templates import CONVERSATIONS, SENTENCES
from specjax.bench.parallel.word_groups import FIELDS, THEMES
from specjax.bench.parallel_run import Asked, chosen_of, measure

ALL = {"grammar": lambda text: 1.0, "bert_score": lambda text, reference: 0.9}


def asked(task, given):
    return next(q for q in TASKS[task].questions(1)).__class__(task, "", "", given)


def score(question, text, tools=()):
    return TASKS[question.task].score(question, text, dict(tools))


@pytest.mark.parametrize("task", ["latin_square", "sudoku"])
def test_a_solver_gets_every_puzzle_right(task):
    questions = TASKS[task].questions(20)
    assert questions == TASKS[task].questions(20) and len({q.text for q in questions}) == 20
    for q in questions:
        assert score(q, q.answer) == 1 and TASKS[task].strict(q, q.answer)
        assert len(q.messages) == 3 and q.messages[1]["content"] == q.example.answer != q.answer


@pytest.mark.parametrize(
    ("text", "right"),
    (
        ("A,B,C\nB,C,A\nC,A,B", True),
        ("rows:\n A , B , C\nB,C,A\n\nC,A,B\nmore", True),
        ("A,B,C\nA,C,B\nC,A,B", False),
        ("A,B,C,A\nB,C,A\nC,A,B", True),  # ParallelBench's own reading: rows are cut to the shortest
        ("A,B,C\nB,C,A", False),
        ("", False),
    ),
)
def test_latin_squares_as_parallel_bench_reads_them(text, right):
    assert score(asked("latin_square", ("A", "B", "C")), text) == right


def test_every_square_of_three_and_no_other():
    question = asked("latin_square", ("A", "B", "C"))
    rows = list(itertools.permutations("ABC"))
    texts = ["\n".join(map(",".join, square)) for square in itertools.product(rows, repeat=3)]
    assert sum(score(question, text) for text in texts) == 12  # of 216


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    (
        ("1342\n2431\n4123\n3214", True, True),
        ("1 3 4 2\n2431\n4123\n3214", True, False),
        ("1,3,4,2\n2,4,3,1\n4,1,2,3\n3,2,1,4", True, False),
        ("grid 4:\n1342\n2431\n4123\n3214", True, False),
        ("1342\n2431\n4123", False, False),
        ("1342\n2431\n4123\n3241", False, False),
        ("", False, False),
    ),
)
def test_sudokus_as_parallel_bench_reads_them(text, loose, strict):
    question = asked("sudoku", ((1, 3, 4, 2), (2, 4, 3, 1), (4, 1, 2, 3), (3, 2, 1, 4)))
    assert score(question, text) == loose and TASKS["sudoku"].strict(question, text) == strict


def test_a_sudoku_has_twelve_givens_and_one_solution():
    grids = every_grid()
    assert len(grids) == len(set(grids)) == 288
    for q in TASKS["sudoku"].questions(10):
        shown = "".join(q.text.split("\n")[-4:])
        assert len(shown) == 16 and sum(digit != "0" for digit in shown) == 12
        flat = {grid: "".join(str(digit) for row in grid for digit in row) for grid in grids}
        fits = [grid for grid, text in flat.items() if all(a in ("0", b) for a, b in zip(shown, text, strict=True))]
        assert fits == [q.given] and read_grid(q.answer) == q.given


def test_words_count_as_they_are_written():
    question = asked("words_easy", ("dog", "park"))
    assert score(question, "The dogs parked.", ALL) == 1 and score(question, "A dog in the Park.", ALL) == 0
    assert score(question, "The dogs parked.", {"grammar": lambda text: 0.0}) == 0
    assert score(question, "The dogs parked.") is None
    assert TASKS["words_easy"].factors(question, "The dogs parked.", {}) == {"words": 1.0}
    assert TASKS["words_easy"].strict(question, "The dogs parked.") is None


@pytest.mark.parametrize("kind", ["easy", "medium", "hard"])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_words_of_a_sentence_go_together_less_and_less(kind, n):
    groups = FIELDS if kind == "hard" else THEMES
    for q in TASKS[f"words_{kind}"].questions(20, n):
        of = [next(i for i, group in enumerate(groups) if word in group) for word in q.given]
        assert len(of) == n and len(set(of)) == (1 if kind == "easy" else n)
        assert len(set(q.given)) == n and all(word in q.text for word in q.given) and len(q.messages) == 1


def test_no_word_is_in_two_groups():
    for groups in (THEMES, FIELDS):
        every = [word for group in groups for word in group]
        assert len(every) == len(set(every)) and {len(group) for group in groups} == {8}


@pytest.mark.parametrize("task", ["paraphrase", "summarize"])
def test_free_texts_are_filled_and_differ(task):
    questions = TASKS[task].questions(100)
    pairs = SENTENCES if task == "paraphrase" else CONVERSATIONS
    assert len({q.text for q in questions}) == 100 and all(len(set(pair)) == 2 for pair in pairs)
    assert not any("{" in q.text + q.answer for q in questions)


def test_a_paraphrase_is_other_words_of_the_same_meaning():
    pytest.importorskip("sacrebleu")
    tools = ALL | tools_of(["bleu"])[0]
    for q in TASKS["paraphrase"].questions(5):
        assert score(q, q.given, tools) == pytest.approx(0, abs=1e-9)
        assert 0.2 < score(q, q.answer, tools) <= 0.9
        assert score(q, " ", tools) == 0
        assert score(q, q.answer, {**tools, "grammar": lambda text: 0.0}) == 0
    # four of five words and their pairs by hand: (4/5 3/4 2/3 1/2)^(1/4)
    assert tools["bleu"]("a b c d f", "a b c d e") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert tools["bleu"]("a b c", "a b c d e") == 0  # there is no run of four


@pytest.mark.slow
def test_a_summary_is_scored_by_its_longest_common_words():
    pytest.importorskip("rouge_score")
    tools = ALL | tools_of(["rouge_l"])[0]
    question = TASKS["summarize"].questions(1)[0]
    assert score(question, question.answer, tools) == 1 and score(question, "", tools) == 0
    assert tools["rouge_l"]("a dog walks", "the dogs walked home") == pytest.approx(2 * 2 / (3 + 4))  # by stems


def test_questions_end():
    with pytest.raises(ValueError, match="words_easy: only about 128 different questions; ask for fewer"):
        TASKS["words_easy"].questions(200, 1)


def tool_of(monkeypatch, made):
    measures._language_tool.cache_clear()
    monkeypatch.setitem(sys.modules, "language_tool_python", types.SimpleNamespace(LanguageTool=made))
    found = tools_of(["grammar"])
    measures._language_tool.cache_clear()
    return found


def test_grammar_is_what_language_tool_finds(monkeypatch):
    made = lambda language, config: types.SimpleNamespace(check=lambda text: ["fault"] * text.count("bad"))
    tools, missing = tool_of(monkeypatch, made)
    assert not missing and [tools["grammar"](text) for text in ("good", " a bad one", " ")] == [1.0, 0.0, 0.0]


def test_what_is_missing_is_said(monkeypatch):
    def made(language, config):
        raise OSError("no host\nmore")

    assert tool_of(monkeypatch, made)[1] == {"grammar": "grammar needs LanguageTool, which did not start: no host"}
    for name in ("language_tool_python", "rouge_score", "sacrebleu.metrics", "bert_score"):
        monkeypatch.setitem(sys.modules, name, None)
    measures._language_tool.cache_clear()
    tools, missing = tools_of(measures.MEASURES)
    assert not tools and all("pip install 'specjax[parallel]'" in why for why in missing.values()) and len(missing) == 4
    chosen, _, notes = chosen_of(BenchOptions(samples=1))
    assert set(TASKS) - set(chosen) == {"paraphrase", "summarize"}
    assert notes[0].startswith(
        "no score for words_easy, words_medium, words_hard, paraphrase, summarize: grammar needs"
    )
    assert notes[-2:] == [f"left out {task}: nothing of it can be measured" for task in ("paraphrase", "summarize")]
    with pytest.raises(ValueError, match="nothing of summarize can be measured: ROUGE-L needs the package"):
        chosen_of(BenchOptions(samples=1, tasks="copy,summarize"))


def test_figures_of_a_task():
    task = TASKS["words_easy"]
    questions = task.questions(4)
    texts = [q.answer for q in questions[:3]] + ["nothing"]
    found = measure(Asked(task, questions), texts, ALL)
    assert found["accuracy"] == 0.75 and found["strict"] is None and found["factors"] == {"words": 0.75, "grammar": 1.0}
    assert found["interval"] == pytest.approx([0.3006, 0.9544], abs=1e-3)  # Wilson's of 3 in 4
    found = measure(Asked(task, questions), texts, {})
    assert found == {"accuracy": None, "interval": None, "strict": None, "factors": {"words": 0.75}}
