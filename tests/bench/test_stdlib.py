"""The standard library as a corpus: its training and held-out files, and prompts from the latter."""

import ast

import pytest

from specjax.bench import stdlib


def test_training_and_heldout_files_are_apart_and_are_code():
    train, heldout = stdlib.training_files(), stdlib.heldout_files()
    assert not set(train) & set(heldout)
    assert len(heldout) >= 20 and len(train) > 300
    relative = [path.relative_to(stdlib.root()).parts for path in train + heldout]
    skipped = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    assert not any(skipped & set(parts) for parts in relative)


def test_heldout_files_are_a_twentieth_of_the_bytes():
    train = sum(path.stat().st_size for path in stdlib.training_files())
    heldout = sum(path.stat().st_size for path in stdlib.heldout_files())
    assert 0.03 < heldout / (train + heldout) < 0.07


def test_prompts_are_openings_of_heldout_functions():
    prompts = stdlib.heldout_functions(20)
    assert prompts == stdlib.heldout_functions(20)
    assert len(set(prompts)) == 20
    sources = [stdlib.read(path) for path in stdlib.heldout_files()]
    for prompt in prompts:
        assert 200 <= len(prompt) <= 500
        assert prompt == prompt.rstrip("\n")
        text = prompt.split("\n", 1)[1] if prompt.startswith("class ") else prompt
        holders = [i for i, source in enumerate(sources) if text + "\n" in source]
        assert holders, prompt
        assert "def " in text
    longest = max(prompt.count("\n") for prompt in prompts)
    assert longest < 40


def test_prompts_spread_over_the_files():
    sources = [stdlib.read(path) for path in stdlib.heldout_files()]
    body = [p.split("\n", 1)[1] if p.startswith("class ") else p for p in stdlib.heldout_functions(20)]
    used = {next(i for i, source in enumerate(sources) if text in source) for text in body}
    assert len(used) >= 15


def test_more_prompts_than_there_are():
    prompts = stdlib.heldout_functions(100_000)
    assert 100 < len(prompts) < 100_000
    assert len(set(prompts)) == len(prompts)
    with pytest.raises(ValueError, match="at least one"):
        stdlib.heldout_functions(0)


def test_methods_come_with_their_class():
    source = (
        "class A:\n    def f(self, x):\n"
        + '        """'
        + "word " * 40
        + '"""\n'
        + "        a = 1\n        b = 2\n        c = 3\n"
    )
    ast.parse(source)
    (prompt,) = stdlib._prompts(source)
    assert prompt.startswith("class A:\n    def f(self, x):") and prompt.endswith("a = 1")
