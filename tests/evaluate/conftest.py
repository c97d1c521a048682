"""A small model, questions for it, and the command."""

import json

import pytest
from support.small_eval import FEW, PROMPTS, save

import specjax
from specjax import cli


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def own(small, tmp_path_factory):
    """Questions whose answers are what the model writes, but for one."""
    records = specjax.generate(small, PROMPTS, drafter="none", max_new_tokens=FEW, progress=False)
    lines = [{"prompt": r.prompt, "answers": ["no", f" {r.text}\n"], "id": f"q{i}"} for i, r in enumerate(records)]
    lines[1] |= {"family": "loops"}
    lines[3] |= {"family": "loops", "answers": ["something else"]}
    path = tmp_path_factory.mktemp("questions") / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def run(small, capsys):
    """Runs the command on the small model and gives its exit status, stdout and stderr."""

    def go(*words):
        status = cli.main(
            ["eval", "--model", small, "--max-new-tokens", str(FEW), "--batch-size", "4", *map(str, words)]
        )
        return status, *capsys.readouterr()

    return go
