"""Training of Hidden Transfer's maps: the loss and its gradients are those of slots that an oracle puts in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_training as tiny
from support.pseudo_slots import after
from support.shapes import changed

from specjax.draft import HiddenTransfer
from specjax.draft.hidden_transfer.objective import TrainHiddenTransfer
from specjax.expand import Chain
from specjax.lm import Wants
from specjax.models import LlamaLM
from specjax.objectives.base import Batch, read

LM = LlamaLM(changed(tiny.TARGET.config, num_hidden_layers=3))
LAYERS, M, T = (1, 2), 2, 10
OBJECTIVE = TrainHiddenTransfer(HiddenTransfer(Chain(2), LAYERS).bind(LM), cuts=3)


def weights():
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim == 2 else leaf, jax.jit(LM.init)(jax.random.key(1)))


def maps(seed=0):
    kernels = np.random.default_rng(seed).normal(size=(M, 32, 32)) / 6 + np.eye(32)[None]
    return {"maps": [{"kernel": jnp.asarray(kernel, jnp.float32)} for kernel in kernels]}


def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(T)[None] < np.asarray([T, 7])[:, None]
    mask[0, :3] = False  # a prompt
    return Batch(jnp.asarray(rng.integers(1, 32, (2, T))), jnp.asarray(mask))


def by_oracle(own, frozen, data, key):
    """The weighted mean of forward divergences, each guess of each cut in a line of its own."""
    at, chosen = OBJECTIVE._places(data, key)
    target = jax.nn.log_softmax(read(LM, frozen, data, Wants(logits=True)).logits, axis=-1)
    line = lambda text, cut: after(LM, LAYERS, frozen, own["maps"], text, cut + 1)
    final = jax.vmap(jax.vmap(line, (None, 0)))(data.tokens, at)
    said = jax.nn.log_softmax(LM.unembed(frozen, final.reshape(1, -1, 32)), axis=-1).reshape(2, 3, M, -1)
    total = 0.0
    for step in range(M):
        due = jnp.minimum(at + step + 2, T - 1)
        counts = chosen & (at + step + 2 < T) & jnp.take_along_axis(data.mask, due, axis=1)
        wanted = jnp.take_along_axis(target, (due - 1)[:, :, None], axis=1)
        each = (jnp.exp(wanted) * (wanted - said[:, :, step])).sum(axis=-1)
        total += 0.8**step * jnp.where(counts, each, 0.0).sum() / counts.sum() / M
    return total


@pytest.mark.slow
def test_loss_and_gradients_are_the_oracles():
    frozen, data, key = weights(), batch(), jax.random.key(1)
    (loss, metrics), got = jax.jit(jax.value_and_grad(OBJECTIVE.loss, has_aux=True))(maps(), frozen, data, key)
    expected, want = jax.jit(jax.value_and_grad(by_oracle))(maps(), frozen, data, key)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert metrics["weight"] > 4
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(theirs).max() > 1e-4
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


@pytest.mark.slow
def test_the_loss_falls():
    frozen, data, own = weights(), batch(), OBJECTIVE.init(jax.random.key(0), weights())
    optimizer = optax.adam(0.01)

    @jax.jit
    def update(own, state, key):
        (loss, _), grads = jax.value_and_grad(OBJECTIVE.loss, has_aux=True)(own, frozen, data, key)
        moves, state = optimizer.update(grads, state)
        return optax.apply_updates(own, moves), state, loss

    state, losses = optimizer.init(own), []
    for step in range(30):
        own, state, loss = update(own, state, jax.random.key(step))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert OBJECTIVE.fields == {"layers": [1, 2]} and HiddenTransfer(**OBJECTIVE.fields).maps == M


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="hidden_transfer: bind"):
        TrainHiddenTransfer(HiddenTransfer())
    with pytest.raises(ValueError, match="hidden_transfer: cuts.*got cuts=0"):
        TrainHiddenTransfer(HiddenTransfer(layers=(1,)).bind(LM), cuts=0)
