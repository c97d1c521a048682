"""A device's own experts in turns: every row is counted once, however many a turn has room for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.grouped_dot import grouped_dot
from specjax.models.own_experts import in_turns, turn

COUNT, PARTS, NUMBER, EACH, TOKENS, WIDTH = 40, 8, 5, 5, 12, 16  # experts, devices, experts of one, k, M, E
DRAWN = np.random.default_rng(0)
FEW = DRAWN.permuted(np.tile(np.arange(COUNT), (TOKENS, 1)), axis=1)[:, :EACH]
CHOICES = {
    "evenly": FEW,
    "all its own": np.tile([3, 0, 4, 1, 2], (TOKENS, 1)),  # 60 rows, for which a turn has no room
    "one expert": np.where(np.arange(EACH)[None] == 2, 3, FEW % (COUNT - NUMBER) + NUMBER),
    "none": FEW % (COUNT - NUMBER) + NUMBER,
    "the first tokens": np.where(
        np.arange(TOKENS)[:, None] < 3, np.arange(EACH)[None], FEW % (COUNT - NUMBER) + NUMBER
    ),
}


def given():
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.random.normal(keys[0], (NUMBER, WIDTH, WIDTH))
    return params, jax.random.normal(keys[1], (TOKENS, WIDTH)), jax.random.uniform(keys[2], (TOKENS, EACH))


def of_all(inputs, params, x, weights, experts):
    """The own ones among what every own expert gives to every token."""
    each = weights[:, :, None]
    read = x[:, None] * each if inputs else jnp.broadcast_to(x[:, None], (*experts.shape, WIDTH))
    made = jax.nn.silu(jnp.einsum("mki,mkio->mko", read, params[jnp.minimum(experts, NUMBER - 1)]))
    return jnp.sum(jnp.where((experts < NUMBER)[:, :, None], made if inputs else made * each, 0), axis=1)


@functools.cache
def sums(inputs):
    """Both, with the derivatives; the derivatives are those of the second."""
    apply = lambda params, x, sizes: jax.nn.silu(grouped_dot(x, params, sizes))
    whole = functools.partial(of_all, inputs)
    turns = in_turns(apply, whole, NUMBER, PARTS, inputs)
    loss = lambda summed: lambda *given: jnp.sum(jnp.sin(summed(*given)))
    return [jax.jit(lambda *given, own=own: (own(*given), jax.grad(loss(own))(*given))) for own in (turns, whole)]


@pytest.mark.parametrize("inputs", (False, True))
def test_sums_and_derivatives(inputs):
    assert turn(TOKENS * EACH, PARTS) == 16 < TOKENS * EACH
    for experts in CHOICES.values():
        got, want = (own(*given(), jnp.asarray(experts)) for own in sums(inputs))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5), got, want)


def test_a_token_does_not_depend_on_the_turns():
    """The first token's numbers are the same to rounding, whether others make its rows fall into one turn or several. What
    is not finite stays with its own token."""
    own, found = sums(False)[0], []
    params, x, weights = given()
    for others in CHOICES.values():
        experts = jnp.asarray(others).at[0].set(jnp.array([1, 39, 4, 0, 30]))
        clean = own(params, x, weights, experts)[0]
        lost = own(params, x.at[2].set(jnp.inf), weights.at[2].set(jnp.nan), experts)[0]
        assert np.isfinite(np.delete(lost, 2, axis=0)).all()
        assert np.isfinite(lost[2]).all() == (others[2] >= NUMBER).all()
        found += [clean[0], lost[0]]
    assert np.abs(found[0]).sum() > 0
    for each in found:
        np.testing.assert_allclose(found[0], each, rtol=1e-5, atol=1e-6)
