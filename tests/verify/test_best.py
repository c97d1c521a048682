"""The verifier that chooses its rule by the kind of children: which rule, and that its verdict is that rule's."""

from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from support.chains import V

from specjax.lm import Output
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import DRAWN, Children, Topology, Tree
from specjax.verify import Best, Block, GreedyMulti, Optimal, Recursive, RecursiveWOR, Traversal
from specjax.verify.best import RULES

ROWS = 64


def tree_of(topology, children):
    """A tree of some tokens, with a distribution where its children are drawn."""
    shape = (ROWS, len(topology.parents))
    tokens = jax.random.randint(jax.random.key(1), shape, 0, V)
    log_q = jnp.full((*shape, V), -jnp.log(V)) if children in DRAWN else None
    return Tree.of(topology, tokens, jnp.ones(shape, bool), log_q=log_q, children=children)


def judged(verifier, tree):
    logits = jax.random.normal(jax.random.key(2), (*tree.tokens.shape, V))
    keys = jax.random.split(jax.random.key(0), ROWS)
    sampler = Sampler(
        keys,
        jnp.zeros((ROWS, 8), int),
        jnp.full(ROWS, 2),
        jnp.ones(ROWS, bool),
        SamplingArrays.make(ROWS, temperature=1.0),
    )
    return jax.jit(lambda tree: verifier(Output(delta=(), logits=logits), tree, sampler))(tree)


def test_there_is_a_rule_for_every_kind_that_can_judge_it():
    assert set(RULES) == set(get_args(Children))
    assert all(children in rule.judges for children, rule in RULES.items())
    wanted = {"coupled": RecursiveWOR, "iid": Recursive, "without_replacement": Traversal, "greedy": GreedyMulti}
    for children, kind in {**wanted, "deterministic": Recursive}.items():
        assert type(Best().rule(tree_of(Topology.from_counts("2 | 1"), children))) is kind
        assert type(Best().rule(tree_of(Topology.chain(3), children))) is Block


@pytest.mark.slow
def test_its_verdict_is_that_rules():
    tree = tree_of(Topology.from_counts("2 | 1"), "iid")
    ours, theirs = (judged(verifier, tree) for verifier in (Best(), Recursive()))
    assert (ours.path == theirs.path).all() and (ours.next_token == theirs.next_token).all()
    assert 0 < ours.accepted.mean() < 2
    other = judged(Optimal(), tree)
    assert not (ours.path == other.path).all()
