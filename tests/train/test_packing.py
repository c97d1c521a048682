"""Documents that share a row: each is trained on as if it stood alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.hybrids import MIXERS, MODELS
from support.objectives import DRAWN, FIXED, alone, frozen, packed
from support.small_target import weights

from specjax.draft import Eagle3, Kangaroo, Medusa
from specjax.draft.eagle3.objective import TrainEagle3
from specjax.draft.kangaroo.objective import TrainKangaroo
from specjax.draft.medusa.objective import TrainMedusa
from specjax.expand import Chain


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


@pytest.mark.parametrize("name", but_slow(DRAWN, "hidden_transfer"))
def test_a_document_knows_nothing_of_its_neighbour(name):
    """Only the second document of each row is learned."""
    objective = DRAWN[name]
    params = objective.init(jax.random.key(0), frozen(name))
    loss = jax.jit(lambda batch: objective.loss(params, frozen(name), batch, jax.random.key(1))[0])
    second = dataclasses.replace(packed(), mask=packed().mask & (packed().documents == 1))
    assert float(loss(poisoned(second))) == float(loss(second)) > 0
    one = lambda batch: float(loss(dataclasses.replace(batch, documents=None)))
    assert one(poisoned(second)) != pytest.approx(one(second), rel=1e-3)


OVER_STATES = {
    "medusa": lambda lm: TrainMedusa(Medusa(Chain(2), heads=2).bind(lm)),
    "eagle3": lambda lm: TrainEagle3(Eagle3().bind(lm), unroll=2),
    "kangaroo": lambda lm: TrainKangaroo(Kangaroo(exit_layer=1).bind(lm)),
}
"""Objectives that read a target's last features, those of its layers, and its first layers alone."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*zip(MIXERS, itertools.cycle(OVER_STATES), strict=False)])
def test_a_running_state_begins_anew_with_every_document(kind, name):
    lm, target = MODELS[kind], weights(MODELS[kind])
    objective = OVER_STATES[name](lm)
    params = objective.init(jax.random.key(0), target)
    loss = jax.jit(lambda batch: objective.loss(params, target, batch, jax.random.key(1))[0])
    known = lambda batch: dataclasses.replace(batch, tokens=batch.tokens % lm.vocab_size)
    whole, rows = known(packed()), known(alone())
    expected = float(loss(rows))
    assert float(loss(whole)) == pytest.approx(expected, rel=1e-5) and expected > 0
    assert float(loss(dataclasses.replace(whole, documents=None))) != pytest.approx(expected, rel=1e-3)


def test_what_slots_have_in_common():
    batch = packed()
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2]
    assert np.flatnonzero(~np.asarray(batch.together(2))[0]).tolist() == [4, 5, 9, 10]
    assert np.flatnonzero(np.asarray(batch.due(1))[0]).tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert np.asarray(batch.block().visible)[1, 9].nonzero()[0].tolist() == [8, 9]
    assert np.asarray(batch.pairs().visible)[1, 8].nonzero()[0].tolist() == [8]
