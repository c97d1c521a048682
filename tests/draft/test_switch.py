"""The switch's choices against a bandit in plain Python, what it leaves out, and what it refuses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.assembly.companions import Parted
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft import (
    DiffusionDrafter,
    DiffuSpec,
    Drafter,
    Goodput,
    Jacobi,
    Lookahead,
    ModelDrafter,
    NoDrafter,
    Online,
    PromptLookup,
    Stand,
    Suffix,
    Switch,
    TokenRecycling,
    adaptive,
    fuse,
)
from specjax.draft.base import Proposal, View
from specjax.draft.switch import FADE, followed
from specjax.expand import Chain
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.tree import Topology, Tree

STEPS, ROWS = 60, 3
LM = TabularLM(12, order=2)


def accepted(step, row, member):
    """Accepted tokens, made by hand: member 1 is best for row 0, member 2 for row 1 in the second half, none for row 2."""
    if row == 0:
        return (0, 3, 1)[member]
    if row == 1:
        return (2, step % 2, 4 * (step >= STEPS // 2))[member]
    return 0


class Bandit:
    """The formula of the class, one row and one number at a time."""

    def __init__(self, switch):
        self.how, self.count = switch, len(switch.members)
        self.rows = [[([], []) for _ in range(self.count)] for _ in range(ROWS)]  # ages and tokens of every trial
        self.all = [[] for _ in range(self.count)]
        self.clock = 0

    def choice(self, row, age):
        def known(member):
            trials, tokens = self.rows[row][member]
            weights = [self.how.decay ** (age - at) for at in trials]
            n, m = sum(weights), sum(w * x for w, x in zip(weights, tokens, strict=True))
            shared = [(FADE ** (self.clock - at), x) for at, x in self.all[member]] if self.how.pool else []
            return n, m, sum(w for w, _ in shared), sum(w * x for w, x in shared)

        found = [known(member) for member in range(self.count)]
        total = sum(n + many for n, _, many, _ in found)
        values = []
        for (n, m, many, tokens), price in zip(found, self.how.prices, strict=True):
            if n + many == 0:
                return len(values)
            pool = self.how.pool if many else 0
            mean = (m + pool * (tokens / many if many else 0)) / (n + pool)
            values.append((mean + self.how.explore * math.sqrt(math.log(1 + total) / (n + many))) / price)
        return max(range(self.count), key=lambda member: values[member])


@pytest.mark.parametrize(
    "fields", [{"pool": 0}, {"pool": 0, "costs": "1 4 1.25"}, {"pool": 4, "explore": 1.0}, {"pool": 8, "decay": 0.5}]
)
def test_choices_are_those_of_a_bandit_in_plain_python(fields):
    switch = Switch((NoDrafter(), PromptLookup(), PromptLookup(length=4)), **fields)
    oracle, seen = Bandit(switch), switch.init({"draft": None}, ROWS, 8)[0]
    best, learnt, took = jax.jit(switch.best), jax.jit(switch.learnt), []
    none = jnp.full((ROWS, 3), jnp.inf)
    ages = [0] * ROWS
    for step in range(STEPS):
        live = [row != 2 or step < 20 for row in range(ROWS)]
        choices = [oracle.choice(row, ages[row]) for row in range(ROWS)]
        got = np.asarray(best(seen, none)).tolist()
        assert [x for x, on in zip(got, live, strict=True) if on] == [
            x for x, on in zip(choices, live, strict=True) if on
        ]
        gains = [accepted(step, row, got[row]) for row in range(ROWS)]
        tokens, known = (
            np.ones((ROWS, 1), int) + np.asarray(gains)[:, None],
            np.arange(3)[None] == np.asarray(got)[:, None],
        )
        seen = learnt(seen, np.repeat(tokens, 3, axis=1), known & np.asarray(live)[:, None], np.asarray(live))
        oracle.clock += sum(live)
        for row in range(ROWS):
            if live[row]:
                ages[row] += 1
                trials, tokens = oracle.rows[row][got[row]]
                trials.append(ages[row])
                tokens.append(1 + gains[row])
                oracle.all[got[row]].append((oracle.clock, 1 + gains[row]))
        took.append(got)
    first = [row[0] for row in took]
    assert {*first} == {0, 1, 2}  # all were tried
    assert first.count(2 if switch.costs else 1) > STEPS // 2  # and the one kept that gives most for its cost
    if not switch.pool and not switch.costs:
        assert [row[1] for row in took[-10:]].count(2) >= 8  # what became better is found again


@dataclasses.dataclass(frozen=True)
class Tallied(Drafter):
    """A chain of one token, the number of times that it was asked."""

    token: int = 1

    nodes = 2
    depth = 1

    def init(self, params, batch, capacity):
        return jnp.zeros((1,), jnp.int32)

    def axes(self, draft):
        return (None,)

    def propose(self, params, draft, view, sampler):
        tokens = jnp.stack([view.root, jnp.full_like(view.root, self.token)], axis=1)
        return Proposal(Tree.of(Topology.chain(1), tokens, jnp.ones(tokens.shape, bool)), draft + 1)


def run(drafter, draft=None, concentration=0.2):
    params = {"target": random(jax.random.key(0), 12, 2, concentration=concentration), "draft": draft}
    decoder = dataclasses.replace(specjax.speculative(LM, drafter), whole=True)
    prompts = Prompts.of([[1, 2], [3, 4], [5]], [34] * 3, keys=row_keys(0, "abc"), temperature=[0.0, 1.0, 0.7])
    begin = jax.jit(lambda params: decoder.init(params, prompts, capacity=40))
    state, taken, alive = begin(params), [], []
    step = jax.jit(decoder.step)
    while not bool(state.done.all()):
        alive.append(np.asarray(~state.done))
        state, _ = step(params, state)
        taken.append(np.asarray(state.draft[0].chosen) if isinstance(drafter, Switch) else None)
    return np.asarray(state.tokens)[:, :34], state, taken, alive


@pytest.mark.slow
def test_a_member_that_no_row_takes_does_not_draft():
    text, state, taken, alive = run(Switch((Tallied(1), Tallied(2), NoDrafter()), explore=0.5, watch=False))
    asked = [int(tally[0]) for tally in state.draft[1][:2]]
    rows = list(zip(taken, alive, strict=True))
    assert asked == [sum((chosen[live] == member).any() for chosen, live in rows) for member in range(2)]
    assert sum(asked) < 2 * len(taken)
    np.testing.assert_array_equal(text, run(NoDrafter())[0])


FOUR = NoDrafter(), PromptLookup(length=4), PromptLookup(length=4), TokenRecycling(k=4, tree="2 | 1 1")


def rows(*values):
    return jnp.asarray(values, jnp.int32)


def four(*nodes):
    """Trees of `FOUR`: no tree, two chains, two branches."""
    shapes = Topology.chain(0), Topology.chain(4), Topology.chain(4), Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0))
    return [Tree.of(shape, rows(own), rows(own) >= 0) for shape, own in zip(shapes, nodes, strict=True)]


def test_a_tree_is_followed_until_the_text_leaves_it():
    """By hand: no tree, a chain that ends, a chain that errs, a tree's second branch; in pieces as all at once."""
    switch = Switch(FOUR).bind(LM)
    empty, step = switch.init({"draft": None}, 1, 8)[0].watched, jax.jit(followed)
    trees = four((9,), (9, 1, 2, 3, -1), (9, 1, 5, 3, 4), (9, 7, 1, 2, 2))
    begun = switch.kept(empty, trees)
    after, given, known = step(begun, rows((1, 2, 3, 4, 6)), rows(5))
    assert given.tolist() == [[1, 4, 2, 3]] and known.tolist() == [[False, True, True, True]]
    assert after.age.tolist() == [[0, 0, 0, 0]]

    after, given, known = step(begun, rows((1, 2, -1, -1, -1)), rows(2))
    assert (given[0, 2], known.tolist()) == (2, [[False, False, True, False]])  # two follow it still
    assert after.age.tolist() == [[0, 2, 0, 2]]
    still, given, known = step(after, rows((-1, -1, -1, -1, -1)), rows(0))  # an ended row
    assert still.age.tolist() == after.age.tolist() and not known.any()
    newer = switch.kept(after, four((2,), (2, 3, -1, -1, -1), (2, 3, 1, 1, 1), (2, 1, 3, 1, 1)))
    assert newer.tokens[0, :, 1].tolist() == [-1, 1, 3, 7]  # a tree that is followed still stays
    after, given, known = step(newer, rows((3, 1, 4, -1, -1)), rows(3))
    assert given.tolist() == [[1, 4, 3, 3]] and known.tolist() == [[False, True, True, True]]


