"""What a plan says of running states. Nothing is compiled."""

import dataclasses

import jax
import pytest

from specjax import models
from specjax.decode import Plain
from specjax.plan import fit, report, step
from specjax.sharding import aot, make_mesh

CHIP = aot.chip_of("v5e:1x1")
ROWS, CONTEXT = 2, 256


@pytest.fixture(scope="module")
def planned():
    """The model, the setup and the sizes of two rows of LFM2-1.2B: ten layers of short convolutions and six of attention."""
    mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    model = models.abstract("LiquidAI/LFM2-1.2B", mesh=mesh)
    setup = step.prepare(model, Plain(), mesh, ROWS, CONTEXT)
    return model, setup, step.sizes(setup)


def reported(setup, held):
    asked = {"model": "any", "dtype": "bfloat16", "topology": "v5e:1x1", "batch": ROWS, "context": CONTEXT}
    mesh = setup.state.length.sharding.mesh
    return report.record(asked | {"decoding": "none"}, CHIP, mesh, setup, held, None, 1.0, (), None)


def test_the_report_shows_them_as_a_part_of_the_cache(planned):
    _, setup, held = planned
    states, keys = 10 * ROWS * 2 * 2048 * 4, 6 * ROWS * CONTEXT * 2 * 8 * 64 * 2
    assert (held.states, held.cache) == (states, states + keys)
    record = reported(setup, held)
    memory = record["bytes_per_chip"]
    assert memory["states"] == states
    assert memory["total"] == memory["weights"] + memory["cache"] + memory["state"]
    assert "cache 0.007 (of which running states 0.000)" in report.table([record], CHIP)
    assert held.ideal == held.weights + keys * setup.live // CONTEXT + 2 * states  # the table is the head


def test_a_model_without_them_shows_none():
    mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    setup = step.prepare(models.abstract("tiny-draft", mesh=mesh), Plain(), mesh, ROWS, CONTEXT)
    record = reported(setup, step.sizes(setup))
    assert "states" not in record["bytes_per_chip"] and "running" not in report.table([record], CHIP)


def test_a_shorter_context_that_fits_keeps_them(planned):
    """Half of the slots fit beside states that are as large as half of the memory, and none beside twice these."""
    model, setup, held = planned
    chip = dataclasses.replace(CHIP, slices=(), hbm_bytes=2 * 10**9 + 3 * 10**7)

    def reason(states):
        full = dataclasses.replace(held, weights=10**9, cache=states + 5 * 10**7, states=states, state=0)
        return fit.reason(setup, model, chip, "v5e:1x1", full, 0)

    assert "--context 128" in reason(10**9) and "--context" not in reason(2 * 10**9)
