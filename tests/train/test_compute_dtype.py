"""Products in bfloat16 over parameters in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.objectives import DRAWN, FIXED, packed

from specjax.draft import Eagle3
from specjax.objectives.teacher import HeadObjective
from specjax.train.loop import Settings, TrainState, gradients, update
from specjax.train.placing import rounded

IDS = tuple(range(1, 32, 3))
OWN = {"eagle3": Eagle3(inner=20).bind(tiny.TARGET)}
"""Heads with sizes that are none of the target's."""
HEADS = [name for name, objective in (FIXED | DRAWN).items() if isinstance(objective, HeadObjective)]


def cases(quick, names):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def head(name):
    objective = (FIXED | DRAWN)[name]
    return dataclasses.replace(objective, ids=IDS, drafter=OWN.get(name, objective.drafter))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a program and of all programs inside."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from equations(part)


def matrices(params: Any) -> set[tuple[int, ...]]:
    """Their sizes, whichever comes first."""
    return {tuple(sorted(x.shape)) for x in jax.tree.leaves(params) if x.ndim == 2}


@pytest.mark.parametrize("name", cases(("eagle3", "hydra", "dspark"), HEADS))
def test_matrices_are_multiplied_in_bfloat16_alone(name):
    """Forward, and for both gradients; in the program that an update is."""
    objective, settings, target = head(name), Settings(steps=1, compute_dtype="bfloat16"), tiny.target_params()
    state = TrainState.begun(settings, objective.init(jax.random.key(0), target))
    own = matrices(state.params) - matrices(target)
    program = update.trace(objective, settings, state, target, packed()).jaxpr
    products = [x for x in equations(program.jaxpr) if x.primitive.name == "dot_general"]
    seen: dict[tuple[int, ...], int] = dict.fromkeys(own, 0)
    for product in products:
        sizes = {tuple(sorted(x.aval.shape)) for x in (*product.invars, *product.outvars)}
        for size in sizes & own:
            seen[size] += 1
            assert {x.aval.dtype.name for x in product.invars} == {"bfloat16"}, product
    assert any(count >= 3 for count in seen.values()), seen  # forward, and for both gradients


@pytest.mark.parametrize("name", cases(("hydra",), ("hydra", "eagle3", "dspark", "gemma4_assistant")))
def test_losses_and_gradients_are_those_of_float32_but_for_rounding(name):
    objective, target = head(name), tiny.target_params()
    params = objective.init(jax.random.key(0), target)

    @jax.jit
    def both(params):
        run = lambda dtype: gradients(objective, params, target, packed(), jax.random.key(1), compute_dtype=dtype)
        return run("float32"), run("bfloat16")

    (grads, metrics, count), (others, rounds, same) = both(params)
    assert count == same and {x.dtype for x in jax.tree.leaves(others)} == {jnp.dtype("float32")}
    for key, value in metrics.items():
        assert float(rounds[key]) == pytest.approx(float(value), rel=0.02, abs=0.05 if "agreement" in key else 0.01), (
            key
        )
    assert float(metrics["loss"]) != float(rounds["loss"])
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    a, b = flat(grads), flat(others)
    assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(a)


@pytest.mark.slow
def test_updates_too_small_for_bfloat16_add_up():
    """Ten of 1e-4 near 1, where numbers of bfloat16 are 1 / 256 apart at least."""
    objective, target = head("hydra"), tiny.target_params()
    settings = Settings(steps=10, learning_rate=1e-4, compute_dtype="bfloat16")
    before = objective.init(jax.random.key(0), target)
    state = TrainState.begun(settings, jax.tree.map(jnp.copy, before))
    for _ in range(10):
        state, _ = update(objective, settings, state, target, packed())
    kinds = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kinds == {jnp.dtype("float32")}
    assert (
        rounded(before, "bfloat16")["heads"][0]["kernel"].dtype == "float32"
    )  # of the vocabulary, rounded chunk by chunk
    scale = lambda params: np.asarray(params["prefix"]["norm"]["scale"], np.float32)
    moved = np.abs(scale(state.params) - scale(before))
    assert 3e-4 < moved.max() < 1e-3
    assert (scale(rounded(state.params, "bfloat16")) == scale(rounded(before, "bfloat16"))).all()
