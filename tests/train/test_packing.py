"""Documents that share a row: each is trained on as if it stood alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.objectives import DRAWN, FIXED, alone, frozen, packed


@pytest.mark.parametrize("name", but_slow(FIXED, *list(FIXED)[2:]))
def test_a_document_among_others_counts_as_one_alone(name):
    objective = FIXED[name]
    params = objective.init(jax.random.key(0), frozen(name))
    loss = jax.jit(lambda batch: objective.loss(params, frozen(name), batch, jax.random.key(1)))
    (got, metrics), (expected, of_rows) = loss(packed()), loss(alone())
    assert float(got) == pytest.approx(float(expected), rel=1e-5) and float(got) > 0
    assert {key: float(x) for key, x in metrics.items()} == pytest.approx(
        {k: float(x) for k, x in of_rows.items()}, rel=1e-5
    )
    second = dataclasses.replace(packed(), mask=packed().mask & (packed().documents == 1))
    assert float(loss(poisoned(second))[0]) == float(loss(second)[0]) > 0  # to the last bit
    assert float(loss(dataclasses.replace(packed(), documents=None))[0]) != pytest.approx(float(expected), rel=1e-3)


def poisoned(batch):
    """Its first and third documents say something else."""
    return dataclasses.replace(batch, tokens=jnp.where(batch.documents == 1, batch.tokens, 31))


@pytest.mark.parametrize("name", DRAWN)
def test_a_document_knows_nothing_of_its_neighbour(name):
    """Only the second document of each row is learned."""
    objective = DRAWN[name]
    params = objective.init(jax.random.key(0), frozen(name))
    loss = jax.jit(lambda batch: objective.loss(params, frozen(name), batch, jax.random.key(1))[0])
    second = dataclasses.replace(packed(), mask=packed().mask & (packed().documents == 1))
    assert float(loss(poisoned(second))) == float(loss(second)) > 0
    one = lambda batch: float(loss(dataclasses.replace(batch, documents=None)))
    assert one(poisoned(second)) != pytest.approx(one(second), rel=1e-3)


def test_what_slots_have_in_common():
    batch = packed()
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2]
    assert np.flatnonzero(~np.asarray(batch.together(2))[0]).tolist() == [4, 5, 9, 10]
    assert np.flatnonzero(np.asarray(batch.due(1))[0]).tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert np.asarray(batch.block().visible)[1, 9].nonzero()[0].tolist() == [8, 9]
    assert np.asarray(batch.pairs().visible)[1, 8].nonzero()[0].tolist() == [8]
