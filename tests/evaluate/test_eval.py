"""`specjax eval` on small models of random weights: what is asked, what is counted, and what is refused."""

import json

import pytest
from support.small_eval import FEW, save

from specjax import decoder, models, tasks
from specjax.decode import Diffusion
from specjax.evaluate import EvalOptions, evaluate
from specjax.evaluate.decoders import changed
from specjax.evaluate.options import DecoderOptions
from specjax.evaluate.questions import items_of, own_questions
from specjax.evaluate.run import cut, prepare
from specjax.models import Masked
from specjax.tasks.generate import keys


def test_one_line_of_json_counts_what_is_right(run, own, tmp_path):
    answers = tmp_path / "answers.jsonl"
    words = ("--questions", own, "--drafter", "none", "--compare", "top_k=5", "--answers", answers)
    status, out, err = run(*words, "--json")
    assert status == 0 and out.count("\n") == 1 and err.count("4 of 4 answers were cut") == 2
    found = json.loads(out)
    assert list(found["families"]) == ["own", "loops"]
    assert found["families"]["own"] == {"accuracy": 1.0, "low": 0.3424, "high": 1.0, "n": 2}
    assert found["families"]["loops"]["accuracy"] == 0.5 and found["accuracy"] == 0.75 and found["n"] == 4
    assert found["tokens_per_step"] == 1.0 and found["tokens_per_second"] > 0
    (other,), (difference,) = found["decoders"], found["comparisons"]
    assert other["accuracy"] == 0.75 and other["tokens_per_step"] == 1 and other["decoder"] == "top_k=5"
    assert difference["same_text"] == difference["answers"] == 4 and difference["verdict"] == "same text"
    assert difference["baseline"] == "drafter=none" and difference["speed"] > 0
    assert (difference["difference"], difference["better"], difference["worse"]) == (0, 0, 0)
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(line["decoder"], line["id"]) for line in lines[:5]] == [
        ("drafter=none", "q0"), ("drafter=none", "q1"), ("drafter=none", "q2"), ("drafter=none", "q3"),
        ("top_k=5", "q0"),
    ]  # fmt: skip
    assert [line["right"] for line in lines] == [True, True, True, False] * 2
    assert {line["tokens"] for line in lines} == {FEW} and {line["steps"] for line in lines[:4]} == {FEW}

    status, out, err = run("--questions", own, "--json", "--baseline", answers)
    (difference,) = json.loads(out)["comparisons"]
    assert difference["baseline"] == f"drafter=none of {answers}" and difference["speed"] is None
    assert difference["verdict"] == "same text"
    status, out, err = run("--questions", own, "--limit", 1, "--baseline", answers)
    assert (status, out) == (2, "") and "are to other questions (4 answers against 2)" in err
    status, out, err = run("--questions", own, "--answers", answers)
    assert (status, out) == (2, "") and "exists: move it away" in err


@pytest.mark.slow
def test_a_task_has_a_form_that_texts_obey(small):
    """Whatever a model of random weights would write; other families have none."""
    ask = lambda families, **more: evaluate(
        small, families=families, limit=2, level=1, max_new_tokens=64, drafter="none", **more
    )
    found = ask("json", temperature=1.0, compare="task_constraint=true")
    free, bound = (row.compliance for row in found.rows)
    assert (free.accuracy, bound.accuracy, bound.n) == (0.0, 1.0, 2)
    assert all(answer.obeys for answer in found.rows[1].answers) and found.to_json()["compliance"]["accuracy"] == 0.0
    with pytest.raises(
        ValueError, match="question 'math-1-0-0' for .*: it asks for no form, so --task-constraint is not for it"
    ):
        ask("math", task_constraint=True)
    with pytest.raises(ValueError, match="it has a constraint already, so --task-constraint is not for it"):
        ask("json", task_constraint=True, constraint="choice:a|b")


