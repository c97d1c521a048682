"""lm-evaluation-harness over tasks in local files: choices, whole texts and completions. Skipped without the extra `eval`."""

import json
from types import SimpleNamespace

import pytest

import specjax

lm_eval = pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what the harness imports warns

CHOICE = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
COMPLETE = """
task: completions
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
PROMPTS = ["def add(a, b):\n    return a +", "import os\nfor name in", "class Stack:\n    def __init__(self"]
CHOICES = [" b", " zebra", ", os"]


@pytest.fixture(scope="module")
def lm():
    from specjax.evaluate.lm_eval import SpecjaxLM

    return SpecjaxLM(drafter="prompt_lookup", batch_size=4)


def run(lm, task, rows, folder, monkeypatch):
    """The samples that the harness logs for a task over these rows."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = task.split()[1]
    (folder / f"{name}.yaml").write_text(task.replace("FILE", str(data)))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(model=lm, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True)
    return sorted(results["samples"][name], key=lambda sample: sample["doc_id"]), results["results"][name]


def test_a_task_of_choices_has_our_scores(lm, tmp_path, monkeypatch):
    rows = [{"prompt": prompt, "choices": CHOICES, "answer": 0} for prompt in PROMPTS]
    samples, figures = run(lm, CHOICE, rows, tmp_path, monkeypatch)
    right = 0
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        scores = specjax.score(lm.engine.model, prompt, CHOICES)
        logged = [float(answer[0]) for (answer,) in sample["resps"]]
        assert logged == pytest.approx([score.logprob for score in scores], abs=1e-3)
        right += logged[0] == max(logged)
    assert figures["acc,none"] == pytest.approx(right / len(PROMPTS))


def test_a_task_of_completions_has_our_texts(lm, tmp_path, monkeypatch):
    records = specjax.generate(lm.engine.model, PROMPTS, drafter="none", max_new_tokens=8, stop="\n")
    rows = [{"prompt": prompt, "text": record.text} for prompt, record in zip(PROMPTS, records, strict=True)]
    samples, figures = run(lm, COMPLETE, rows, tmp_path, monkeypatch)
    assert [sample["resps"][0][0] for sample in samples] == [record.text for record in records]
    assert figures["exact_match,none"] == 1.0


def test_a_whole_text_longer_than_the_model(lm):
    text = "def add(a, b):\n    return a + b\n\n\n" * 150
    ids = lm.tok_encode(text, add_special_tokens=False)
    assert len(ids) > lm.engine.max_length
    (whole,) = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    first = ids[: lm.engine.max_length - 1]
    (score,) = specjax.score(lm.engine.model, [[lm.prefix_token_id]], [first])
    assert whole < score.logprob < 0
    (short,) = lm.loglikelihood_rolling([SimpleNamespace(args=(lm.tokenizer.decode(ids[:40]),))])
    assert short == pytest.approx(sum(score.logprobs[:40]), abs=1e-3)


def test_what_a_task_may_ask_for(lm):
    ask = lambda **options: lm.generate_until([SimpleNamespace(args=(PROMPTS[0], options))])
    with pytest.raises(ValueError, match="has no option 'num_beams'"):
        ask(num_beams=4, until=[])
    with pytest.raises(ValueError, match="leave no room for a prompt"):
        ask(max_gen_toks=10**6, until=[])
    drawn = ask(do_sample=True, temperature=1.0, top_p=0.9, max_gen_toks=8, until=["\n"])
    assert drawn == ask(do_sample=True, temperature=1.0, top_p=0.9, max_gen_toks=8, until="\n")
