"""The reader of compiled programs finds weights that cross from chip to chip, and nothing else."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import mesh_cases

from specjax.plan.moved import moved_weights
from specjax.sharding import RULES, make_mesh

MESH = make_mesh("data=2,model=4")


def text_of(function, places, *shapes):
    """The compiled text of a function of params and arrays."""
    put = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))
    return jax.jit(function).lower(*map(put, shapes, places)).compile().as_text()


def everywhere(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P()))


def test_activations_may_cross():
    """A product summed over its split dimension, and rows of a split table."""

    def apply(params, x):
        return everywhere(x @ params)

    text = text_of(apply, (P("model"), P(None, "model")), (16, 8), (4, 16))
    assert "all-reduce" in text and moved_weights(text) == []

    def look_up(params, x):
        return everywhere(params[jnp.argmax(x, axis=1)])

    text = text_of(look_up, (P("model"), P()), (16, 8), (4, 16))
    assert "all-reduce" in text and moved_weights(text) == []


@pytest.mark.parametrize(
    "weight",
    (
        lambda w, x: w,
        lambda w, x: 2 * w.T.reshape(16, 8),
        lambda w, x: w @ w.T @ w,
        lambda w, x: jnp.where(x.sum() > 0, w, x[0, 0]),
        lambda w, x: jnp.concatenate([w[:8], jnp.broadcast_to(x[0, :8], (8, 8))]),
    ),
    ids=("as it is", "turned", "of weights alone", "chosen", "beside others"),
)
def test_weights_may_not(weight):
    text = text_of(lambda params, x: everywhere(weight(params, x)), (P("model"), P()), (16, 8), (4, 16))
    (moved, *_) = moved_weights(text)
    assert moved.weights == ("params",) and "moves params" in str(moved)


def test_weights_are_found_inside_loops_and_branches():
    """What a loop carries may turn out to be an activation only after rounds; a weight in it remains one."""

    def rounds(params, x):
        def body(carry):
            count, h, own, late = carry
            h = jax.lax.cond(h.sum() > 0, lambda own, h: h @ everywhere(own), lambda own, h: h @ own, own, h)
            return count + 1, h @ h.T @ h, own, everywhere(late @ params + h[:2])

        start = jnp.zeros((2, 16))
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, params, start))[1::2]

    text = text_of(rounds, (P(None, "model"), P()), (16, 16), (4, 16))
    moved = moved_weights(text)
    assert moved and all(each.op.value[0].dims == (16, 16) for each in moved)
    assert text.count("all-gather(") + text.count("all-reduce(") > len(moved)


def test_a_program_without_weights_is_refused():
    with pytest.raises(ValueError, match="none of this program's arguments is a weight"):
        moved_weights(text_of(lambda x, y: everywhere(x + y), (P("model"), P()), (16, 8), (16, 8)))


def test_a_weight_on_the_wrong_axis_is_caught(monkeypatch):
    """Weights split over the axis of the rows would have to travel to them, every step."""
    decoder = mesh_cases.decoder_on("data=2,model=4", "none")
    monkeypatch.setitem(RULES, "embed", "data")
    model = mesh_cases.placed(decoder, mesh_cases.weights("none"))
    assert model["target"]["layers"][0]["mlp"]["up"]["kernel"].sharding.spec == P("data", "model")
    with pytest.raises(AssertionError, match=r"move weights: .* moves params\['target'\]"):
        mesh_cases.begun(decoder, model)
