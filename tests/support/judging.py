"""Verdicts of random trees, and the same by hand: what tests of rules for acceptance share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Output
from specjax.reference import trees, warpers
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree

TOPOLOGY = Topology.from_counts("3 | 2 0 1 | 1 1 1")
B, V, HEAT = 32, 6, 0.8
GREEDY = np.arange(B) % 4 == 0
SAMPLING = SamplingArrays.make(B, temperature=np.where(GREEDY, 0.0, HEAT).tolist())


@functools.partial(jax.jit, static_argnums=0)
def judge(verifier, tokens, logits, key, log_q=None, params=None, features=None):
    """A verdict, and what it may rest on: own draws `[B, N]`, uniforms `[B, N]`, residual noise by depth `[D + 1, B, V]`.

    `features` `[B, N, E]` are what the target makes of every node.
    """
    text = jnp.zeros((B, 8), jnp.int32)
    sampler = Sampler(jax.random.split(key, B), text, jnp.full((B,), 2), jnp.ones(B, bool), SAMPLING)
    tree = Tree.of(TOPOLOGY, tokens, tokens >= 0, log_q=log_q)
    draw = sampler.draw(logits, tree.depth, tree.path_tokens, tree.max_depth)
    noise = jnp.stack([sampler.residual_noise(jnp.full((B,), depth), V) for depth in range(tree.max_depth + 1)])
    verdict = verifier.given(params)(Output((), logits=logits, draw=draw, final=features), tree, sampler)
    return verdict, draw, sampler.uniform_of(tree.depth), noise


def cases(verifier, seeds=3, drawn=False, params=None, width=0):
    """Rows to be judged by hand: the verdict's depth, node and token, and a dict of all that it is made of.

    Siblings differ in their tokens; -1 is no node. The target's features are `width` wide, if any.
    """
    rng = np.random.default_rng(0)
    parents = TOPOLOGY.parents
    for seed in range(seeds):
        tokens = np.zeros((B, len(parents)), int)
        for row in range(B):
            for node in range(len(parents)):
                kids = [n for n, parent in enumerate(parents) if parent == node]
                tokens[row, kids] = rng.permutation(V + 1)[: len(kids)] - 1
        logits = (2 * rng.normal(size=(*tokens.shape, V))).astype(np.float32)
        q = rng.dirichlet(np.full(V, 0.7), tokens.shape) if drawn else None
        log_q = None if q is None else jnp.log(jnp.asarray(q, jnp.float32))
        features = rng.normal(size=(*tokens.shape, width)).astype(np.float32)
        found = judge(verifier, jnp.asarray(tokens), jnp.asarray(logits), jax.random.key(seed), log_q, params, features)
        verdict, draw, uniforms, noise = jax.tree.map(np.asarray, found)
        for row in range(B):
            node = verdict.path[row].max()
            assert verdict.path[row].tolist() == [*(path := path_to(node)), *[-1] * (4 - len(path))]
            heat = 1.0 if GREEDY[row] else HEAT
            yield (
                (verdict.accepted[row], node, verdict.next_token[row]),
                {
                    "tokens": tokens[row],
                    "p": np.array([warpers.softmax(warpers.warp(z, heat)) for z in logits[row]]),
                    "q": None if q is None else q[row],
                    "draw": draw[row],
                    "features": features[row],
                    "uniforms": uniforms[row],
                    "noise": noise[:, row],
                    "greedy": GREEDY[row],
                },
            )


def path_to(node):
    """Nodes from the root to one."""
    return trees.path_to(TOPOLOGY.parents, node)


def paths(tokens):
    """Every path of real nodes below the root, the root's own first, empty one."""
    found = [path_to(node)[1:] for node in range(len(TOPOLOGY.parents))]
    return [path for path in found if all(tokens[node] >= 0 for node in path)]


def likeliest(ends, tokens, p):
    """The longest of paths, of equal ones the likeliest: depth and node."""
    worth = lambda path: sum(np.log(max(p[TOPOLOGY.parents[n], tokens[n]], 1e-38)) for n in path)
    best = max(ends, key=lambda path: (len(path), worth(path)))
    return len(best), best[-1] if best else 0


def down(case, chance, residual):
    """The way down: children in their order, each against what is left. Depth, node and the distribution that is left.

    Args:
      case: of `cases`.
      chance: from what is left, the distribution as it was at first, the draft's (None: none) and a token.
      residual: from what is left, the draft's and a token.
    """
    node, depth = 0, 0
    while True:
        left = first = case["p"][node]
        q = None if case["q"] is None else case["q"][node]
        for kid, parent in enumerate(TOPOLOGY.parents):
            token = case["tokens"][kid]
            if parent != node or kid == 0 or token < 0:
                continue
            if case["uniforms"][kid] < chance(left, first, q, token):
                node, depth = kid, depth + 1
                break
            left = residual(left, q, token)
        else:
            return depth, node, left


def ordinary(left, q, token):
    """What a rejected token leaves."""
    q = np.eye(V)[token] * left if q is None else q
    over = np.maximum(left - q, 0)
    return over / over.sum() if over.sum() > 1e-6 else left
