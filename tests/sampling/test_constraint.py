"""The warper of constraints: its table's tokens at every node of a tree, and the constrained distribution under every rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA, MODEL, NEW, PARAMS, PROMPT, ROWS, TARGET, V, generate
from support.verifiers import expander_for, verifier_of

import specjax
from specjax.constrain import Table
from specjax.draft import Forced, ModelDrafter, NoDrafter
from specjax.reference import rejection as oracle
from specjax.reference import statistics, trees
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.warp import walked
from specjax.sampling_params import SamplingOptions, form_of
from specjax.tree import Topology, Tree

TOPOLOGY = Topology.from_counts("3 | 2 1 | 1 1 | 1")
NODES, TOKENS, LENGTH, EOS = len(TOPOLOGY.parents), 12, 10, (5, 9)


def random_table(rng, states=6, kinds=5, vocab=TOKENS, eos=EOS):
    """An automaton of chance that some text leads through."""
    while True:
        following = np.where(rng.random((states, kinds)) < 0.4, -1, rng.integers(0, states, (states, kinds)))
        accepts = rng.random(states) < 0.3
        try:
            return Table.of("random", following, rng.integers(0, kinds, vocab), accepts, eos)
        except ValueError:
            continue


def text_of(table, rng, count):
    """Up to so many tokens that a table allows one after the other."""
    state, found = 0, []
    while len(found) < count:
        state = table.next(state, token := int(rng.choice(np.flatnonzero(table.allowed(state)))))
        found.append(token)
    return found


def made(rng, tables, carried=True):
    """Rows of texts in their tables' languages, drafted trees that partly are, and limits near by."""
    rows = len(tables)
    begin, new = rng.integers(1, 5, rows), rng.integers(0, LENGTH - 5, rows)
    tokens, state = rng.integers(0, TOKENS, (rows, LENGTH)), np.zeros(rows, int)
    for row, table in enumerate(tables):
        own = text_of(table, rng, int(new[row]))
        tokens[row, begin[row] : begin[row] + new[row]] = own
        state[row] = functools.reduce(table.next, own, 0)
    tree = Tree.of(
        TOPOLOGY, jnp.asarray(rng.integers(0, TOKENS, (rows, NODES))), jnp.asarray(rng.random((rows, NODES)) < 0.9)
    )
    filled = [SamplingOptions(constraint=table) for table in tables]
    params = jax.tree.map(jnp.asarray, SamplingArrays.of_rows(filled, form_of(filled)))
    limit = begin + new + rng.integers(1, 9, rows)
    sampler = Sampler(
        jax.random.split(jax.random.key(0), rows), jnp.asarray(tokens), jnp.asarray(begin + new), jnp.ones(rows, bool), params,
        begin=jnp.asarray(begin), limit=jnp.asarray(limit), carried={"constraint": jnp.asarray(state)} if carried else None,
    )  # fmt: skip
    return sampler, tree, state


penalised = jax.jit(lambda made, tree, logits: made.penalised(logits, tree.path_tokens))


@pytest.mark.parametrize("carried", (True, False))
def test_masks_at_every_node(carried):
    rng = np.random.default_rng(0)
    tables = [random_table(rng, 2 + i % 7, 2 + i % 4) for i in range(24)]
    sampler, tree, states = made(rng, tables, carried)
    logits = rng.normal(size=(24, NODES, TOKENS)).astype(np.float32)
    got, seen = np.asarray(penalised(sampler, tree, jnp.asarray(logits))), 0
    for row, table in enumerate(tables):
        for node in range(NODES):
            path = [int(t) for t in np.asarray(tree.tokens)[row, trees.path_to(TOPOLOGY.parents, node)[1:]] if t >= 0]
            state = functools.reduce(
                lambda state, t, table=table: table.next(state, t) if state >= 0 else -1, path, states[row]
            )
            room = int(sampler.limit[row] - sampler.length[row]) - len(path)
            allowed = np.zeros(TOKENS, bool) if state < 0 else table.allowed(state, room)
            below = path and not allowed.any()  # nobody asks there; where a text stands, nothing is left
            want = logits[row, node] if below else np.where(allowed, logits[row, node], -np.inf)
            np.testing.assert_array_equal(got[row, node], want)
            seen += allowed.any() and not allowed.all()
    assert seen > 50


