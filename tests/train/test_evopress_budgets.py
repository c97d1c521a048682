"""EvoPress' search of a cache's budgets: its fitness against decoding with such a cache, and the command."""

import json
import random

import numpy as np
import pytest

import specjax
from specjax.assembly.registry import make_old
from specjax.cli import main
from specjax.evaluate.divergence import Text, divergences
from specjax.models.caches import EMS
from specjax.serve.engine import Engine
from specjax.train.data import Rows
from specjax.train.evopress.budgets import CacheDivergence, conversations
from specjax.train.evopress.population import Levels

RECENT, CHUNK, LEVELS = 8, 8, (8, 16, 24)
PROMPTS, ANSWER = (73, 57, 41), 5
"""Tokens: a multiple of a chunk behind the newest ones, so that nothing is folded along an answer."""


@pytest.fixture(scope="module")
def target():
    return specjax.load("tiny-draft")


def rows_of(target, packed=False):
    """Conversations of random tokens, one or two in a row."""
    rng, wide = np.random.default_rng(0), max(PROMPTS) + ANSWER
    sizes = [(73,), (57,), (41, 17)] if packed else [(73,), (57,), (41,)]
    tokens, mask, documents = (np.zeros((3, wide), kind) for kind in (np.int32, bool, np.int32))
    for row, own in enumerate(sizes):
        at = 0
        for document, prompt in enumerate(own):
            end = at + prompt + ANSWER
            tokens[row, at:end] = rng.integers(3, target.lm.vocab_size, end - at)
            mask[row, at + prompt : end], documents[row, at:end] = True, document
            at = end
    return Rows(tokens, mask, documents=documents if packed else None)


def fitness_of(target, rows, batch=2):
    policies = tuple(EMS(RECENT, CHUNK, budget=level) for level in LEVELS)
    texts = conversations(rows, RECENT + LEVELS[0] + CHUNK + 1)
    return CacheDivergence(target.lm, target.params, policies, LEVELS, texts, batch=batch)


def test_conversations_are_taken_apart(target):
    rows = rows_of(target, packed=True)
    found = conversations(rows, 30)
    assert [(own.first, len(own.ids), int(own.due.sum())) for own in found] == [
        (n, n + ANSWER, ANSWER) for n in PROMPTS
    ]
    assert [own.first for own in conversations(rows, 10)] == [73, 57, 41, 17]
    np.testing.assert_array_equal(found[2].ids, rows.tokens[2, : 41 + ANSWER])
    with pytest.raises(
        ValueError, match="prompts of at least 99 tokens to forget any, and the text's longest one has 73"
    ):
        conversations(rows, 99)


@pytest.mark.slow
def test_the_fitness_is_that_of_decoding_with_such_a_cache(target):
    """Token by token through an engine's own cache, whose layers have those sizes."""
    fitness = fitness_of(target, rows_of(target))
    count = target.lm.num_layers
    candidates = [(tuple(random.Random(i).choice(LEVELS) for _ in range(count)),) for i in range(2)]
    candidates.append(((LEVELS[0],) * count,))
    chosen = [(i, len(text.ids)) for i, text in enumerate(fitness.texts)]
    found = fitness(candidates, chosen)
    plain = Engine(target, "plain")
    texts = [
        Text(plain.request(text.ids[: text.first].tolist(), max_new_tokens=8), text.ids[text.first :].tolist())
        for text in fitness.texts
    ]
    requests = [text.request for text in texts]
    for (budgets,), own in zip(candidates, found, strict=True):
        line = f"ems:recent={RECENT},chunk={CHUNK},budgets={' '.join(map(str, budgets))}"
        engines = [plain, Engine(target, f"plain:cache=({line})")]
        capacity = max(engine.capacity(requests) for engine in engines)
        sums = divergences(engines, texts, keys=plain.keys(requests), capacity=capacity, batch_size=4)
        np.testing.assert_allclose(own, sums.sum() / (ANSWER * len(texts)), rtol=1e-3)
        assert own > 1e-4
    alone = fitness([candidates[0]], [chosen[1]])[0], fitness([candidates[0]], [(1, PROMPTS[1] + 2)])[0]
    assert alone[0] != pytest.approx(alone[1])  # of two tokens of the answer only


def test_budgets_keep_their_sum():
    space, rng = Levels(LEVELS, ((1,) * 6,), 16), random.Random(1)
    parent = space.start
    assert parent == ((16,) * 6,)
    for _ in range(50):
        child = space.child(rng, [parent])
        assert child is None or (sum(child[0]) == 96 and {*child[0]} <= {*LEVELS})
        parent = child or parent


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.jsonl"
    lines = [
        {"prompt": " ".join(f"{(i * k) % 17} hens" for k in range(40)), "completion": f" {i} dogs"} for i in range(20)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


FEW = (
    "--generations 2 --offspring 4 --survivors 2 1 --tokens 192 256 --length 256 --budget 32 --levels 16 32 48".split()
)


@pytest.mark.slow
def test_the_command_writes_a_line_that_decoding_reads(text, tmp_path, capsys):
    out = tmp_path / "new" / "cache.txt"
    asked = ["train", "evopress", "cache", "--target", "tiny-draft", "--data", text, "--output", str(out), *FEW]
    assert main([*asked, "--cache", "ems:recent=16,chunk=16"]) == 0
    line = out.read_text().strip()
    policy = make_old(line)
    count = specjax.load("tiny-draft").lm.num_layers
    assert len(policy.budgets) == count and sum(policy.budgets) == 32 * count and {*policy.budgets} <= {16, 32, 48}
    assert (policy.recent, policy.chunk) == (16, 16) and "plain:cache=($(cat" in capsys.readouterr().err
    found = specjax.generate("tiny-draft", "Two hens", decode=f"plain:cache=({line})", max_new_tokens=4)
    assert 1 <= len(found[0].tokens) <= 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cache", "spatten"], "--cache 'spatten' has no budget for each layer: choose ems"),
        (["--budget", "100"], "ems needs a chunk of at least 1, a budget of some chunks"),
        (["--cache", "ems:budget=32"], "--cache: budgets are what is searched"),
        (
            [*FEW, "--tokens", "96", "256", "--cache", "ems:recent=16,chunk=16"],
            "a round reads 96 tokens, and a prompt of the data has",
        ),
        (["--legal", "x"], "--legal is not for a search of cache"),
        (["--group", "name"], "--group is not for a search of cache"),
        (["--fitness", "perplexity"], "a cache is searched by divergence: kl or sparse_kl"),
        (["--budget", "512"], "the text's longest one has"),
        (["--levels", "64", "128"], "leaves nothing to choose among levels"),
    ],
)
def test_what_cannot_be_searched(words, said, text, tmp_path, capsys):
    asked = [
        "train",
        "evopress",
        "cache",
        "--target",
        "tiny-draft",
        "--data",
        text,
        "--output",
        str(tmp_path / "c.txt"),
    ]
    assert main([*asked, "--length", "256", *words]) == 2
    assert said in capsys.readouterr().err
