"""Training of prompt tokens: the distributions it compares, what counts, and a loss that falls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.conformance import TARGET, params

from specjax.draft import PPD
from specjax.draft.ppd.objective import TrainPPD
from specjax.lm import Block, Wants
from specjax.objectives.base import Batch, drawn_places

WEIGHTS = params()["target"]
M, T, V = 3, 14, 96
TREES = "2 @ 3 1x2; 1 | 1 @ 1x3; 1 | 1 | 1 @ 1x4"
PAIR = TrainPPD(PPD(TREES, ensembles=2).bind(TARGET), cuts=5)
dists = jax.jit(PAIR._distributions)
loss = jax.jit(PAIR.loss)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    mask = np.arange(T)[None] < np.asarray([T, 9, 4])[:, None]
    mask[0, :3] = False  # a prompt
    return Batch(jnp.asarray(rng.integers(0, V, (3, T)) * (np.arange(T)[None] < [[T], [9], [4]])), jnp.asarray(mask))


def embeddings(seed=0):
    return {"embeddings": jnp.asarray(np.random.default_rng(seed).normal(size=(M, 2, 64)), jnp.float32)}


@jax.jit
def line_logits(tokens, embeddings, embedded):
    block = Block(tokens, jnp.arange(T + M)[None], jnp.zeros(1, int), None, embeddings[None], embedded[None])
    return TARGET(WEIGHTS, block, None, wants=Wants(logits=True)).logits[0]


@pytest.mark.slow
def test_every_slot_meets_the_targets_distribution_of_the_same_token():
    """Against plain passes over the text up to a cut and its prompt tokens, one line at a time."""
    data, key, draft = batch(), jax.random.key(1), embeddings()
    target, got, known = dists(draft, WEIGHTS, data, key)
    at, chosen = drawn_places(key, useful(data.mask), 5)
    assert target.shape == got.shape == (3, 5 * M, V)
    padded = jnp.pad(data.tokens, ((0, 0), (0, M)))
    nothing = jnp.zeros((T + M, 64)), jnp.zeros(T + M, bool)
    seen = 0
    for row in range(3):
        text = line_logits(padded[row : row + 1], *nothing)
        for i, place in enumerate(at[row].tolist()):
            steps = jnp.arange(T + M) - place - 1
            lines = [
                line_logits(padded[row : row + 1], draft["embeddings"][jnp.clip(steps, 0, M - 1), member], steps >= 0)
                for member in range(2)
            ]
            for step in range(M):
                there = place + step + 2 < T and bool(data.mask[row, place + step + 2])
                assert bool(known[row, i * M + step]) == (there and bool(chosen[row, i]))
                if there and chosen[row, i]:
                    mean = (lines[0] + lines[1])[place + step + 1] / 2
                    np.testing.assert_allclose(got[row, i * M + step], mean, atol=3e-4)
                    np.testing.assert_allclose(target[row, i * M + step], text[place + step + 1], atol=3e-4)
                    seen += 1
    assert seen > 15


def useful(mask):
    """Places whose token two places on counts."""
    return jnp.pad(mask, ((0, 0), (0, 2)))[:, 2:]


def test_cuts_are_different_useful_and_random():
    mask = useful(batch().mask)
    found = []
    for seed in range(20):
        at, chosen = drawn_places(jax.random.key(seed), mask, 5)
        for row, expected in enumerate((range(1, T - 2), range(0, 7), range(0, 2))):
            places = at[row][chosen[row]].tolist()
            assert len(set(places)) == len(places) == min(5, len(expected)) and set(places) <= set(expected)
        found.append(set(at[0].tolist()))
    assert set().union(*found) == set(range(1, T - 2)) and len({frozenset(f) for f in found}) > 5
    assert drawn_places(jax.random.key(0), mask, 99)[0].shape == (3, T)


def test_the_loss_is_the_weighted_divergence_of_what_counts():
    """Of each prompt token over where it counts, and then the mean over prompt tokens."""
    data, key = batch(), jax.random.key(2)
    target, draft, known = dists(embeddings(), WEIGHTS, data, key)
    value, metrics = loss(embeddings(), WEIGHTS, data, key)
    p, q = (jax.nn.log_softmax(x, axis=-1) for x in (target, draft))
    each, known = np.asarray((jnp.exp(p) * (p - q)).sum(axis=-1)), np.asarray(known)
    means = [0.8**j * each[:, j::M][known[:, j::M]].mean() for j in range(M)]
    np.testing.assert_allclose(value, np.mean(means), rtol=1e-5)
    assert metrics["weight"] == known.sum() and 0 < metrics["acceptance"] < 1


def test_padding_and_an_empty_row_change_nothing():
    data, key = batch(), jax.random.key(3)
    value, _ = loss(embeddings(), WEIGHTS, data, key)
    other = Batch(jnp.where(data.mask | (jnp.arange(T)[None] < 3), data.tokens, 50), data.mask)
    assert (other.tokens != data.tokens).any()
    np.testing.assert_allclose(loss(embeddings(), WEIGHTS, other, key)[0], value, rtol=1e-6)
    nothing = Batch(data.tokens, jnp.zeros_like(data.mask))
    value, metrics = loss(embeddings(), WEIGHTS, nothing, key)
    assert value == 0 and metrics["weight"] == 0


def test_accuracy_counts_the_targets_token_among_the_candidates():
    data, key = batch(), jax.random.key(4)
    target, draft, known = (np.asarray(x) for x in dists(embeddings(), WEIGHTS, data, key))
    hits, count = jax.jit(PAIR.accuracy, static_argnums=4)(embeddings(), WEIGHTS, data, key, 10)
    want = np.zeros((M, 10), int)
    for row in range(3):
        for slot in np.flatnonzero(known[row]):
            order = np.argsort(-draft[row, slot]).tolist()
            rank = order.index(target[row, slot].argmax())
            if rank < 10:
                want[slot % M, rank] += 1
    assert hits.tolist() == want.tolist() and want.sum() > 0
    assert count.tolist() == known.reshape(3, 5, M).sum(axis=(0, 1)).tolist()


@pytest.mark.slow
def test_embeddings_alone_learn_and_the_loss_falls():
    objective = TrainPPD(PPD(TREES).bind(TARGET), cuts=8)
    draft = objective.init(jax.random.key(0), WEIGHTS)
    assert draft["embeddings"].shape == (M, 1, 64)
    optimizer = optax.adam(0.05)

    @jax.jit
    def update(draft, state, data, key):
        (value, metrics), grads = jax.value_and_grad(objective.loss, has_aux=True)(draft, WEIGHTS, data, key)
        moves, state = optimizer.update(grads, state)
        return optax.apply_updates(draft, moves), state, value, metrics["acceptance"]

    state, data, values, accepted = optimizer.init(draft), batch(), [], []
    for step in range(40):
        draft, state, value, share = update(draft, state, data, jax.random.key(step))
        values.append(float(value))
        accepted.append(float(share))
    assert np.mean(values[-5:]) < 0.8 * np.mean(values[:5])
    assert np.mean(accepted[-5:]) > np.mean(accepted[:5])
    assert objective.fields == {"trees": TREES, "ensembles": 1}
    assert PPD(**objective.fields).prompts == M


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="bind"):
        TrainPPD(PPD())
    with pytest.raises(ValueError, match="cuts"):
        TrainPPD(PPD().bind(TARGET), cuts=0)