def test_states_move_with_committed_tokens():
    rng = np.random.default_rng(1)
    tables = [random_table(rng) for _ in range(8)]
    sampler, _, states = made(rng, tables)
    drawn = np.asarray([functools.reduce(lambda own, _: [*own, *text_from(table, rng, own, state)], range(3), [])
                        for table, state in zip(tables, states, strict=True)])  # fmt: skip
    count = np.arange(8) % 4
    moved = walked(sampler.params, sampler.carried, jnp.asarray(drawn), jnp.asarray(count))["constraint"]
    want = [
        functools.reduce(t.next, own[:n].tolist(), s) for t, own, n, s in zip(tables, drawn, count, states, strict=True)
    ]
    assert moved.tolist() == want


def text_from(table, rng, before, state):
    state = functools.reduce(table.next, before, state)
    return [int(rng.choice(np.flatnonzero(table.allowed(state))))]


def test_rows_without_one_are_as_they_were():
    rng = np.random.default_rng(2)
    rows = [SamplingOptions(), SamplingOptions(constraint=random_table(rng))]
    params = jax.tree.map(jnp.asarray, SamplingArrays.of_rows(rows, form_of(rows)))
    sampler = Sampler(
        jax.random.split(jax.random.key(0), 2), jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), jnp.ones(2, bool), params,
        begin=jnp.ones(2, jnp.int32),
    )  # fmt: skip
    got = np.asarray(sampler.penalised(jnp.zeros((2, 1, TOKENS))))[:, 0]
    assert (got[0] == 0).all() and np.array_equal(np.isfinite(got[1]), rows[1].constraint.allowed(0))
    with pytest.raises(
        ValueError, match="constraint 'choice:a' is not compiled: specjax.constrain.compiled makes a table"
    ):
        SamplingArrays.make(1, constraint=["choice:a"])


# ---- the distribution of whole texts, by counting -------------------------------------------------------------------

FOLLOWING = np.asarray([[0, 1, -1, 2], [-1, 2, 0, -1], [1, 0, 2, 2]])
LANGUAGE = Table.of(
    "three states", FOLLOWING, np.arange(V), np.asarray([False, False, True]), (), np.asarray([1, 2, -1])
)
"""Texts of any length; of those of `NEW` tokens, some are allowed only until the limit comes near."""
CONSTRAINED = {"temperature": 1.4, "constraint": [LANGUAGE] * ROWS}


@functools.cache
def exact():
    """The distribution of `NEW` tokens when each is drawn from the model's, renormalised over what can be completed."""
    out = []
    for i in range(NEW):
        contexts = np.array(list(itertools.product(range(V), repeat=i)), int).reshape(V**i, i)
        prompt = np.broadcast_to(PROMPT, (len(contexts), len(PROMPT)))
        logits = np.asarray(TARGET.next_log_probs(PARAMS["target"], np.concatenate([prompt, contexts], axis=1)), float)
        weights = np.exp(logits / CONSTRAINED["temperature"])
        for row, own in enumerate(contexts):
            state = functools.reduce(lambda state, t: LANGUAGE.next(state, int(t)) if state >= 0 else -1, own, 0)
            allowed = LANGUAGE.allowed(state, NEW - i) if state >= 0 else np.zeros(V, bool)
            weights[row] *= allowed if allowed.any() else 1
        out.append((weights / weights.sum(axis=1, keepdims=True)).reshape((V,) * (i + 1)))
    return out


def p_value_of(drafter, verifier):
    text = np.asarray(generate(drafter, verifier, optimise=True, **CONSTRAINED).tokens)[
        :, len(PROMPT) : len(PROMPT) + NEW
    ]
    counts, p = np.zeros((V,) * NEW), oracle.joint(exact())
    np.add.at(counts, tuple(text.T), 1)
    assert counts[p == 0].sum() == 0 and 4 < (p > 0).sum() < V**NEW
    return statistics.chi_square(counts[p > 0], p[p > 0])


RULES = (
    "rejection",
    "block",
    "recursive",
    "recursive_wor",
    "traversal",
    "best",
    "coupled",
    "greedy_multi",
    "multi_step",
)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("plain", "forced", *RULES))
def test_texts_have_the_constrained_distribution(rule):
    if rule == "plain":
        assert p_value_of(NoDrafter(), specjax.verify.Coupled()) > ALPHA
        return
    if rule == "forced":
        assert p_value_of(Forced(length=2), verifier_of("rejection")) > ALPHA
        return
    verifier = verifier_of(rule)
    drafter = MODEL if rule in ("rejection", "block") else ModelDrafter(MODEL.lm, expander_for(verifier))
    assert p_value_of(drafter, verifier) > ALPHA
