"""What cache policies keep of a prompt once it was read, against loops in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import changed
from support.small_target import TARGET, weights

import specjax
from specjax.models.caches import EMS, GEAR, SpAtten, ems
from specjax.models.kv import KVDelta
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys

B, K, G, H, LAYERS = 2, 2, 2, 4, 2
LENGTHS = np.asarray((37, 23))
"""Tokens that were read of each row; the shorter one is written further, as if a longer prompt stood beside it."""
WIDTH = 10


@pytest.fixture(scope="module")
def text():
    """Keys, values `[L, B, S, K, H]` and scaled queries `[L, B, S, K, G, H]` of all positions."""
    rng = np.random.default_rng(1)
    shape = (LAYERS, B, 40, K)
    return (
        *(rng.normal(size=(*shape, H)).astype(np.float32) for _ in range(2)),
        rng.normal(size=(*shape, G, H)).astype(np.float32),
    )


def read(policy, text):
    """The cache after the prompts were read in blocks."""
    config = changed(
        TARGET.config, num_hidden_layers=LAYERS, num_attention_heads=K * G, num_key_value_heads=K, head_dim=H
    )
    lm = dataclasses.replace(TARGET, config=config, old=policy, ahead=3)
    cache, (key, value, query) = lm.reading(lm.init_cache(B, 40), 40), text

    @jax.jit
    def commit(cache, start, block):
        at = jnp.minimum(start, jnp.asarray(LENGTHS))
        counts = jnp.clip(jnp.asarray(LENGTHS) - at, 0, WIDTH)
        key, value, query = (tuple(x) for x in block)
        delta = KVDelta(key, value, jnp.zeros((B, WIDTH), jnp.int32), query)
        return lm.commit(cache, delta, None, at, counts)

    for start in range(0, 40, WIDTH):
        part = [x[:, :, start : start + WIDTH] for x in (key, value, query.reshape(*query.shape[:4], G * H))]
        cache = commit(cache, start, jax.device_put(part))
    return jax.jit(lambda cache: lm.begin(None, cache, jnp.asarray(LENGTHS) + 1))(cache)


def attention(text, layer, row, head):
    """`[N, N]` of one row and head, a mean over the heads that share keys."""
    count = LENGTHS[row]
    scores = np.einsum("tgh,sh->gts", text[2][layer, row, :count, head], text[0][layer, row, :count, head])
    scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0)


def test_rings_hold_the_newest_tokens(text):
    cache = read(EMS(5, 4, budget=8), text)
    assert cache.folded.tolist() == [32, 16] and cache.asked.tolist() == LENGTHS.tolist()
    for row, count in enumerate(LENGTHS):
        for position in range(int(cache.folded[row]), count):
            for layer, ring in enumerate(cache.rings):
                np.testing.assert_array_equal(ring.key[row, :, position % 12], text[0][layer, row, position])
                np.testing.assert_array_equal(ring.value[row, :, position % 12], text[1][layer, row, position])
        for position in range(count - 4, count):
            for layer, ring in enumerate(cache.rings):
                want = text[2][layer, row, position].reshape(K, G * H)
                np.testing.assert_array_equal(ring.query[row, :, position % 12], want)


@pytest.mark.parametrize(("threshold", "pool"), [(1.0, 1), (0.3, 5), (-1.0, 3)])
def test_ems_keeps_the_most_important_by_either_mean(text, threshold, pool):
    cache = read(EMS(5, 4, budget=8, threshold=threshold, pool=pool), text)
    for layer, row, head in np.ndindex(LAYERS, B, K):
        weights, folded = attention(text, layer, row, head), int(cache.folded[row])
        every = weights.sum(axis=0)[:folded]
        worth = np.maximum(every / LENGTHS[row], weights[-4:].mean(axis=0)[:folded])
        near = [worth[max(0, at - pool // 2) : at + pool // 2 + 1].sum() for at in range(folded)]
        kept = np.sort(np.argsort(-np.asarray(near))[:8])
        key, value = (x[layer, row, :folded, head] for x in text[:2])
        parts = {int(at): [int(at)] for at in kept}
        for at in sorted(set(range(folded)) - set(kept.tolist())):
            like = key[kept] @ key[at] / np.linalg.norm(key[kept], axis=1) / np.linalg.norm(key[at])
            if like.max() > threshold:
                parts[int(kept[like.argmax()])].append(at)
        body = cache.bodies[layer]
        for slot, at in enumerate(kept):
            share = every[parts[int(at)]] / every[parts[int(at)]].sum()
            np.testing.assert_allclose(body.key[row, head, slot], share @ key[parts[int(at)]], rtol=2e-4, atol=2e-5)
            np.testing.assert_allclose(body.value[row, head, slot], share @ value[parts[int(at)]], rtol=2e-4, atol=2e-5)
            np.testing.assert_allclose(body.score[row, head, slot], every[parts[int(at)]].sum(), rtol=1e-4)


def test_ems_keeps_what_the_end_of_a_prompt_asks_for(text):
    """However little the tokens before the end looked at it, and with the tokens beside it."""
    key, value, query = (x.copy() for x in text)
    key[:, :, 3], query[...] = 6 * np.eye(H)[0], 0.0
    query[:, 0, 33:37] = query[:, 1, 19:23] = 3 * np.eye(H)[0]
    cache = read(EMS(4, 5, budget=5, threshold=1.0), (key, value, query))
    for body, own in zip(cache.bodies, value, strict=True):
        for row, head in np.ndindex(B, K):
            held = np.asarray(body.value[row, head]).tolist()
            assert [at for at in range(16) if own[row, at, head].tolist() in held] == [1, 2, 3, 4, 5]


def test_spatten_prunes_a_prompt_in_a_cascade(text):
    policy = SpAtten(5, 4, important=12, last=6, start=2)
    cache = read(policy, text)
    for row in range(B):
        below, total = set(range(int(cache.folded[row]))), np.zeros(LENGTHS[row])
        for layer, (body, size) in enumerate(zip(cache.bodies, (12, 6), strict=True)):
            total += sum(attention(text, layer, row, head).sum(axis=0) for head in range(K))
            below = set(sorted(below, key=lambda p, total=total: (p >= 2, -total[p]))[:size])
            assert body.positions[row].tolist() == sorted(below)
            np.testing.assert_allclose(body.score[row], total[sorted(below)], rtol=1e-4)
            np.testing.assert_array_equal(body.key[row].swapaxes(0, 1), text[0][layer, row, sorted(below)])


def test_spatten_prunes_heads_by_what_they_gave_to_the_last_queries(text):
    cache = read(SpAtten(5, 4, important=12, last=6, start=2, heads=0.5), text)
    first, last = cache.bodies
    assert first.live.all() and not first.spoken.any() and (last.live.sum(axis=1) == 1).all()
    key, value, query = (x[0] for x in text)
    for row in range(B):
        gave = np.zeros(K)
        for at, head, one in np.ndindex(4, K, G):
            at = LENGTHS[row] - 4 + at
            scores = key[row, : at + 1, head] @ query[row, at, head, one]
            weights = np.exp(scores - scores.max())
            gave[head] += np.abs(weights / weights.sum() @ value[row, : at + 1, head]).sum()
        np.testing.assert_allclose(last.spoken[row, :, 0], gave, rtol=1e-4)
        assert last.live[row, gave.argmax(), 0]


def in_two_bits(x, axis):
    """Quantises vectors of a matrix between their extremes."""
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    low = low.astype(np.float16).astype(np.float32)
    step = ((high - low) / 3).astype(np.float16).astype(np.float32)
    return np.clip(np.round((x - low) / step), 0, 3) * step + low


def of_rank(errors, rank):
    """A matrix of so low a rank near the errors, by the published power iteration."""
    right = np.asarray(jax.random.uniform(jax.random.key(0), (errors.shape[1], rank)))
    for last in (False, False, True):
        left = errors @ (np.linalg.qr(right)[0] if last else right)
        left = np.linalg.qr(left)[0] if last else left
        right = errors.T @ left
    return left @ right.T


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(EMS(8, 8, budget=24, threshold=1.0, pool=1), id="ems"),
        pytest.param(SpAtten(8, 8, 24, 24), id="spatten", marks=pytest.mark.slow),
    ],
)
def test_a_fold_counts_all_queries_of_tokens_that_no_fold_has_seen(policy, text):
    """The first fold after a prompt is the same wherever in its chunk the prompt ends."""
    config = changed(TARGET.config, num_hidden_layers=1, num_attention_heads=K * G, num_key_value_heads=K, head_dim=H)
    lm = dataclasses.replace(TARGET, config=config, old=policy, ahead=1)
    key, value, query = (x[:1, :1] for x in text)

    def delta(first, last):
        flat = query.reshape(*query.shape[:4], G * H)
        part = [tuple(jnp.asarray(x[:, :, first:last])) for x in (key, value, flat)]
        return KVDelta(*part[:2], jnp.arange(first, last)[None], part[2])

    @functools.partial(jax.jit, static_argnums=0)
    def scores(length):
        start = lambda at: jnp.full(1, at, jnp.int32)
        cache = lm.reading(lm.init_cache(1, 40), 40)
        cache = lm.begin(None, lm.commit(cache, delta(0, length), None, start(0), start(length)), start(length + 1))
        for at in range(length, 32):
            cache = lm.commit(cache, delta(at, at + 1), None, start(at))
        return cache.begun(start(32)).bodies[0].score

    found = [np.asarray(scores(length)) for length in (24, 27, 31)]
    assert found[0].max() > 0
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gear_keeps_errors_of_a_prompt_together_in_their_own_rank(text):
    """Without a rank it is the quantiser alone; with one less is left."""
    left = {}
    for rank in (0, 2):
        policy = GEAR(5, 4, bits=2, rank=1, prefill_rank=rank, outliers=0.0)
        cache = read(policy, text)
        restored = jax.jit(lambda cache, p=policy: [p.read(body, cache.folded)[:2] for body in cache.bodies])(cache)
        for layer, row, head, part in np.ndindex(LAYERS, B, K, 2):
            folded = int(cache.folded[row])
            x = text[part][layer, row, :folded, head]
            want = np.concatenate([in_two_bits(x[at : at + 4], part) for at in range(0, folded, 4)])
            want = want + (of_rank(x - want, rank) if rank else 0.0)
            np.testing.assert_allclose(restored[layer][part][row, head, :folded], want, atol=5e-3)
            left.setdefault((layer, row, head, part), []).append(np.linalg.norm(x - want))
    assert all(few < none for none, few in left.values())


@pytest.mark.slow
def test_a_shared_prefix_gives_the_same_cache():
    """Sums over a prompt's queries go on where the prefix ended."""
    decoder = specjax.speculative(dataclasses.replace(TARGET, old=EMS(4, 4, budget=8))).with_rings()
    model, tokens = {"target": weights(TARGET), "draft": None}, np.random.default_rng(3).integers(1, 96, (2, 30))
    tokens[1, :12], lengths = tokens[0, :12], np.asarray((30, 21))
    sampling = SamplingArrays({"temperature": jnp.zeros(2)})
    prompts = Prompts(
        *jax.device_put((tokens, lengths)), row_keys(0, "ab"), jnp.asarray(lengths + 4), sampling, width=8
    )
    whole = decoder.init(model, prompts, capacity=40, cache_dtype=jnp.float32)
    state, prefix = decoder.read_prefix(model, whole, jnp.asarray(tokens[0, :12]))
    shared = decoder.insert(model, state, jnp.arange(2), prompts, prefix=prefix)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), shared.cache, whole.cache)


