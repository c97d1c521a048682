"""DFlash 2: its convolutions and its selector by hand, where it begins, and when its selector is taught."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.published import V, toy
from support.published_blocks import TEXT, behind, proposed, view_of

from specjax.draft import DFlash, DFlash2
from specjax.draft.dflash2.network import ConvolutionConfig
from specjax.draft.dflash2.objective import TrainDFlash2
from specjax.draft.dflash2.selector import Selector, spread
from specjax.draft.heads.folder import Head
from specjax.expand import Chain
from specjax.objectives.means import MEAN


def test_a_convolution_reads_the_slots_before_in_its_block():
    """Three slots, two taps and two groups, as one block and as three."""
    module = ConvolutionConfig(2, 2, 3).build(4, jnp.float32, nnx.Rngs(0))
    x = jnp.asarray([[[1.0, 2, 3, 4], [0, 1, 0, -1], [2, 0, 1, 1]]])
    own = jnp.asarray([[[0.0, 0], [0, 0]], [[0.1, 0], [0.2, 1]], [[0, -1], [0, 0.5]]])
    both = jnp.stack([own, 7 * own], axis=1)[None]
    np.testing.assert_array_equal(module(x, 0 * both, 1), x)
    base = jnp.asarray([[1.0, 1, 1, 1], [0.5, 0, 0, -0.5]])
    module.base = nnx.Param(jnp.stack([base, 9 * base]))
    np.testing.assert_allclose(module(x, both, 0)[0], [[1, 2, 3, 4], [0.7, 1.5, 3, 1], [2, 0, 0, 0]], atol=1e-6)
    module.config = ConvolutionConfig(2, 2, 1)
    np.testing.assert_allclose(module(x, both, 0)[0, 1], [0, 1.1, 0, -1], atol=1e-6)


def test_the_selector_walks_the_likeliest_tokens():
    selector = Selector(2, 2, 2)
    tables = [[1.0, 0], [0, 1], [1, 1], [-1, 1]], [[1.0, 0], [0, 2], [1, -1], [0, 0]]
    params = {name: {"embedding": jnp.asarray(x)} for name, x in zip(("before", "after"), tables, strict=True)}
    params["projection"] = {"kernel": jnp.eye(2)}
    h, logits = jnp.asarray([[1.0, 1], [2, -1]]), jnp.asarray([[1, 0.9, 0, 0], [0, 0.5, 0.4, 0]])
    token, none, path = 3, -jnp.inf, []
    for slot, wanted in enumerate([[0.0, 2.9, none, none], [none, -1.5, 1.4, none]]):
        likeliest = selector.likeliest(logits[slot])
        dist = spread(selector(params, h[slot], jnp.asarray([token]), likeliest), likeliest[1], 4)
        np.testing.assert_allclose(dist[0], wanted, atol=1e-6)
        path.append(token := int(dist[0].argmax()))
    assert path == [1, 2]
    assert Selector(2, 2, 9).likeliest(logits)[0].shape == (2, 4)


@pytest.mark.slow
def test_a_fresh_head_is_dflash():
    """Its outputs bit for bit, and with all tokens as candidates its drafts and their distributions."""
    fields: dict[str, Any] = {"expander": Chain(3), "layers": 2, "block": 4}
    drafter, plain = DFlash2(group=4, candidates=V, **fields).bind(toy().lm), DFlash(**fields).bind(toy().lm)
    own = drafter.init_params(jax.random.key(5), toy().params)
    layers = {
        i: {name: {x: y for x, y in part.items() if x != "convolution"} for name, part in layer.items()}
        for i, layer in own["layers"].items()
    }
    bare = {name: x for name, x in own.items() if name != "selector"} | {"layers": layers}
    model, _, draft = behind(Head(drafter, own), TEXT)
    other, view = {**model, "draft": bare}, view_of(TEXT)
    np.testing.assert_array_equal(drafter.outputs(model, draft, view), plain.outputs(other, draft, view))
    got, wanted = (proposed(x, y, draft, 0.7) for x, y in ((drafter, model), (plain, other)))
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    np.testing.assert_array_equal(got.log_q, wanted.log_q)
    few = dataclasses.replace(drafter, candidates=3)
    np.testing.assert_array_equal(proposed(few, model, draft, 0.0).tokens, proposed(plain, other, draft, 0.0).tokens)


def test_the_selector_is_taught_after_the_first_updates():
    """Its loss is left out at the beginning of a run, grows, and is whole afterwards and for held-out text."""
    objective = TrainDFlash2(DFlash2(), selector_weight=3.0, selector_from=0.2, selector_ramp=0.4)
    one = jnp.ones((1, 1, 1))
    told = {"due": one > 0, "known": one > 0, "numbers": (one,), "chosen": 2 * one}
    found = [
        float(objective.taken(told, MEAN, None if done is None else jnp.asarray([done])))
        for done in (0.0, 0.2, 0.4, 0.6, 1.0, None)
    ]
    np.testing.assert_allclose(found, [1, 1, 4, 7, 7, 7], rtol=1e-6)
    sudden = dataclasses.replace(objective, selector_ramp=0.0)
    assert [float(sudden.taken(told, MEAN, jnp.asarray([done]))) for done in (0.1, 0.2)] == [1, 7]
    with pytest.raises(ValueError, match="dflash2: selector_from and selector_ramp are shares of at most 1"):
        TrainDFlash2(DFlash2(), selector_ramp=1.5)


def test_bad_fields_are_one_line_each():
    for message, fields in {
        "candidates must be at least 1": {"candidates": 0},
        "group=7 does not divide": {"group": 7},
        "reach=9 is more than the 8 slots of a block": {"reach": 9},
        "input_scale and multiplier must be above 0": {"multiplier": 0.0},
        "soft_cap must not be negative": {"soft_cap": -1.0},
    }.items():
        with pytest.raises(ValueError, match=f"dflash2: {message}"):
            DFlash2(**fields).bind(toy().lm)
