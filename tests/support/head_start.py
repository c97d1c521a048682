"""What the tests of self-speculation share: a state in mid-text, its proposal, and the target with and without a head start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.conformance import MIXED, TARGET, start

import specjax
from specjax.draft import View
from specjax.lm import Wants
from specjax.sampling import Sampler

ROWS = MIXED.pick(1, 4, 0, 7)


@functools.partial(jax.jit, static_argnums=0)
def step(decoder, model, state):
    return decoder.step(model, state)[0]


def running(drafter, model, steps: int = 3, rows=ROWS):
    """A decoder and its state after a few steps."""
    decoder = specjax.speculative(TARGET, drafter)
    state = start(decoder, rows, model=model)
    for _ in range(steps):
        state = step(decoder, model, state)
    return decoder, state


def bindings(decoder, state):
    """The view and the sampler of the next step."""
    live = ~state.done
    view = View(state.tokens, state.length, live, state.cache, max_depth=decoder.drafter.depth)
    return view, Sampler(state.key, state.tokens, state.length, live, state.sampling)


@functools.partial(jax.jit, static_argnums=0)
def proposed(decoder, model, state):
    view, sampler = bindings(decoder, state)
    return decoder.drafter.propose(model, state.draft, view, sampler)


@functools.partial(jax.jit, static_argnums=0)
def read(decoder, model, state, proposal, partial=None):
    """The target's logits, residual streams and delta over a proposal."""
    view, _ = bindings(decoder, state)
    wants = Wants(logits=True, hidden=(0, 1, 2))
    return TARGET(model["target"], proposal.block(view), view.cache, wants=wants, partial=partial)


def poisoned(model, layers):
    """The model with NaN in all weights of some layers."""
    target = dict(model["target"])
    spoil = lambda i, layer: jax.tree.map(lambda x: x * jnp.nan, layer) if i in layers else layer
    return {**model, "target": {**target, "layers": {i: spoil(i, x) for i, x in target["layers"].items()}}}


def check_head_start(decoder, model, state, lo):
    """The target goes on from layer `lo`: with the lower layers gone it says what it says on the same tokens in full."""
    proposal = proposed(decoder, model, state)
    assert proposal.partial.lo == lo
    full = read(decoder, model, state, proposal)
    rest = read(decoder, poisoned(model, range(lo)), state, proposal, proposal.partial)
    valid = np.asarray(proposal.tree.valid)
    assert valid.sum(axis=1).max() > 1
    for a, b in zip(
        jax.tree.leaves((full.logits, full.delta)), jax.tree.leaves((rest.logits, rest.delta)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(b)[valid], np.asarray(a)[valid], rtol=1e-5, atol=3e-5)
    return proposal, full


def count_products(jaxpr, shape) -> int:
    """How many matrix products with an operand of this shape a program holds, all branches together."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            total += any(v.aval.shape == shape for v in eqn.invars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += count_products(inner, shape)
    return total
