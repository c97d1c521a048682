"""Plausible input of the Python API that cannot be used: one clear ValueError each."""

import jax
import numpy as np
import pytest
from support.conformance import DRAFT, TARGET, params

import specjax
from specjax.draft import ModelDrafter
from specjax.serve.engine import Engine


@pytest.fixture(scope="module")
def model():
    return specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"drafter": ModelDrafter(DRAFT)}, "needs its parameters"),
        ({"drafter": (ModelDrafter(DRAFT),)}, "pair"),
        ({"prompts": [None]}, "a prompt is"),
        ({"prompts": [[]]}, "empty"),
        ({"prompts": [[1, 500]]}, "outside the vocabulary"),
        ({"prompts": [[1] * 128]}, "capacity"),
        ({"dtype": "foo"}, "unknown dtype"),
        ({"mesh": 2}, "a mesh is"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ),
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(model, **{"prompts": [[1, 2, 3]], **options})


def test_none_is_plain_and_dtype_casts(model):
    record = specjax.generate(model, [[1, 2, 3]], drafter=None, max_new_tokens=4, dtype="bfloat16")[0]
    assert record.steps == record.new_tokens == 4


def test_a_mesh_of_other_axes_is_refused(model):
    mesh = jax.make_mesh((8,), ("rows",))
    with pytest.raises(ValueError, match="data, model, context, or some of them; 'rows' is none of these"):
        specjax.generate(model, [[1, 2]], mesh=mesh)


def test_rejection_refuses_every_dynamic_tree(model):
    small = ModelDrafter(DRAFT, specjax.expand.TopK(k=1, depth=3, nodes=4))
    with pytest.raises(ValueError, match="takes chains"):
        specjax.generate(model, [[1, 2]], drafter=(small, params()["draft"]), verifier="rejection")


def test_a_capacity_that_is_too_small_is_refused(model):
    """With the drafter's slack: the text must not depend on it. What is needed is enough."""
    engine = Engine(model, "prompt_lookup:length=4")
    requests = [engine.request([1, 2, 3], max_new_tokens=6), engine.request([4], max_new_tokens=6)]
    with pytest.raises(
        ValueError, match="a capacity of 13 does not hold these requests: the longest one needs 14, 5 of"
    ):
        engine.run(requests, capacity=13)
    assert [r.new_tokens for r in engine.run(requests, capacity=14)] == [6, 6]
