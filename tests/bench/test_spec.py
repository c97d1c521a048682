"""`specjax bench spec`: its questions, its measures, and answers that Spec-Bench's scripts would read."""

import json

import pytest

from specjax import cli
from specjax.bench import spec
from specjax.bench.spec import Answer, Question, Turn

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["def add(a, b):", "def sub(a, b):"]},
    {"question_id": 161, "category": "translation", "turns": ["import os\n"], "reference": ["x"]},
    {"question_id": 162, "category": "translation", "turns": ["class A:\n"]},
]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_questions_are_counted_by_task(tmp_path):
    file = written(tmp_path / "question.jsonl", QUESTIONS)
    questions = spec.read(file, most=1)
    assert [(q.id, q.task, len(q.turns)) for q in questions] == [(81, "mt_bench", 2), (161, "translation", 1)]
    assert len(spec.read(file, most=2)) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question_id": 1, "category": "qa"}, "line 1 is not a question with question_id, category and turns"),
        ({"question_id": 1, "category": "frob", "turns": ["x"]}, "unknown category 'frob'; there are writing"),
        ({"question_id": 1, "category": "qa", "turns": []}, "turns must be texts"),
    ],
)
def test_a_line_that_is_no_question(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        spec.read(written(tmp_path / "question.jsonl", [line]), most=1)


def test_a_peers_passes_are_unknown():
    answers = [Answer(Question(0, "qa", ("x",)), (Turn("t", 0, 10, 1.0),))]
    assert spec.measure([answers], [answers])["overall"] == spec.Measure(1, None, 10.0, 1.0)


def test_measures():
    """Speed is a mean over questions of tokens over seconds; accepted tokens are over all passes."""
    of = lambda category, *turns: Answer(Question(0, category, ("x",)), tuple(Turn("t", *turn) for turn in turns))
    plain = [[of("qa", (10, 10, 1.0)), of("rag", (20, 20, 4.0), (10, 10, 2.0))]]
    ours = [[of("qa", (5, 10, 0.5)), of("rag", (10, 20, 1.0), (5, 10, 0.5))] for _ in range(2)]
    measures = spec.measure(ours, plain * 2)
    assert list(measures) == ["qa", "rag", "overall"]
    assert measures["qa"] == spec.Measure(1, 2.0, 20.0, 2.0)
    assert measures["rag"] == spec.Measure(1, 2.0, 20.0, 4.0)
    assert measures["overall"] == spec.Measure(2, 2.0, 20.0, round(20 / 7.5, 4))
    assert spec.deviation(ours) == 0.0


@pytest.mark.slow
def test_the_suite(tmp_path, capsys):
    file = written(tmp_path / "question.jsonl", QUESTIONS)
    words = [
        "bench",
        "spec",
        "--input",
        file,
        "--answers",
        tmp_path / "out",
        "--drafter",
        "prompt_lookup",
        "--peer",
        "transformers",
        "--repeats",
        1,
    ]
    assert cli.main([*map(str, words), "--max-new-tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plain, lookup, greedy, looking = report["rows"]
    assert "3 questions, at most 12 tokens a turn, batch 1" in report["about"]
    assert [plain["decoder"], lookup["decoder"]] == ["none", "prompt_lookup"]
    assert list(plain["tasks"]) == ["mt_bench", "translation"] and plain["tasks"]["translation"]["questions"] == 2
    assert plain["overall"]["mean_accepted"] == plain["overall"]["speedup"] == 1.0 < lookup["overall"]["mean_accepted"]
    assert [row["decoder"] for row in (greedy, looking)] == ["transformers greedy", "transformers prompt_lookup"]
    assert greedy["overall"]["mean_accepted"] is None and greedy["overall"]["tokens_per_second"] > 0
    assert {row["identical_texts"] for row in report["rows"]} == {3} and plain["compile_seconds"] > 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "prompt_lookup.jsonl").read_text().splitlines()]
    assert [line["question_id"] for line in lines] == [81, 161, 162]
    (choice,) = lines[0]["choices"]
    assert [len(choice[key]) for key in ("turns", "decoding_steps", "new_tokens", "wall_time")] == [2, 2, 2, 2]
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"]) and min(choice["wall_time"]) > 0
    assert sum(choice["accept_lengths"]) >= sum(choice["new_tokens"])


def test_what_cannot_be_run(tmp_path, capsys):
    file = str(written(tmp_path / "question.jsonl", QUESTIONS))
    for words, message in (
        (["spec"], "give --input question.jsonl"),
        (["spec", "--input", file, "--peer", "frob"], "unknown peer 'frob'; choose transformers"),
        (["spec", "--input", file, "--answers", file], "is a file: name a folder"),
        (["--answers", "out"], "--answers is not for the suite speed"),
    ):
        assert cli.main(["bench", *words]) == 2
        assert message in capsys.readouterr().err
