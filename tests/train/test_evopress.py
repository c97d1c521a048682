"""EvoPress: its draws in the published order, budgets that every child keeps, fitness by definition, and the command."""

import dataclasses
import itertools
import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow

import specjax
from specjax.cli import main
from specjax.models.drop_config import read_drops
from specjax.models.formats import matrices, read_format
from specjax.train.data import Rows
from specjax.train.evopress import command as searching
from specjax.train.evopress.fitness import Divergence, divergence, logits
from specjax.train.evopress.population import Drops, Evolution, Levels, Stage, cuts, flips

ALL = lambda layers: ((True,) * layers,) * 2
SIZES = ((6, 6, 6), (4, 4), (10, 10, 10, 10))


def evolved(space, count, fitness=None, tokens=(20, 60), survivors=(2, 1), seed=0, lengths=(7,) * 30):
    weigh = random.Random(3)
    weights = [weigh.random() for _ in range(200)]
    usual = lambda candidates, chosen: [
        sum(w * level for w, level in zip(weights, itertools.chain(*one), strict=False)) for one in candidates
    ]
    evolution = Evolution(space, lengths, fitness or usual, 8, tuple(map(Stage, survivors, tokens)), (16, 10))
    return list(itertools.islice(evolution.run(random.Random(seed)), count + 1))


@pytest.mark.parametrize(("layers", "count", "generations"), [(32, 12, 160), (32, 8, 128), (12, 3, 18)])
def test_generations_are_the_published_numbers(layers, count, generations):
    assert Drops(count, ALL(layers)).generations == generations


def test_every_child_leaves_out_as_many_of_each_type_and_nothing_that_is_not_legal():
    legal = (tuple(i > 0 for i in range(9)), tuple(i not in (0, 8) for i in range(9)))
    space, rng = Drops(3, legal), random.Random(1)
    parent = space.first(rng)
    children = [child for _ in range(300) if (child := space.child(rng, [parent])) is not None]
    assert len({*children}) > 60
    for child in (parent, *children):
        assert [sum(group) for group in child] == [3, 3]
        assert all(own or not gone for pair in zip(child, legal, strict=True) for gone, own in zip(*pair, strict=True))
    changes = [
        sum(a != b for g, h in zip(parent, one, strict=True) for a, b in zip(g, h, strict=True)) for one in children
    ]
    assert max(changes) == 6 and min(changes) == 0  # up to three swaps; swaps may undo each other


@pytest.mark.parametrize("bits", (3.0, 2.5))
def test_bits_within_sizes_keep_their_sum_and_across_sizes_the_budget(bits):
    space, rng = Levels((2, 3, 4), SIZES, bits), random.Random(2)
    parent = space.start or space.first(rng)
    assert (space.start is None) == (bits == 2.5) and space.most - 10 < space.spent(parent) <= space.most
    for _ in range(200):
        child = space.child(rng, [parent])
        assert [sum(group) for group in child] == [sum(group) for group in parent]
        assert {level for group in child for level in group} <= {2, 3, 4}
    every = ((tuple(itertools.chain(*SIZES))),)
    wide = Levels((2, 3, 4), every, bits, across=True)
    parent = wide.start or wide.first(rng)
    children = [child for _ in range(200) if (child := wide.child(rng, [parent])) is not None]
    assert {wide.spent(child) <= wide.most for child in children} == {True}
    assert len({wide.spent(child) for child in children}) > 1


def test_the_best_fitness_on_a_fixed_text_never_rises_and_reaches_the_best_of_all():
    space = Drops(2, ALL(6))
    found = evolved(space, 25, tokens=(210, 210))
    best = [own.fitness[0] for own in found]
    assert all(b <= a for a, b in itertools.pairwise(best)) and best[-1] < best[0]
    weigh = random.Random(3)
    weights = [weigh.random() for _ in range(12)]
    assert math.isclose(best[-1], sum(sorted(weights[:6])[:2]) + sum(sorted(weights[6:])[:2]))
    assert found[-1].read == 16 * 10 + 25 * (8 * 210 + 3 * 210)


