"""Training of Kangaroo's adapter: which distributions it compares, over which tokens, and that it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_training as tiny

from specjax.draft import Kangaroo
from specjax.draft.kangaroo import network as head
from specjax.draft.kangaroo.objective import TrainKangaroo
from specjax.lm import Block, Wants
from specjax.objectives.base import Batch, read

OBJECTIVE = TrainKangaroo(Kangaroo(exit_layer=1).bind(tiny.TARGET))


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(12)[None] < np.asarray([[12], [9], [5]])
    mask[:, :2] = False
    return Batch(rng.integers(1, 32, (3, 12)).astype(np.int32), mask)


@functools.cache
def start():
    return OBJECTIVE.init(jax.random.key(0), tiny.target_params())


loss = jax.jit(lambda params, batch: OBJECTIVE.loss(params, tiny.target_params(), batch, jax.random.key(0)))


@pytest.mark.slow
def test_the_loss_is_the_mean_divergence_before_masked_tokens():
    tokens, mask = batch().tokens, np.asarray(batch().mask)
    taught = read(tiny.TARGET, tiny.target_params(), batch(), Wants(logits=True, hidden=(0,)))
    positions = jnp.broadcast_to(jnp.arange(12)[None], tokens.shape)
    block = Block(tokens, positions, jnp.zeros(3, jnp.int32))
    features, _ = head.adapt(tiny.TARGET.config, start(), taught.hidden[0], block, None)
    p = np.asarray(jax.nn.softmax(taught.logits), np.float64)
    q = np.asarray(jax.nn.softmax(tiny.TARGET.unembed(tiny.target_params(), features)), np.float64)
    pairs = [(p[b, t - 1], q[b, t - 1]) for b, t in zip(*np.nonzero(mask), strict=True)]
    value, metrics = loss(start(), batch())
    assert float(value) == pytest.approx(np.mean([(a * np.log(a / b)).sum() for a, b in pairs]), rel=1e-4)
    assert float(metrics["acceptance"]) == pytest.approx(np.mean([np.minimum(a, b).sum() for a, b in pairs]), rel=1e-4)
    agreed = np.mean([a.argmax() == b.argmax() for a, b in pairs])
    assert float(metrics["agreement"]) == pytest.approx(agreed, rel=1e-4)


def test_padding_changes_nothing():
    padded = jnp.where(jnp.arange(12)[None] < jnp.asarray([[12], [9], [5]]), batch().tokens, 31)
    assert loss(start(), Batch(padded, batch().mask))[0] == loss(start(), batch())[0]


def test_it_learns():
    optimizer = optax.adam(3e-3)

    @jax.jit
    def update(params, state):
        grads = jax.grad(lambda p: OBJECTIVE.loss(p, tiny.target_params(), batch(), None)[0])(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start(), optimizer.init(start())
    before, old = loss(params, batch())
    for _ in range(60):
        params, state = update(params, state)
    after, new = loss(params, batch())
    assert after < 0.6 * before and new["acceptance"] > old["acceptance"] + 0.1


def test_the_drafter_must_know_its_target():
    with pytest.raises(ValueError, match="bind"):
        TrainKangaroo(Kangaroo())
    assert OBJECTIVE.fields == {"exit_layer": 1}