def test_tables_and_picture(run, own, tmp_path):
    picture = tmp_path / "a.png"
    status, out, _ = run("--questions", own, "--drafter", "none", "--compare", "temperature=3", "--plot", picture)
    assert status == 0 and "75.0% (30.1 to 95.4)" in out and "not resolved: the interval reaches" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_shipped_tasks_are_asked_as_chat_and_the_seed_decides_them(small):
    ask = lambda seed: evaluate(
        small, families="math,lists", limit=2, seed=seed, drafter="none", batch_size=4, max_new_tokens=FEW
    )
    found, other = ask(7), ask(8)
    assert [answer.id for answer in found.rows[0].answers] == ["math-2-7-0", "lists-2-7-0", "math-2-7-1", "lists-2-7-1"]
    questions = tasks.generate("math", 2, 7, 2)
    assert found.rows[0].answers[0].prompt == tasks.messages(questions[0])
    assert list(found.rows[0].families) == ["math", "lists"] and found.rows[0].overall.accuracy == 0
    prompts = [{str(answer.prompt) for answer in one.rows[0].answers} for one in (found, other)]
    assert len(prompts[0] | prompts[1]) == 8


def test_the_questions_of_any_seed_are_held_out():
    trained = {key for index in range(150) for key in keys([tasks.Mixture(0, families=("math",))[index]])}
    asked = {key for seed in (0, 7) for key in keys(tasks.generate("math", 2, seed, 20))}
    assert trained and not trained & asked
    items = items_of(EvalOptions(families=("math",), limit=20, seed=7))
    assert [item.prompt[0]["content"] for item in items] == [q.prompt for q in tasks.generate("math", 2, 7, 20)]
    assert all(item.right(q.answers[0]) for item, q in zip(items, tasks.generate("math", 2, 7, 20), strict=True))


def test_samples_are_drawn_apart_and_counted_by_question(small, own):
    options = {"questions": own, "drafter": "none", "batch_size": 4, "max_new_tokens": FEW}
    found = evaluate(small, samples=3, temperature=1.0, **options).rows[0]
    assert [answer.sample for answer in found.answers] == [0, 1, 2] * 4 and found.overall.n == 4
    assert len({answer.text for answer in found.answers}) > 6
    again = evaluate(small, samples=3, temperature=1.0, **options).rows[0]
    assert [answer.text for answer in again.answers] == [answer.text for answer in found.answers]


def test_nothing_compiles_while_the_clock_runs(small):
    asked = ("import os", "while True", "x = 1", "for i in range(9):\n" * 8)
    questions = [{"prompt": prompt, "answer": ""} for prompt in asked]
    options = {"questions": questions, "drafter": "none", "batch_size": 4, "max_new_tokens": 4}
    (contestant,) = prepare(EvalOptions(model=small, **options)).contestants
    decoder.insert_program.clear_cache()
    contestant.warm()
    compiled = decoder.run_program._cache_size(), decoder.insert_program._cache_size()
    assert compiled[1] == 2  # the long prompt enters in a shape of its own
    records, cost = contestant.lap(range(4), lambda count: None)
    assert (decoder.run_program._cache_size(), decoder.insert_program._cache_size()) == compiled
    assert cost.tokens == sum(record.new_tokens for record in records) == 16 and 0 < cost.decode_seconds < cost.seconds


def test_what_is_compared_is_what_a_line_sets():
    base = DecoderOptions(drafter="none", temperature=0.5)
    assert changed(base, "sampling=top_h=0.4,min_p=0.1;ignore_eos=true;stop=x").of_prompts.given == {
        "temperature": 0.5, "seed": 0, "top_h": 0.4, "min_p": 0.1, "ignore_eos": True, "stop": ("x",),
    }  # fmt: skip
    other = changed(base, "decode=threshold:cache=dual,block_length=8; temperature=1")
    assert (other.drafter, other.temperature) == (None, 1.0) and other.way == Diffusion(
        "threshold", "dual", block_length=8
    )
    assert changed(base, "temperature=1").drafter == "none"
    assert changed(base, "model=tiny").drafter is None and not changed(base, "ignore_eos=false").ignore_eos


def test_parts_hold_everything_once():
    for count, batch in ((1, 8), (63, 8), (200, 8), (5000, 64)):
        assert [i for part in cut(count, batch) for i in part] == list(range(count))


@pytest.mark.slow
def test_a_drafter_writes_the_same_text_in_fewer_steps(small, own):
    options = {"questions": own, "drafter": "none", "batch_size": 4, "max_new_tokens": 48}
    found = evaluate(small, compare=("drafter=prompt_lookup:length=4",), **options)
    assert found.comparisons[0].verdict == "same text" and found.comparisons[0].speed > 0
    assert found.rows[1].tokens_per_step > 1 and found.rows[0].tokens_per_step == 1