def test_a_parent_is_measured_anew_and_before_the_last_round_only():
    seen = []

    def fitness(candidates, chosen):
        seen.append((len(candidates), sum(size for _, size in chosen), {i for i, _ in chosen}))
        return [sum(one[0]) for one in candidates]

    evolved(Drops(3, ALL(9)), 2, fitness, tokens=(20, 60))
    assert [own[:2] for own in seen] == [(16, 10), (8, 20), (3, 60), (8, 20), (3, 60)]
    assert len({tuple(sorted(own[2])) for own in seen}) > 2  # of a fresh part of the text each time


def test_rounds_read_exactly_so_many_tokens_of_different_sequences():
    lengths = [3, 9, 5, 7, 2, 8]
    for tokens in range(2, sum(lengths) + 1):
        chosen = cuts(random.Random(tokens), lengths, tokens)
        assert sum(size for _, size in chosen) == tokens and len({i for i, _ in chosen}) == len(chosen)
        assert all(size == lengths[i] for i, size in chosen[:-1]) and chosen[-1][1] <= lengths[chosen[-1][0]]


def test_few_changes_are_the_likeliest():
    rng = random.Random(0)
    counts = np.bincount([flips(rng, 3) for _ in range(18000)])[1:] / 18000
    np.testing.assert_allclose(counts, [5 / 9, 3 / 9, 1 / 9], atol=0.012)  # three standard errors


def test_a_small_space_is_used_up():
    found = evolved(Drops(1, ((False, True, True), (False, True, True))), 2)
    assert len(found) == 3  # only three others exist, and none is awaited for ever


@pytest.fixture(scope="module")
def small():
    return specjax.load("tiny-draft")


def rows_of(small, count=5, length=24):
    rng = np.random.default_rng(0)
    mask = np.ones((count, length), bool)
    mask[:, :3], mask[1, 17:] = False, False  # a prompt, and padding
    return Rows(rng.integers(3, small.lm.vocab_size, (count, length)).astype(np.int32), mask)


def test_a_divergence_is_that_of_the_definition():
    rng = np.random.default_rng(1)
    whole, own = rng.normal(size=(2, 4, 9)) * 3
    soft = lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    want = (soft(whole) * np.log(soft(whole) / soft(own))).sum(axis=-1)
    near = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(divergence(jnp.float32(whole), jnp.float32(own)), want, **near)
    np.testing.assert_allclose(divergence(jnp.float32(whole), jnp.float32(own), 9), want, **near)
    likely = np.argsort(-whole, axis=-1)[:, :4]
    p, q = (soft(np.take_along_axis(x, likely, axis=1)) for x in (whole, own))
    want = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(divergence(jnp.float32(whole), jnp.float32(own), 4), want, **near)


@pytest.mark.parametrize("kind", but_slow(("kl", "perplexity"), "perplexity"))
def test_fitness_is_a_mean_over_the_predicted_tokens_of_what_was_chosen(small, kind):
    rows = rows_of(small)
    layers = small.lm.num_layers
    compress = lambda candidate: (small.params, jnp.asarray(candidate, bool).T)
    candidates = [((0,) * layers,) * 2, ((0,) * (layers - 1) + (1,),) * 2]
    fitness = Divergence(small.lm, small.params, compress, rows, kind, batch=2)
    assert fitness.lengths == [24, 17, 24, 24, 24]
    chosen = [(3, 24), (1, 17), (4, 11)]
    want, run = [[], []], jax.jit(logits, static_argnums=0)
    for row, size in chosen:
        batch = fitness._batch([(row, size)], 1, 24)
        whole = np.asarray(jax.nn.log_softmax(run(small.lm, small.params, None, batch)), float)[0]
        for own, candidate in zip(want, candidates, strict=True):
            found = run(small.lm, small.params, compress(candidate)[1], batch)
            q = np.asarray(jax.nn.log_softmax(found), float)[0]
            for at in range(size - 1):
                if rows.mask[row, at + 1]:
                    nll = -q[at, rows.tokens[row, at + 1]]
                    own.append((np.exp(whole[at]) * (whole[at] - q[at])).sum() if kind == "kl" else nll)
    means = np.asarray([np.mean(own) for own in want])
    got = fitness(candidates, chosen)
    np.testing.assert_allclose(got, np.exp(means) if kind == "perplexity" else means, rtol=1e-4, atol=1e-5)
    assert got[0] == 0 or kind != "kl"
    assert abs(got[1] - got[0]) > 0.1


