"""Every block of commands and Python in the pages runs as a reader copies it, with small things in the place of large ones."""

import ast
import fnmatch
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from support.block_runs import AFTER, GIVEN, MADE, SHORT, SUBSTITUTES, Reader, commands
from support.blocks import KINDS, OTHERS, PAGES, ROOT, blocks, fences
from support.planned import skip_without_compiler

from specjax.state import Finish


def texts(state, *at):
    """The rows' tokens, of the state at an index of a mapped axis."""
    tokens, length = (np.asarray(leaf)[at] for leaf in (state.tokens, state.length))
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]


def new_logprobs(state):
    """What the decoder kept of its new tokens, as one list."""
    rows = zip(np.asarray(state.logprobs.raw), state.prompt_length.tolist(), state.length.tolist(), strict=True)
    return np.concatenate([row[begin:end] for row, begin, end in rows])


CHECKS = {
    "README-1": lambda names, out: "24 - 17 = 7. Then 7 + 9 = 16. The answer is 16." in out,
    "constraints-4": lambda names, out: {own.text for own in names["records"]} <= {" Step 9", " Step 1: 99"},
    "constraints-8": lambda names, out: (
        len(names["records"]) == 48 and {own.text for own in names["records"]} <= {" Step 9", " Step 1: 99"}
    ),
    "diffusion-2": lambda names, out: len(names["between"][0].tokens) == 6 and names["between"][0].suffix == " 9, 10.",
    "evaluate-2": lambda names, out: (
        names["found"].comparisons[0].verdict == "same text" and names["found"].rows[0].overall.n == 8
    ),
    "folders-2": lambda names, out: names["again"].lm == names["model"].lm,
    "kernels-5": lambda names, out: names["out"].shape == names["x"].shape,
    "own_program-1": lambda names, out: (
        texts(names["watched"]) == texts(names["state"]) == texts(names["states"], 0) != texts(names["states"], 1)
    ),
    "own_program-2": lambda names, out: texts(names["state"]) == texts(names["same"]),
    "own_program-3": lambda names, out: (
        np.isclose(names["before"], -np.mean(new_logprobs(names["state"])), rtol=1e-5)
        and names["after"] < names["before"]
        and bool(names["again"].done.all())
    ),
    "pictures-1": lambda names, out: len(names["figure"].axes[0].lines) == 1,
    "rollouts-1": lambda names, out: names["means"][-1] > 1.5 * names["means"][0] > 0,
    "rollouts-2": lambda names, out: (
        names["found"].lengths.tolist() == (names["found"].prompt_lengths + 6).tolist()
        and {x.sharding.mesh.size for x in jax.tree.leaves(names["params"])} == {len(jax.devices())}
    ),
    "score-1": lambda names, out: len(names["scores"]) == 2 and all(score.logprob < 0 for score in names["scores"]),
    "searches-10": lambda names, out: "answer is 16" in names["record"].text and names["record"].steps,
    "searches-16": lambda names, out: names["found"].text == "tea" and names["record"].error is None,
    "searches-19": lambda names, out: (
        len(names["spans"]) == 3 and names["spans"][0].log_prob > names["spans"][-1].log_prob
    ),
    "use-4": lambda names, out: (  # each is an answer, and ends there
        (np.asarray(names["state"].finish) == Finish.EOS).all()
        and [text.count("<|end|>") for text in names["texts"]] == [2, 2]  # the question's, and the answer's
        and all(text.endswith("<|end|>") for text in names["texts"])
    ),
    "verifiers-4": lambda names, out: names["rates"] == sorted(names["rates"]),
}
"""What is there after a block, or what it wrote to stdout, beyond rows that are done and records that have tokens."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return Reader(lambda: tmp_path_factory.mktemp("block"))


def case(block):
    marks = [pytest.mark.slow, pytest.mark.covers(*sorted(block.about))]
    if block.not_run:
        marks.append(pytest.mark.skip(reason=f"not run: {block.not_run}"))
    return pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("block", [case(block) for block in blocks()])
def test_block(reader, block):
    for topology in re.findall(r"specjax plan.*?--topology (\S+)", block.text, flags=re.DOTALL):
        skip_without_compiler(topology)
    ran = reader.run(block)
    if block.name in CHECKS:
        assert CHECKS[block.name](ran.names, ran.out)
    if "state" in ran.names:
        assert bool(ran.names["state"].done.all())
    if "records" in ran.names:
        assert ran.names["records"][0].new_tokens > 0


def test_every_fence_says_what_it_holds():
    """By a word that is known, so that no block is left out unseen."""
    for page in PAGES:
        words = [word for _, word, _ in fences(page)]
        assert set(words) <= {*KINDS, *OTHERS}, page
        lines = re.findall(r"^[ >]*```", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert len(lines) == 2 * len(words), f"{page} has a fence that is indented, or has no end"


def test_what_is_not_run_says_why_and_what_stands_for_something_is_used():
    for page in PAGES:
        reasons = [(why, word) for why, word, _ in fences(page) if why]
        assert all(word in KINDS and why.startswith(("needs ", "takes ")) for why, word in reasons), reasons
        comments = re.findall(r"^[ >]*<!-- not run", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert len(comments) == len(reasons), f"{page} has one that stands above no block, or not just above it"
    run = {block.name: block for block in blocks() if not block.not_run}
    for names, old, _ in SUBSTITUTES:
        assert any(fnmatch.fnmatchcase(name, names) and old in block.text for name, block in run.items()), old
    assert {*AFTER, *AFTER.values(), *GIVEN, *MADE, *CHECKS} <= set(run)
    said = " ".join(block.text for block in run.values())
    assert all(f"specjax {command} " in said for command in SHORT)


def test_checks_read_what_their_blocks_define():
    """A block that was put before others renumbers them, and a check must not stay with the number."""
    run = {block.name: block for block in blocks()}
    own = ast.parse(Path(__file__).read_text())
    table = next(node.value for node in own.body if isinstance(node, ast.Assign) and node.targets[0].id == "CHECKS")
    for key, check in zip(table.keys, table.values, strict=True):
        reads = [
            node
            for node in ast.walk(check)
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "names"
        ]
        assert all(node.slice.value in run[key.value].text for node in reads), key.value


def test_commands_are_told_from_what_a_shell_does():
    text = "specjax eval --limit 3 \\\n  --json # one; two\nspecjax models; specjax generate 'a; (b)'\n"
    assert commands(text) == [["eval", "--limit", "3", "--json"], ["models"], ["generate", "a; (b)"]]
    for text in (
        "specjax bench > a",
        "specjax datastore build *.md",
        "specjax models && ls",
        "python -m specjax.tasks",
    ):
        assert commands(text) is None