@pytest.mark.slow
def test_a_diffusion_model_answers_and_fills_gaps(tmp_path):
    folder = save(tmp_path / "masked", diffusion=Masked(1, False))
    options = {
        "batch_size": 2,
        "decode": "fixed:cache=none",
        "families": "fill",
        "limit": 4,
        "max_new_tokens": 32,
    }
    found = evaluate(folder, compare="decode=fixed:steps=8,cache=none", **options)
    assert [row.tokens_per_step for row in found.rows] == [1, 4]
    gaps = evaluate(folder, infill=True, **options).rows[0]
    items = items_of(EvalOptions(families=("fill",), limit=4))
    tokenizer = models.load(folder).tokenizer
    pairs = [(answer, item.gap) for answer, item in zip(gaps.answers, items, strict=True) if item.gap]
    assert pairs and all(answer.tokens == len(tokenizer(f" {gap[1]}")["input_ids"]) for answer, gap in pairs)


def test_own_questions():
    chat = [{"role": "user", "content": "How many?"}]
    items = own_questions(
        [{"messages": chat, "answer": "four  men", "max_new_tokens": 3}, {"prompt": "a", "answers": ["b"]}]
    )
    assert [(item.id, item.family) for item in items] == [("line-1", "own"), ("line-2", "own")]
    assert items[0].prompt == chat and items[0].options == {"max_new_tokens": 3}
    assert items[0].right(" four\nmen ") and not items[0].right("fourmen")


@pytest.mark.parametrize(
    ("line", "said"),
    (
        ("{", "line 2: not valid JSON"),
        ({"prompt": "a"}, "line 2: answer must be a string"),
        ({"prompt": "a", "answers": []}, "line 2: answer must be a string"),
        ({"prompt": "a", "answers": "b", "answer": "c"}, "line 2: it has both answer and answers"),
        ({"answer": "c"}, "line 2: it needs one of prompt and messages"),
        ({"prompt": "a", "answer": "c", "family": 3}, "line 2: family must be a string"),
        ({"prompt": "a", "answer": "c", "colour": 3}, "line 2: it has no field 'colour'"),
        ({"prompt": "a", "answer": "c", "id": "x"}, "line 2: another question has the id 'x'"),
    ),
)
def test_questions_that_cannot_be_used(run, tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"prompt": "a", "answer": "b", "id": "x"})
    path.write_text(f"{good}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    status, out, err = run("--questions", path)
    assert (status, out) == (2, "") and err.count("\n") == 1 and f"{path}, {said}" in err


@pytest.mark.parametrize(
    ("words", "said"),
    (
        (["--families", "math,frob"], "unknown family 'frob'; choose math"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--level", "4"], "--level: invalid choice"),
        (["--samples", "2"], "several samples of a greedy answer are all the same"),
        (["--margin", "-1"], "margin must be in [0, 100] points"),
        (["--compare", "frob"], "'frob' is not OPTION=VALUE"),
        (["--compare", "seed=3"], "there is no option 'seed'; choose"),
        (["--compare", "top_k=many"], "--top-k: invalid int value"),
        (["--compare", "drafter=frob"], "unknown drafter 'frob'"),
        (["--compare", "decode=fixed"], "is an autoregressive model, which has no canvas to unmask"),
        (["--compare", "unmask=fixed"], "there is no option 'unmask'; it is in decode here"),
        (["--compare", "temperature=-1"], "temperature must be"),
        (["--compare", "sampling=top_h=2"], "top_h must be"),
        (["--compare", "ignore_eos=maybe"], "ignore_eos must be true or false, got 'maybe'"),
        (
            ["--drafter", "none", "--compare", "drafter=none"],
            "'drafter=none', the decoder that the others are compared with",
        ),
        (["--questions", "no_such_file.jsonl"], "cannot read the input file 'no_such_file.jsonl'"),
        (["--baseline", "no_such_file.jsonl"], "cannot read the input file 'no_such_file.jsonl'"),
        (["--answers", "no_such_folder/a.jsonl"], "give a file in a folder that exists"),
        (["--plot", "no_such_folder/a.png"], "give a file in a folder that exists"),
        (["--families", "math", "--infill"], "infill is for questions with a gap"),
        (["--families", "retrieve"], "question 'retrieve-2-0-"),
    ),
)
def test_what_cannot_be_asked(run, words, said):
    status, out, err = run("--limit", 3, *words)
    assert (status, out) == (2, "") and err.count("\n") == 1 and said in err