def test_numbers_that_are_not_finite_lose(small):
    broken = jax.tree.map(lambda x: x * jnp.nan, small.params)
    fitness = Divergence(small.lm, small.params, lambda one: ((small.params, broken)[one], None), rows_of(small))
    assert fitness([0, 1], [(0, 9)]) == [0.0, math.inf]


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.jsonl"
    lines = [{"text": " ".join(f"{(i * k) % 17} hens" for k in range(12))} for i in range(60)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


FEW = (
    "--generations 2 --offspring 4 --survivors 2 1 --tokens 64 128 --initial 4 --initial-tokens 32 --length 32".split()
)


@pytest.mark.slow
def test_the_command_writes_drops_that_swift_reads(text, tmp_path, capsys):
    out = tmp_path / "new" / "drops.txt"
    assert main(["train", "evopress", "drops", "--data", text, "--output", str(out), "--budget", "0.25", *FEW]) == 0
    drops = read_drops(out)
    assert [sum(own) for own in zip(*drops, strict=True)] == [2, 2] and drops[0] == (False, False) and len(drops) == 8
    said = capsys.readouterr().err
    assert f"swift:layers={out}" in said and f"{4 * 32 + 2 * (4 * 64 + 3 * 128)} tokens were read" in said
    legal = tmp_path / "legal.txt"
    legal.write_text("none\n" * 2 + "attn+mlp\n" * 3 + "none\n" * 3)
    asked = ["train", "evopress", "drops", "--data", text, "--output", str(out), "--legal", str(legal), *FEW]
    assert main(asked) == 0
    assert not any(any(own) for own in (*read_drops(out)[:2], *read_drops(out)[5:]))
    plain = specjax.generate("tiny", ["Two hens"], max_new_tokens=12)
    drafted = specjax.generate("tiny", ["Two hens"], max_new_tokens=12, drafter=f"swift:layers={out}")
    assert [own.tokens for own in plain] == [own.tokens for own in drafted]


@pytest.mark.slow
def test_the_command_writes_bits_that_weights_reads(text, tmp_path):
    out = tmp_path / "bits.txt"
    asked = ["train", "evopress", "bits", "--target", "tiny-draft", "--data", text, "--output", str(out)]
    assert main([*asked, "--budget", "6", *FEW]) == 0
    plain, few = specjax.load("tiny-draft"), specjax.load("tiny-draft", weights=str(out))
    own = matrices(few.params)
    kinds = {name: leaf.dtype if not hasattr(leaf, "values") else leaf.values.dtype.name for name, leaf in own.items()}
    kinds = {name: kind for name, kind in kinds.items() if name.startswith("model.layers")}
    assert {*kinds.values()} == {"int4", "int8"}
    sizes = {name: leaf.size for name, leaf in matrices(plain.params).items() if name in kinds}
    spent = sum(size * int(kinds[name][3:]) for name, size in sizes.items())
    assert 5.5 * sum(sizes.values()) < spent <= 6 * sum(sizes.values())
    assert main([*asked, "--budget", "8", "--levels", "4", "8", *FEW]) == 2


BAD = [
    ({"budget": 1.5}, "--budget is the share of layers"),
    ({"budget": 0.01}, "0 of the .* attentions .* leave nothing to choose"),
    ({"levels": (4, 8)}, "--levels is not for a search of drops"),
    ({"what": "bits", "legal": "x"}, "--legal is not for a search of bits"),
    ({"what": "bits", "levels": (3, 4)}, "there is no format of 3 bits"),
    ({"what": "bits", "levels": (4, 8, 16)}, "equal steps"),
    ({"what": "bits", "budget": 9.0}, "an average of 9 bits leaves nothing to choose"),
    ({"top_k": 4}, "--top-k is for --fitness sparse_kl"),
    ({"survivors": (3, 2, 1)}, "--survivors and --tokens have a number for each round"),
    ({"data": ()}, "give one of --data or --prompts"),
    ({"target": "tiny-diffusion"}, "is a diffusion model"),
    ({"generations": 0}, "--generations must be at least 1"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_wrong_inputs_are_refused_before_the_search(change, said, text, tmp_path):
    from specjax.train.options import EvopressOptions

    given = {"what": "drops", "target": "tiny-draft", "data": (text,), "output": str(tmp_path / "out"), "budget": 0.5}
    given |= {"tokens": (64, 128), "initial_tokens": 32, "length": 32}
    given |= {"tokens": (64, 128, 128)} if change.get("what") == "bits" else {}
    with pytest.raises(ValueError, match=said):
        searching._prepared(EvopressOptions(**(given | change)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"survivors": (1, 2)}, "keeps at most what it is given"),
        ({"survivors": (9, 1)}, "keeps at most what it is given"),
        ({"tokens": (20, 1)}, "at least 2 tokens, not 1"),
        ({"tokens": (20, 211)}, "reads 211 tokens, and the text has 210: give more text"),
        ({"space": Levels((2, 3, 4), SIZES, 3.0), "survivors": (4, 2)}, "has one parent"),
        ({"space": Drops(1, ((False, True, True), (False, True, True))), "survivors": (8, 17)}, "keeps at most"),
        ({"space": Drops(1, ((False, True, True), (False, True, True))), "survivors": (8, 1)}, None),
    ],
)
def test_wrong_rounds_are_refused(change, said):
    given = {"space": Drops(2, ALL(6)), **change}
    if said is None:
        assert len(evolved(count=1, **given)) == 2
        return
    with pytest.raises(ValueError, match=said):
        evolved(count=1, **given)


def test_a_legal_list_of_another_model_is_refused(text, tmp_path):
    from specjax.train.options import EvopressOptions

    given = {"what": "drops", "target": "tiny-draft", "data": (text,), "output": str(tmp_path / "out")}
    for lines, said in (("none\n", "has 1 lines"), ("attn\n" * 2, "a part of the first layer")):
        (tmp_path / "legal.txt").write_text(lines)
        with pytest.raises(ValueError, match=said):
            searching._prepared(EvopressOptions(**given, legal=str(tmp_path / "legal.txt")))
    with pytest.raises(ValueError, match="is a folder; give a file"):
        searching._prepared(EvopressOptions(**(given | {"output": str(tmp_path)})))


@pytest.mark.slow
def test_levels_of_matrices_are_those_of_their_formats(small):
    assert searching.grouped({f"model.layers.{i}.mlp.up_proj": 4 + i % 2 for i in range(4)}, "size") == [
        ["model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"],
        ["model.layers.1.mlp.up_proj", "model.layers.3.mlp.up_proj"],
    ]
    form = read_format("int4")
    rounded = searching._rounded(form, small.params)
    want = dataclasses.replace(small, params=form.params(small.params))
    batch = Divergence(small.lm, small.params, lambda one: one, rows_of(small))._batch([(0, 24)], 1, 24)
    run = jax.jit(logits, static_argnums=0)
    found = run(small.lm, rounded, None, batch)
    np.testing.assert_allclose(found, run(small.lm, want.params, None, batch), rtol=1e-3, atol=1e-3)
