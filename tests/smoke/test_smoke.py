"""A torch-free handful for other jax versions: the guarantees on three drafters, a round trip of weights, one mesh."""

import jax
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, TARGET, complete, params, plain, same

import specjax


@pytest.mark.parametrize("name", ("prompt_lookup", "token_recycling", "draft-top_k"))
def test_same_text_as_plain(name):
    same(complete(DRAFTERS[name])[0], plain())


def test_save_and_load(tmp_path):
    specjax.models.save(tmp_path / "toy", TARGET, params()["target"], eos_ids=(3,))
    model = specjax.models.load(tmp_path / "toy")
    assert model.eos_ids == (3,)
    for a, b in zip(jax.tree.leaves(params()["target"]), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_generate_on_a_mesh(tmp_path):
    specjax.models.save(tmp_path / "toy", TARGET, params()["target"])
    options = {"prompts": [list(MIXED.prompts[1])], "max_new_tokens": 8, "temperature": 1.0}
    options["drafter"] = "prompt_lookup:length=1"  # the default's program holds the target's pass four times
    one = specjax.generate(tmp_path / "toy", **options)
    eight = specjax.generate(tmp_path / "toy", mesh="data=2,model=4", **options)
    assert one[0].tokens == eight[0].tokens
