"""Merged trees against sets of strings, and what RASD leaves of what was retrieved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.assembly import registry
from specjax.assembly.companions import Parted
from specjax.draft import (
    PPD,
    Drafter,
    DynamicExit,
    Kangaroo,
    Lookahead,
    ModelDrafter,
    PromptLookup,
    Proposal,
    Rasd,
    Rest,
    Stand,
    Swift,
    TokenRecycling,
    View,
    fuse,
)
from specjax.draft.fuse import union
from specjax.draft.rasd import pruned
from specjax.expand import Chain, TopK
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.reference import retrieval as oracle
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.tree import Topology, Tree

ROOT = 9
merged = jax.jit(union, static_argnums=2)
prune = jax.jit(pruned, static_argnums=2)


def some_tree(rng, nodes, depth, vocab=3, rows=4, distinct=True):
    """Random trees with some invalid nodes; siblings differ where `distinct`."""
    tokens, parent = np.full((rows, nodes), ROOT), np.full((rows, nodes), -1)
    level, valid = np.zeros((rows, nodes), int), np.ones((rows, nodes), bool)
    for row in range(rows):
        seen = set()
        for node in range(1, nodes):
            above = int(rng.choice(np.flatnonzero(level[row, :node] < depth)))
            token = int(rng.integers(0, vocab))
            valid[row, node] = valid[row, above] and rng.random() < 0.8 and not (distinct and (above, token) in seen)
            seen.add((above, token))
            tokens[row, node] = token if valid[row, node] else -1
            parent[row, node], level[row, node] = above, level[row, above] + 1
    return Tree(*(jnp.asarray(x) for x in (tokens, parent, level, valid)), max_depth=depth)


def strings(tree, row):
    return oracle.strings(*(np.asarray(x)[row] for x in (tree.tokens, tree.parent, tree.valid)))


def well_formed(tree):
    tokens, parent, depth, valid = (np.asarray(x) for x in (tree.tokens, tree.parent, tree.depth, tree.valid))
    assert (
        (parent[:, 0] == -1).all() and (depth[:, 0] == 0).all() and valid[:, 0].all() and (tokens[:, 0] == ROOT).all()
    )
    assert (parent[:, 1:] < np.arange(1, tree.nodes)).all() and (parent[:, 1:] >= 0).all()
    above = lambda x: np.take_along_axis(x, parent[:, 1:], axis=1)
    assert (above(valid) | ~valid[:, 1:]).all() and ((above(depth) + 1 == depth[:, 1:]) | ~valid[:, 1:]).all()
    assert (depth <= tree.max_depth).all() and (tokens[~valid] == -1).all()
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()  # valid nodes come first


@pytest.mark.parametrize("nodes", [2, 6, 11, 18])
def test_a_union_holds_the_strings_of_both_as_far_as_there_is_room(nodes):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        a, b = some_tree(rng, 8, 3), some_tree(rng, 11, 4)
        tree = merged(a, b, nodes)
        assert tree.nodes == nodes and tree.max_depth == 4
        well_formed(tree)
        for row in range(4):
            want = oracle.union(strings(a, row), strings(b, row), nodes)
            got = strings(tree, row)
            assert got == want and len(got) == len(set(got))
            if nodes == 18:
                assert set(got) == {*strings(a, row), *strings(b, row)}


def test_merging_a_tree_with_itself_changes_nothing():
    rng = np.random.default_rng(0)
    a = some_tree(rng, 9, 3)
    tree = merged(a, a, 17)
    assert [strings(tree, row) for row in range(4)] == [strings(a, row) for row in range(4)]
    once = merged(tree, tree, 17)  # valid nodes first: now the arrays are equal too
    for name in ("tokens", "parent", "depth", "valid"):
        np.testing.assert_array_equal(getattr(once, name), getattr(tree, name), name)


def test_duplicates_inside_a_tree_are_merged_too():
    a = some_tree(np.random.default_rng(1), 12, 3, vocab=2, distinct=False)
    assert any(len(strings(a, row)) > len(set(strings(a, row))) for row in range(4))
    root = dataclasses.replace(a, valid=a.valid & (jnp.arange(12)[None] == 0))
    tree = merged(a, root, 12)
    well_formed(tree)
    assert [strings(tree, row) for row in range(4)] == [list(dict.fromkeys(strings(a, row))) for row in range(4)]


@pytest.mark.parametrize("first", [1, 2, 10])
def test_a_retrieved_sequence_stays_if_the_draft_begins_so(first):
    pruned_some = False
    for seed in range(10):
        rng = np.random.default_rng(seed)
        drafted, retrieved = some_tree(rng, 6, 2, vocab=5), some_tree(rng, 11, 4, vocab=5)
        left = prune(retrieved, drafted, first)
        for row in range(4):
            want = oracle.pruned(strings(retrieved, row), strings(drafted, row), first)
            assert strings(left, row) == want
            pruned_some |= len(want) < len(strings(retrieved, row))
    assert pruned_some


def test_where_the_draft_says_nothing_all_that_was_retrieved_stays():
    rng = np.random.default_rng(0)
    retrieved = some_tree(rng, 8, 3)
    silent = some_tree(rng, 5, 2)
    silent = dataclasses.replace(silent, valid=silent.valid & (jnp.arange(5)[None] == 0))
    left = prune(retrieved, silent, 1)
    assert [strings(left, row) for row in range(4)] == [strings(retrieved, row) for row in range(4)]


LM = TabularLM(12, order=2)


@dataclasses.dataclass(frozen=True)
class Everything(Drafter):
    """Finds every token after the root, and token 0 after each of them."""

    topology = Topology((-1, *[0] * 12, *range(1, 13)), (0, *range(12), *[0] * 12))

    nodes = property(lambda self: 25)
    depth = property(lambda self: 2)

    def propose(self, params, draft, view, sampler):
        rows = jnp.broadcast_to(jnp.asarray([*range(12), *[0] * 12]), (view.root.shape[0], 24))
        tokens = jnp.concatenate([view.root[:, None], rows], axis=1)
        return Proposal(Tree.of(self.topology, tokens, jnp.ones(tokens.shape, bool)), draft)


def test_the_drafts_whole_distribution_after_the_root_prunes(first=4):
    """The tree has one child of the root; what was found may begin with any of the likeliest, and with no other."""
    lm = TabularLM(12)
    table = random(jax.random.key(1), 12, 1, concentration=0.2)
    drafter = Rasd(ModelDrafter(lm, Chain(2)), Everything(), first=first).bind(lm)
    tree = proposal_of(drafter, {"target": table, "draft": (table, None)}, jnp.asarray([[1, 2], [3, 4]])).tree
    for row, root in enumerate((2, 4)):
        likeliest = set(np.argsort(-np.asarray(table["table"])[root])[:first].tolist())
        found = {string for string in strings(tree, row) if len(string) == 2 and string[1] == 0}
        drafted = int(tree.tokens[row, 1])  # the one that the chain itself begins with
        assert {string[0] for string in strings(tree, row) if string} == {drafted} | likeliest
        assert {string[0] for string in found} >= likeliest


@functools.partial(jax.jit, static_argnums=0)
def proposal_of(drafter, params, tokens):
    length, live = jnp.full((2,), 2), jnp.ones((2,), bool)
    view = View(tokens, length, live, None, max_depth=drafter.depth)
    sampler = Sampler(
        row_keys(0, "ab"), tokens, length, live, SamplingArrays({"temperature": jnp.zeros(2)}), greedy=True
    )
    return drafter.propose(params, drafter.init(params, 2, 8), view, sampler)


def run(drafter):
    params = {
        "target": random(jax.random.key(0), 12, 2, concentration=0.2),
        "draft": (random(jax.random.key(1), 12, 2, concentration=0.2), None),
    }
    decoder = specjax.speculative(LM, drafter)
    prompts = Prompts.of([[1, 2], [3, 4], [5]], [38, 38, 39], keys=row_keys(0, "abc"), temperature=[0.0, 1.0, 0.7])
    begin = jax.jit(lambda params: decoder.init(params, prompts, capacity=48))
    state = specjax.run(decoder, params, begin(params))
    return np.asarray(state.tokens)[:, :40], np.asarray(state.stats.steps)


@pytest.mark.slow
def test_merged_drafters_change_speed_and_never_text():
    """A union of all nodes accepts what the trees side by side accept, step by step."""
    drafted, lookup = ModelDrafter(LM, Chain(2)), PromptLookup(length=3, ngram=2)
    text, steps = run(fuse(drafted, lookup))
    again, same = run(fuse(drafted, lookup, 6))
    np.testing.assert_array_equal(again, text)
    np.testing.assert_array_equal(same, steps)
    assert (steps < 38).all()


def test_sizes_and_bad_input():
    chain, table = ModelDrafter(LM, Chain(4)), TokenRecycling(k=4, tree="2 | 1")
    assert fuse(chain, table).nodes == 8 and fuse(chain, table).rungs == (8,)
    assert fuse(chain, table, 6).nodes == 6 and fuse(chain, table, 6).rungs == (1, 2, 3, 6)
    assert fuse(chain, table, 99).nodes == 8 == Rasd(chain, table).nodes
    assert Rasd(chain, table, 6).bind(LM) == Rasd(chain.bind(LM), table.bind(LM), 6)
    assert fuse(Stand(k=5), table).wants.topk == 5
    for wrong in (lambda: fuse(chain, table, 1), lambda: Rasd(chain, table, 1), lambda: Rasd(chain, table, first=0)):
        with pytest.raises(ValueError, match="needs"):
            wrong()
    for beside in (Lookahead(), PPD(), Kangaroo(exit_layer=1), Swift(), DynamicExit()):
        for parts in ((chain, beside), (beside, table)):
            with pytest.raises(ValueError, match=f"{type(beside).__name__} adds slots of its own or a head start"):
                fuse(*parts).bind(LM)


def test_its_line_has_the_lines_of_its_parts():
    """Their own lines, fields that one of them has, or the folder that a part loads."""
    read = lambda text: registry.parse("drafter", registry.DRAFTERS, text)
    made = read("rasd")
    assert isinstance(made, Parted) and made.kind is Rasd and made.fields == {}
    assert [part.kind for part in made.parts] == [ModelDrafter, Rest]
    assert made.parts[0].fields["expander"] == TopK(coupled=False)
    made = read("rasd:draft=my/draft,datastore=my/store,first=5,span=7")
    assert [part.asked for part in made.parts] == ["my/draft", "my/store"]
    assert made.fields == {"first": 5} and made.parts[1].fields == {"span": 7}
    made = read("rasd:draft=(draft:expander=chain,length=3),retriever=(prompt_lookup:length=5),ngram=2")
    assert made.parts[0].fields["expander"] == Chain(3) and made.parts[1] == PromptLookup(length=5, ngram=2)
    assert read('{"name": "rasd", "retriever": {"name": "prompt_lookup", "length": 5}}').parts[1].length == 5
    fused = read("rasd:retriever=(prompt_lookup+token_recycling)").parts[1]
    assert fused.kind is fuse and [type(part) for part in fused.parts] == [PromptLookup, TokenRecycling]
    assert [part.asked for part in read("rasd:draft=(a+b),retriever=c").parts] == ["a+b", "c"]
    for text, said in {
        "rasd:nodes=5": "draft and retriever have a field 'nodes': write draft=",
        "rasd:spam=5": "has no field 'spam'; it has draft, retriever, limit, first",
        "rasd:rule=goodput": "drafter 'rasd' takes no rule, since it grows no chain of its own: leave rule out",
        "rasd:retriever=(rest:spam=5)": "drafter 'rest' has no field 'spam'",
    }.items():
        with pytest.raises(ValueError, match=said):
            read(text)
    with pytest.raises(ValueError, match="needs a limit above the 5 nodes of the draft's tree, .* got 5"):
        Rasd(ModelDrafter(LM, Chain(4)), PromptLookup(), 5)
    with pytest.raises(ValueError, match="grows its tree with an expander, and TokenRecycling does not"):
        Rasd(TokenRecycling(k=4), PromptLookup())