def test_a_look_up_is_bounded_by_its_tree():
    """A look-up that has given most is left out where it proposes too little, and one never tried where it proposes nothing."""
    switch = Switch(FOUR, explore=0.0).bind(LM)
    seen = switch.init({"draft": None}, 1, 8)[0]
    tokens, known = rows((1, 9, 3, 2)), jnp.asarray([[False, True, True, True]])
    seen = switch.learnt(seen, tokens, known, jnp.asarray([True]))
    for bound, best in ((1, 5, 5, 3), 1), ((1, 2, 5, 3), 2), ((1, 1, 1, 3), 3), ((1, 1, 1, 1), 0):
        assert switch.best(seen, rows(bound) * 1.0).tolist() == [best], bound
    trees = four((9,), (9, 1, 2, -1, -1), (9, -1, -1, -1, -1), (9, 7, 1, -1, -1))
    made = {index: (tree, None) for index, tree in enumerate(trees)}
    view = View(rows((1, 9)), rows(2), jnp.asarray([True]), None, 4)
    assert [switch._bound(index, made, view).tolist() for index in range(4)] == [[1], [3], [1], [2]]


def test_a_choice_reads_no_drawn_trees():
    model = ModelDrafter(LM, Chain(2))
    switch = Switch((Stand(), PromptLookup(), model))
    assert (switch.watched, switch.bounded) == ((True, True, False), (False, True, False))
    assert Switch((Stand(), PromptLookup(), model), watch=False).bounded == (False,) * 3
    assert switch._bound(0, {}, View(rows((1, 9)), rows(2), jnp.asarray([True]), None, 4)).tolist() == [math.inf]


