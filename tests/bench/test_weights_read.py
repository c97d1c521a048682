"""Weights that a step reads, by hand, and the memory-bound speed-up that the bench makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny

from specjax import speculative
from specjax.bench.run import Lap, summarise, type_token_ratio
from specjax.bench.weights_read import _walked, weights_read
from specjax.draft import Kangaroo, Medusa, ModelDrafter, PromptLookup
from specjax.expand import Chain

W = jnp.ones((8, 4), jnp.float32)
X = jnp.ones((2, 8))


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def a_pass(params, width, nodes):
    """Bytes that a pass over some nodes reads: the table of embeddings by rows, everything else whole."""
    return size(params) - size(params["embed"]) + nodes * width * 4


def own_read(drafter, params):
    return weights_read(speculative(tiny.TARGET, drafter), {"target": tiny.target_params(), "draft": params})


def test_a_plain_step_reads_all_weights_once():
    assert own_read(None, None) == a_pass(tiny.target_params(), 32, 1)


@pytest.mark.parametrize("depth", (pytest.param(1, marks=pytest.mark.slow), 3))
def test_a_draft_model_is_read_once_for_every_token_of_a_chain(depth):
    read = own_read(ModelDrafter(tiny.DRAFT, Chain(depth)), tiny.draft_params())
    first = a_pass(tiny.draft_params(), 16, depth + 1)  # it reads again what the last step may have committed
    others = (depth - 1) * a_pass(tiny.draft_params(), 16, 1)
    assert read == a_pass(tiny.target_params(), 32, depth + 1) + first + others


@pytest.mark.slow
def test_a_look_up_reads_no_more_weights_than_plain_decoding():
    assert own_read(PromptLookup(length=3), None) == a_pass(tiny.target_params(), 32, 4)


@pytest.mark.slow
def test_heads_read_what_they_share_with_the_target_as_well():
    target = tiny.target_params()
    medusa = Medusa(Chain(2), heads=2, own_head=False).bind(tiny.TARGET)
    params = medusa.completed(medusa.init_params(jax.random.key(0), target), target)
    assert own_read(medusa, params) >= a_pass(target, 32, 3) + size(params)
    kangaroo = Kangaroo(exit_layer=1, length=2).bind(tiny.TARGET)
    params = kangaroo.init_params(jax.random.key(0), target)
    assert own_read(kangaroo, params) > own_read(None, None) + size(params)


def read_by(function, *weights):
    """Bytes that a function reads of its arguments, the last of which is data."""
    jaxpr = jax.make_jaxpr(function)(*weights, X).jaxpr
    return _walked(jaxpr, [float(leaf.nbytes) for leaf in weights] + [0.0])[0]


@pytest.mark.parametrize(
    ("function", "weights", "read"),
    [
        (lambda w, x: x @ w, (W,), 128),
        (lambda w, x: jax.jit(jnp.dot)(x, w.T.reshape(8, 4)), (W,), 128),
        (lambda w, x: x @ w[:, :1], (W,), 32),
        (lambda w, x: w[x[0, :2].astype(int)], (W,), 32),
        (lambda w, s, x: x @ (w.astype(jnp.float32) * s), (W.astype(jnp.int8), W[:1]), 32 + 16),
        (lambda w, x: jax.lax.scan(lambda y, _: ((y @ w) @ w.T, None), x, length=3)[0], (W,), 6 * 128),
        (lambda w, x: jax.lax.scan(lambda y, v: (y * v[None], None), x, w.T)[0], (W,), 128),
        (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: (x @ w) @ w.T, lambda: x + w[None, :, 0]), (W,), 256),
        (lambda w, x: jax.lax.while_loop(lambda y: y[0, 0] > 0, lambda y: (y @ w) @ w.T, x), (W,), np.inf),
        (lambda w, x: jax.lax.while_loop(lambda y: y[0, 0] > 0, lambda y: y - 1, x) @ w, (W,), 128),
        (lambda w, x: x.sum() + w.shape[0], (W,), 0),
    ],
)
def test_what_a_program_reads(function, weights, read):
    assert read_by(function, *weights) == read


def test_a_loop_whose_length_is_the_texts_has_no_figure(monkeypatch):
    monkeypatch.setattr("specjax.bench.weights_read._walked", lambda *given: (np.inf, []))
    assert own_read(None, None) is None


def test_memory_bound_speed_up_is_the_published_one():
    """c tau / (c + gamma): c is the target's size over the draft's, gamma the draft's passes, tau tokens per step."""
    plain, draft, passes = 1000.0, 40.0, 3
    laps = {
        "none": [Lap([[1, 2, 3, 4, 5, 6]], 1.0, 1.0, 6)],
        "draft": [Lap([[1, 2, 3, 4, 5, 6]], 1.0, 1.0, 2)],
        "rest": [Lap([[1, 2, 3, 4, 5, 6]], 1.0, 1.0, 3)],
    }
    report = summarise(laps, {}, "about", weights={"none": plain, "draft": plain + passes * draft})
    c = plain / draft
    assert [row.mbsu for row in report.rows] == [1.0, round(c * 3 / (c + passes), 4), None]
    assert [row.mbsu for row in summarise(laps, {}, "about").rows] == [None] * 3


def test_diversity_is_of_the_last_96_tokens():
    assert type_token_ratio([[*range(200)], [1] * 200]) == pytest.approx((1 + 1 / 96) / 2)
    assert type_token_ratio([[*range(104), *[7] * 96]]) == pytest.approx(1 / 96)
    assert type_token_ratio([[]]) == 0.0
