"""The gated delta rule of a block with ancestors: every implementation against the recurrence along each path."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.delta_rule import delta_rule

WAYS = ("xla", "pallas_tpu_interpreted", "pallas_gpu_interpreted")


def recurrence(query, key, value, strength, log_decay, seen, sums, past):
    """Outputs and corrections of one row, token by token along the path of each, in float64."""
    before = seen.shape[1] - len(query)
    made = np.zeros(value.shape)
    out = np.zeros(value.shape)
    for t in range(len(query)):
        for n, r in np.ndindex(value.shape[1:3]):
            state = sums[n, r].astype(np.float64)
            for j in np.flatnonzero(seen[t]):
                own = j - before
                k = past[0][j, n] if own < 0 else key[own, n]
                state = state * np.exp(past[2][j, n, r] if own < 0 else log_decay[own, n, r])
                if own == t:
                    made[t, n, r] = strength[t, n, r] * (value[t, n, r] - k @ state)
                state = state + np.outer(k, past[1][j, n, r] if own < 0 else made[own, n, r])
            out[t, n, r] = query[t, n] @ state
    return out, made


def world(size, before=0, rows=2, heads=2, served=2, width=128, out=128, seed=0, shared=False):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    total = before + size
    seen = np.zeros((1 if shared else rows, total, total), bool)
    for each in seen:
        for t in range(total):
            parent = rng.integers(-1, t) if t else -1
            each[t] = each[parent] if parent >= 0 else False
            each[t, t] = True
    decay = lambda count: -np.abs(normal(rows, count, heads, served))
    given = (
        normal(rows, size, heads, width) * width**-0.5, unit(normal(rows, size, heads, width)),
        normal(rows, size, heads, served, out), rng.uniform(size=(rows, size, heads, served)).astype(np.float32),
        decay(size), seen[:, before:], normal(rows, heads, served, width, out),
    )  # fmt: skip
    past = (unit(normal(rows, before, heads, width)), normal(rows, before, heads, served, out), decay(before))
    return given, past if before else None


CASES = {
    "tree": world(7), "one token": world(1, rows=1), "a past": world(5, before=6), "one tree for all": world(9, shared=True),
    "many": world(17, before=3, rows=1, heads=1),
}  # fmt: skip


@functools.cache
def wanted(name):
    given, past = CASES[name]
    of_row = lambda x, row: x[row if len(x) > 1 else 0]
    parts = [
        recurrence(*(of_row(x, row) for x in given), None if past is None else [x[row] for x in past])
        for row in range(len(given[0]))
    ]
    return [np.stack(part) for part in zip(*parts, strict=True)]


FAST = {("xla", name) for name in CASES} | {(way, "a past") for way in WAYS}


@pytest.mark.parametrize(
    ("way", "name"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in itertools.product(WAYS, CASES)],
)
def test_outputs_are_those_of_the_recurrence_along_each_path(way, name):
    given, past = CASES[name]
    found = jax.jit(functools.partial(delta_rule, implementation=way))(*given, past)
    for a, b in zip(found, wanted(name), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_rejected_tokens_leave_no_trace(way):
    """Nodes that no path of others contains may hold any finite numbers."""
    given, _ = CASES["tree"]
    leaves = ~given[5].any(axis=1, where=~np.eye(7, dtype=bool)[None])  # tokens that no other follows
    spoilt = [np.array(x) for x in given]
    for x in spoilt[:5]:
        x[leaves] = 1e6 if x is not spoilt[4] else -1e6
    kept = ~leaves
    assert leaves.any(axis=1).all() and kept.any()
    for a, b in zip(jax.jit(functools.partial(delta_rule, implementation=way))(*spoilt), wanted("tree"), strict=True):
        np.testing.assert_allclose(np.asarray(a)[kept], b[kept], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_repeated_keys_lose_no_digits(way):
    """A chain of one repeated token: powers of the system's matrix would have entries of 10^8."""
    size = 32
    (query, key, value, *_, sums), _ = world(size, rows=1, heads=1, served=1)
    key, strength = np.broadcast_to(key[:, :1], key.shape), np.full((1, size, 1, 1), 0.999, np.float32)
    given = query, key, value, strength, np.zeros_like(strength), np.tril(np.ones((1, size, size), bool)), sums
    found = jax.jit(functools.partial(delta_rule, implementation=way))(*given)
    for a, b in zip(found, recurrence(*(x[0] for x in given), None), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=2e-5, atol=2e-5)


def test_derivatives_and_maps_are_those_of_xla():
    given, past = world(3, before=2, heads=1, served=1, width=4, out=4)

    def gradients(way):
        def total(key, sums):
            made = delta_rule(given[0], key, *given[2:6], sums, past, implementation=way)
            return sum(jnp.sin(x).sum() for x in made)

        return jax.grad(total, argnums=(0, 1))(given[1], given[6])

    own, plain = gradients(None), gradients("xla")
    for a, b in zip(own, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    mapped = jax.vmap(lambda query: delta_rule(query, *given[1:], past))(np.stack([given[0], 2 * given[0]]))
    np.testing.assert_allclose(mapped[0][1], 2 * mapped[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(mapped[1][1], mapped[1][0])


def test_each_device_computes_its_rows_and_heads():
    given, past = CASES["a past"]
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = jax.jit(delta_rule)(*given, past)
        text = jax.jit(delta_rule).lower(*given, past).compile().as_text()
    for a, b in zip(found, wanted("a past"), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert "all-gather" not in text and "all-reduce" not in text


def test_an_unknown_implementation_is_refused():
    given, _ = CASES["one token"]
    with pytest.raises(ValueError, match="delta_rule has no implementation 'triton'"):
        delta_rule(*given, implementation="triton")