@pytest.mark.slow
def test_a_look_up_is_known_before_it_is_taken():
    """Nothing can be copied in the first step. Without exploring, only a look-up that is watched is taken again."""
    own = random(jax.random.key(0), 12, 2, concentration=0.02)

    def taken_again(watch):
        members = PromptLookup(length=3, min_ngram=1), ModelDrafter(LM, Chain(1))
        text, _, taken, alive = run(Switch(members, explore=0.0, watch=watch), (None, own), 0.02)
        return text, sum(int((each == 0)[live].sum()) for each, live in zip(taken[1:], alive[1:], strict=True))

    (text, again), (same, never) = taken_again(True), taken_again(False)
    np.testing.assert_array_equal(text, same)
    assert again > 0 and never == 0


@pytest.mark.slow
def test_trees_and_chains_of_rows_that_share_what_they_know():
    text, state, taken, _ = run(Switch((TokenRecycling(k=4, tree="2 | 1 1"), PromptLookup(3, ngram=2, min_ngram=1))))
    np.testing.assert_array_equal(text, run(NoDrafter())[0])
    assert {*np.concatenate(taken).tolist()} == {0, 1} and np.asarray(state.stats.accepted)[:, 1:].sum()


@pytest.mark.slow
def test_a_draft_model_reads_what_it_has_missed():
    """The target itself as a draft model is always right, however long it was not asked."""
    own = random(jax.random.key(0), 12, 2, concentration=0.2)
    _, state, taken, alive = run(
        Switch((ModelDrafter(LM, Chain(2)), NoDrafter()), explore=30.0, pool=0, watch=False), (own, None)
    )
    for row in range(3):
        chosen = [int(each[row]) for each, live in zip(taken, alive, strict=True) if live[row]]
        assert {*chosen} == {0, 1}
        right = np.asarray(state.stats.accepted)[row]
        assert right[2] >= chosen.count(0) - 1 and right[0] - chosen.count(1) in (0, 1)  # the last may be cut


def test_sizes_and_lines():
    chain, table = ModelDrafter(LM, Chain(2)), TokenRecycling(k=4, tree="2 | 1 1")
    both = Switch((PromptLookup(length=4), chain), pool=0)
    assert (both.nodes, both.depth, both.is_chain, both.children, both.alone) == (5, 4, True, "coupled", True)
    assert both.rungs == (1, 2, 3, 5) and both.needs_params
    trees = Switch((table, chain))
    assert (trees.nodes, trees.is_chain, trees.children, trees.alone) == (5, False, "deterministic", False)
    made = parse("drafter", DRAFTERS, "switch:drafters=(prompt_lookup:length=3+suffix),costs=1 1.5,pool=0")
    assert isinstance(made, Parted) and made.parts[0] == PromptLookup(length=3) and made.parts[1].kind is Suffix
    assert made.fields == {"costs": "1 1.5", "pool": 0.0}
    with pytest.raises(ValueError, match="unknown drafter 'look_up'; choose none, prompt_lookup, "):
        parse("drafter", DRAFTERS, "switch:drafters=(look_up+suffix)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Switch((NoDrafter(),)), "two drafters at least"),
        (lambda: Switch((NoDrafter(), NoDrafter()), costs="1"), "a cost above 0 for each of its 2"),
        (lambda: Switch((NoDrafter(), NoDrafter()), costs="1 0"), "a cost above 0"),
        (lambda: Switch((NoDrafter(), NoDrafter()), costs="1 x"), "numbers with spaces"),
        (lambda: Switch((NoDrafter(), NoDrafter()), decay=1), "decay in"),
        (lambda: Switch((NoDrafter(), Lookahead())).bind(LM), "Lookahead adds slots"),
        (lambda: Switch((NoDrafter(), adaptive(PromptLookup(), Online()))).bind(LM), "leave the rule out"),
        (lambda: Switch((NoDrafter(), adaptive(PromptLookup(), Goodput()))).bind(LM), "leave the rule out"),
        (
            lambda: Switch((NoDrafter(), Jacobi())).bind(LM),
            "no Jacobi, which learns from how its own drafts are judged",
        ),
        (
            lambda: Switch((NoDrafter(), DiffusionDrafter(LM, 11))).bind(LM),
            "no DiffusionDrafter, which learns from how",
        ),
        (lambda: Switch((NoDrafter(), DiffuSpec(LM, 11))).bind(LM), "no DiffuSpec, which learns from how"),
        (lambda: Switch((NoDrafter(), fuse(PromptLookup(), Jacobi()))).bind(LM), "no Fused, which learns from how"),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