def test_a_short_prompt_is_read_into_slots_for_itself(monkeypatch):
    decoder = specjax.speculative(dataclasses.replace(TARGET, old=EMS(4, 4, budget=8))).with_rings()
    asked = []
    reading = type(TARGET).reading
    monkeypatch.setattr(
        type(TARGET), "reading", lambda self, cache, capacity: asked.append(capacity) or reading(self, cache, capacity)
    )
    for length in (9, 37, 400):
        prompts = Prompts(
            jnp.ones((2, length), jnp.int32), jnp.full(2, length), row_keys(0, "ab"), jnp.full(2, 420),
            SamplingArrays({"temperature": jnp.zeros(2)}), width=8,
        )  # fmt: skip
        jax.eval_shape(
            lambda params, prompts: decoder.init(params, prompts, capacity=400, cache_dtype=jnp.float32),
            {"target": weights(TARGET), "draft": None}, prompts,
        )  # fmt: skip
    assert asked == [8, 40, 400]


@pytest.mark.parametrize(
    "size", [pytest.param(255, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow), 600]
)
def test_ems_compares_keys_in_parts(size):
    """As all at once, in a program that never holds all cosines."""
    rng = np.random.default_rng(2)
    key, centres = (jnp.asarray(rng.normal(size=(B, K, n, H)), jnp.float32) for n in (size, 64))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    cosines = np.einsum("bksh,bkch->bksc", unit(np.asarray(key)), unit(np.asarray(centres)))
    like, into = jax.jit(ems._nearest)(key, centres)
    np.testing.assert_allclose(like, cosines.max(axis=-1), atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(cosines, np.asarray(into)[..., None], axis=3)[..., 0], like, atol=1e-5
    )
    used = jax.jit(ems._nearest).lower(key, centres).compile().memory_analysis().temp_size_in_bytes
    assert size < 600 or used < 0.75 * cosines.size * 4
