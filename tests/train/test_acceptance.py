"""Training of the acceptance head: its labels are chances of acceptance, its features those after the drawn token."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_training as tiny

from specjax.draft.acceptance import Acceptance
from specjax.draft.acceptance.objective import TrainAcceptance
from specjax.lm import Block, Wants
from specjax.objectives.base import Batch

OBJECTIVE = TrainAcceptance(tiny.TARGET, tiny.DRAFT, Acceptance(layers=1))


def frozen():
    return tiny.target_params(), tiny.draft_params()


def batch():
    tokens = np.random.default_rng(0).integers(1, 32, (4, 10))
    return Batch(jnp.asarray(tokens, jnp.int32), jnp.ones((4, 10), bool))


@pytest.mark.slow
def test_features_and_labels_of_drawn_tokens():
    key = jax.random.key(3)
    label, features, _ = jax.jit(OBJECTIVE._drawn)(frozen(), batch(), key)
    row, t = 2, 6
    text = batch().tokens[row : row + 1, : t + 1]
    block = lambda tokens: Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros((1,), jnp.int32))
    dist = jax.jit(
        lambda lm, p: jax.nn.softmax(lm(p, block(text), None, wants=Wants(logits=True)).logits[0, -1]), static_argnums=0
    )
    p, q = dist(tiny.TARGET, frozen()[0]), dist(tiny.DRAFT, frozen()[1])
    every = jnp.concatenate([jnp.repeat(text, 32, axis=0), jnp.arange(32)[:, None]], axis=1)
    positions = jnp.broadcast_to(jnp.arange(t + 2)[None], every.shape)
    after = Block(every, positions, jnp.zeros((32,), jnp.int32))
    finals = jax.jit(lambda p: tiny.DRAFT(p, after, None, wants=Wants(final=True)).final[:, -1])(frozen()[1])
    token = int(jnp.argmin(jnp.abs(finals - features[row, t][None]).max(axis=1)))
    np.testing.assert_allclose(features[row, t], finals[token], rtol=1e-4, atol=1e-5)
    assert float(label[row, t]) == pytest.approx(min(1.0, float(p[token] / q[token])), rel=1e-3)


def test_the_mean_label_is_the_acceptance_rate():
    """`E_q[min(1, p/q)] = sum min(p, q)`, over many draws."""
    from specjax.objectives.base import read
    from specjax.objectives.losses import acceptance

    logits = lambda lm, params: read(lm, params, batch(), Wants(logits=True)).logits[:, :-1]
    wanted = float(acceptance(logits(tiny.TARGET, frozen()[0]), logits(tiny.DRAFT, frozen()[1])).mean())
    draw = jax.jit(jax.vmap(lambda key: OBJECTIVE._drawn(frozen(), batch(), key)[0].mean()))
    means = np.asarray(draw(jax.random.split(jax.random.key(0), 400)))
    assert abs(means.mean() - wanted) < 5 * means.std() / 20


def test_the_head_learns_and_nothing_else_does():
    params = OBJECTIVE.init(jax.random.key(0), frozen())
    optimizer = optax.adam(3e-3)

    @jax.jit
    def update(params, state, key):
        run = lambda p: OBJECTIVE.loss(p, frozen(), batch(), key)
        (loss, metrics), grads = jax.value_and_grad(run, has_aux=True)(params)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss, metrics["error"]

    state, errors = optimizer.init(params), []
    for i in range(150):
        params, state, loss, error = update(params, state, jax.random.key(i))
        errors.append(float(error))
    assert np.mean(errors[-20:]) < 0.7 * np.mean(errors[:20]), (errors[:3], errors[-3:])
