"""Noise: what a row's randomness depends on, and what it does not."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.sampling.noise import ACCEPT, COIN, GUMBEL, RESIDUAL, gumbel, gumbel_at, keys_at, uniform


def bits(keys):
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).tolist()]


def sampler(keys, lengths, temperature=1.0, vocab=16):
    rows = len(lengths)
    return Sampler(
        keys,
        jnp.zeros((rows, 32), jnp.int32),
        jnp.asarray(lengths),
        jnp.ones(rows, bool),
        SamplingArrays.make(rows, temperature=temperature),
    )


def test_row_keys_know_seed_identity_and_ordinal_only():
    a, b, c = bits(row_keys(0, ["a", "b", "c"]))
    assert len({a, b, c}) == 3
    assert bits(row_keys(0, ["c", "a"])) == [c, a]
    assert bits(row_keys(0, ["b"])) == [b]
    assert bits(row_keys([0, 0], ["x", "b"]))[1] == b
    assert bits(row_keys(1, ["a"])) != [a]
    assert bits(row_keys([3, 5], ["a", "a"])) == bits(row_keys(3, ["a"])) + bits(row_keys(5, ["a"]))


def test_seeds_have_64_bits():
    """Those below 2^32 give the keys that they gave when there were no others; those above, and negative ones, others."""
    seeds = [0, 7, 2**31, 2**32 - 1]
    digest = np.frombuffer(hashlib.blake2b(b"id:a", digest_size=8).digest(), "<u4")

    def spelled_out(seed):
        key = jax.random.key(jnp.uint32(seed), impl="threefry2x32")
        for word in (*digest, 0):
            key = jax.random.fold_in(key, jnp.uint32(word))
        return bits(key[None])[0]

    assert bits(row_keys(seeds, ["a"] * 4)) == [spelled_out(seed) for seed in seeds]
    many = [s + high * 2**32 for s in seeds for high in (0, 1, 2, 2**31)] + [-1, -(2**32), -(2**63)]
    assert len(set(bits(row_keys(many, ["a"] * len(many))))) == len(many) - 1  # of 64 bits, -2^63 is 2^63
    assert bits(row_keys([-1], ["a"])) == bits(row_keys([2**64 - 1], ["a"]))


def test_row_keys_by_prompt():
    one = bits(row_keys(0, [[1, 2, 3]]))
    assert one == bits(row_keys(0, [np.array([1, 2, 3], np.int64)])) == bits(row_keys(0, [(1, 2, 3)]))
    assert one != bits(row_keys(0, [[1, 2, 4]])) and one != bits(row_keys(0, [[1, 2, 3, 0]]))
    text = np.asarray([1, 2], "<i4").tobytes().decode()
    assert bits(row_keys(0, [text])) != bits(row_keys(0, [[1, 2]]))  # an id is never taken for a prompt


def test_equal_identities_are_told_apart_by_their_order():
    first, other, second, third = bits(row_keys(0, ["a", "b", "a", "a"]))
    assert len({first, other, second, third}) == 4
    assert bits(row_keys(0, ["a", "a", "a"])) == [first, second, third]


def test_row_keys_are_threefry_whatever_the_default():
    with jax.default_prng_impl("rbg"):
        keys = row_keys(7, ["a"])
    assert str(jax.random.key_impl(keys)) == "threefry2x32" and bits(keys) == bits(row_keys(7, ["a"]))


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        row_keys([1, 2], ["a"])


SPAN = 12  # positions asked for at once: one shape throughout, so that everything is compiled once
vectors = jax.jit(lambda keys, positions, purpose: gumbel(keys, positions, 16, purpose))
scores = jax.jit(lambda sampler, depth: sampler.scores(jnp.zeros((*depth.shape, 16)), depth, None, 5))
uniforms = jax.jit(uniform)


def span(rows):
    return jnp.broadcast_to(jnp.arange(SPAN)[None], (rows, SPAN))


def test_purposes_share_no_bits():
    keys = row_keys(0, ["a", "b"])
    folded = jax.jit(lambda keys, positions, purpose: jax.random.key_data(keys_at(keys, positions, purpose)))
    words = [np.asarray(folded(keys, span(2), purpose)).reshape(-1, 2) for purpose in (GUMBEL, ACCEPT, RESIDUAL)]
    assert len(np.unique(np.concatenate(words), axis=0)) == 3 * 2 * SPAN
    shared, residual = (np.asarray(vectors(keys, span(2), purpose)).ravel() for purpose in (GUMBEL, RESIDUAL))
    assert abs(np.corrcoef(shared, residual)[0, 1]) < 4 / np.sqrt(shared.size)


def test_a_position_has_one_vector_wherever_it_is_asked():
    keys = row_keys(0, ["a", "b"])
    every = np.asarray(vectors(keys, span(2), GUMBEL))
    order = np.stack([np.random.default_rng(row).permutation(SPAN) for row in range(2)])
    moved = np.asarray(vectors(keys, jnp.asarray(order), GUMBEL))
    swapped = np.asarray(vectors(keys[::-1], jnp.asarray(order), GUMBEL))
    for row in range(2):
        np.testing.assert_array_equal(moved[row], every[row, order[row]])
        np.testing.assert_array_equal(swapped[row], every[1 - row, order[row]])
    u = np.asarray(uniforms(keys, span(2)))
    np.testing.assert_array_equal(np.asarray(uniforms(keys[::-1], jnp.asarray(order)))[0], u[1, order[0]])
    assert u.min() >= 0 and u.max() < 1


def test_the_sampler_uses_the_position_alone():
    keys = row_keys(0, ["a", "b"])
    every = np.asarray(vectors(keys, span(2), GUMBEL))
    early, late = sampler(keys, [4, 2]), sampler(keys, [6, 5])
    depths = np.asarray([[0, 2, 2], [3, 0, 1]])
    for one, lengths in ((early, (4, 2)), (late, (6, 5))):
        got = np.asarray(scores(one, jnp.asarray(depths)))
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(got[row], every[row, length + depths[row]])
    at_six = np.asarray(vectors(keys, span(2), RESIDUAL))[0, 6]
    u = np.asarray(uniforms(keys, span(2)))
    other = jax.jit(lambda s, depth: (s.scores(jnp.zeros((2, 3, 16)), 2), s.residual_noise(depth, 16), s.uniform(4)))
    for one, lengths, depth in ((early, (4, 2), 2), (late, (6, 5), 0)):
        fixed, residual, accept = other(one, jnp.asarray([depth, 0]))
        np.testing.assert_array_equal(fixed[0], np.stack([every[0, lengths[0] + 2]] * 3))
        np.testing.assert_array_equal(residual[0], at_six)
        np.testing.assert_array_equal(accept, [u[row, lengths[row] : lengths[row] + 4] for row in range(2)])


def test_once_is_other_noise_at_every_length_and_the_same_coins():
    """A coin is part of a place's distribution, so a step's own noise leaves it; what a step draws, the next one does
    not see."""
    keys, depth = row_keys(0, ["a", "b"]), jnp.asarray([2, 0])
    at = lambda s: jnp.asarray([[6, 7, 8]] * 2)
    coins = jax.jit(lambda s: s.text(None).uniform(at(s)))
    drawn = jax.jit(lambda s: (s.scores(jnp.zeros((2, 1, 16)), 0), s.residual_noise(depth, 16), s.uniform(4)))
    early, late = sampler(keys, [4, 2]), sampler(keys, [5, 3])
    np.testing.assert_array_equal(coins(early.once()), uniform(keys, at(early), COIN))
    for ours, theirs in ((early.once(), early), (early.once(), late.once())):
        np.testing.assert_array_equal(coins(ours), coins(theirs))
        for mine, other in zip(drawn(ours), drawn(theirs), strict=True):
            assert not np.isin(mine, other).any()


def test_noise_does_not_depend_on_the_other_rows():
    keys = row_keys(0, ["a", "b"])
    depth = jnp.ones((2, 3), int)
    whole = scores(sampler(keys, [4, 2]), depth)
    turned = scores(sampler(keys[::-1], [9, 4]), depth)
    assert (whole[0] == turned[1]).all()
    mixed = scores(sampler(keys, [4, 2], temperature=[1.0, 0.0]), depth)
    assert (mixed[0] == whole[0]).all() and (mixed[1] == 0).all()


def test_some_entries_of_the_noise_are_those_of_all_of_it():
    keys, positions = row_keys(3, ["a", "b", "c"]), jnp.asarray([[3, 4], [7, 1], [100, 5]])
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 999, (3, 2, 50))).at[:, :, :2].set(jnp.asarray([0, 998]))
    full = jax.jit(gumbel, static_argnums=2)(keys, positions, 999)
    np.testing.assert_array_equal(jax.jit(gumbel_at)(keys, positions, ids), jnp.take_along_axis(full, ids, axis=2))
