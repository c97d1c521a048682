"""Tree attention: every implementation against the definition in float64, and what must never matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import B, G, H, K, T, distances, holes, quantised, ring, sinks, world
from support.conformance import but_slow

from specjax.draft import PromptLookup
from specjax.kernels.tree_attention import blocked, shares, tree_attention
from specjax.kernels.tree_attention.reference import reference
from specjax.models import AttentionConfig, LlamaLM, llama_config
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sharding import make_mesh
from specjax.speculative import speculative

WAYS = ["xla", "blocked", "pallas_tpu_interpreted", "pallas_gpu_interpreted"]
static = ("causal", "split", "scale", "window", "soft_cap", "implementation")
attend = jax.jit(tree_attention, static_argnames=static)
plain = functools.partial(attend, scale=H**-0.5)


def check(operands, options, way, **settings):
    """Against the definition, as exactly as the operands' type allows."""
    got = plain(*operands, **options, **settings, implementation=way)
    want = reference(*operands, **options, **settings, scale=H**-0.5)
    assert got.dtype == operands[0].dtype
    tolerance = 1e-5 if got.dtype == jnp.float32 else 0.03
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)
    return got


def narrower(operands, width=H - 6):
    """The operands with values of another width than keys."""
    query, key, value, cache_key, cache_value, length = operands
    return query, key, value[..., :width], cache_key, cache_value[..., :width], length


@pytest.mark.parametrize("way", WAYS)
def test_ragged_rows_and_a_query_that_sees_nothing(way):
    """Rows without a prefix, with a part of their last block, and full, where blocks do not divide the capacity. Values are
    narrower than keys where that is served."""
    operands, options = world(300, (0, 129, 300), group=4)
    operands = narrower(operands) if way in ("xla", "blocked") else operands
    options["visible"] = options["visible"].at[0, 2].set(False)
    got = check(operands, options, way)
    assert (got[0, 2] == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_past_of_several_words_a_window_a_cap_and_holes(way):
    operands, options = world(256, (256, 5, 131), past=61, group=1)
    check(operands, options | {"unseen": holes(256)}, way, window=100, soft_cap=2.0)


@pytest.mark.parametrize("way", but_slow(WAYS, *(set(WAYS) - {"blocked"})))
def test_a_window_that_ends_with_a_chunk_is_the_chunk(way):
    """The past of a row crosses the end of one, another row begins one, and a third row's queries cross an end."""
    operands, options = world(256, (256, 39, 136), past=61, group=1)
    options["visible"] &= np.tri(T, T + 61, 61, dtype=bool)[None]
    positions, own = options["query_positions"], options["key_positions"]
    unseen, chunk = holes(256), 100
    assert positions[1, 0] == chunk and positions[2, 0] // chunk < positions[2, -1] // chunk
    ends = AttentionConfig(1, 1, H, window=chunk, chunked=True).window_ends(positions)
    got = plain(
        *operands,
        **options | {"query_positions": ends, "unseen": unseen},
        window=chunk,
        soft_cap=2.0,
        implementation=way,
    )
    query, *others = operands
    for t in range(T):
        here = positions[:, t : t + 1] // chunk
        want = reference(
            query[:, t : t + 1], *others, scale=H**-0.5, soft_cap=2.0,
            visible=options["visible"][:, t : t + 1] & (own // chunk == here)[:, None],
            unseen=unseen | (jnp.arange(256)[None] // chunk != here),
        )  # fmt: skip
        np.testing.assert_allclose(got[:, t : t + 1], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_sinks_take_their_part_and_have_no_value(way):
    """Of every head its own, under a window; a query that sees nothing but its sink gets zeros."""
    operands, options = world(256, (0, 129, 256), past=3)
    options["visible"] = options["visible"].at[0, 2].set(False)
    got = check(operands, options | {"sinks": sinks()}, way, window=100)
    assert (got[0, 2] == 0).all()
    none = plain(*operands, **options, window=100)
    assert float(jnp.abs(got - none).max()) > 0.1
    low = plain(*operands, **options, sinks=jnp.full(K * G, -1e4), window=100, implementation=way)
    np.testing.assert_allclose(low, none, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_slots_of_a_ring_hold_other_positions(way):
    """Rows that have not filled it, have just, and went round; windows that begin within."""
    texts = (40, 160, 1000)
    operands, options = world(160, np.minimum(texts, 160), past=3)
    positions = jnp.asarray(texts)[:, None] + jnp.arange(T + 3)[None]
    options |= {"query_positions": positions[:, 3:], "key_positions": positions, "cache_positions": ring(160, texts)}
    check(operands, options | {"sinks": sinks()}, way, window=100)


def test_wide_heads_are_read_in_smaller_pieces_on_a_gpu():
    """Sixteen slots at a time, for sixteen of the twenty queries of a kv-head."""
    operands, options = world(70, (0, 37, 70), heads=1, group=4, width=1024)
    check(operands, options, "pallas_gpu_interpreted", window=30, soft_cap=2.0)


@pytest.mark.parametrize("width", (80, 96))
def test_widths_that_are_no_power_of_two_on_a_gpu(width):
    operands, options = world(150, (0, 70, 150), past=3, heads=1, width=width)
    check(operands, options, "pallas_gpu_interpreted", window=100)


def test_a_width_that_no_gpu_takes_is_refused():
    operands, options = world(70, (0, 37, 70), width=24)
    with pytest.raises(ValueError, match="multiple of 16, not 24"):
        plain(*operands, **options, implementation="pallas_gpu_interpreted")


@pytest.mark.parametrize(
    ("batch", "heads", "tile", "capacity", "parts"),
    (
        (1, 1, 16, 8192, 128),  # a block each
        (1, 1, 64, 32768, 256),  # twice a tile each
        (1, 8, 64, 32768, 33),  # two programs a multiprocessor
        (64, 8, 16, 32768, 33),  # a row alone could fill the GPU
        (64, 8, 64, 2048, 2),
        (64, 8, 64, 512, 1),
    ),
)
def test_parts_fill_a_gpu_with_a_batch_and_with_one_row(batch, heads, tile, capacity, parts):
    assert shares.splits(batch, heads, 1, tile, capacity, 64) == parts


@pytest.mark.parametrize("way", WAYS)
def test_one_query_in_half_precision(way):
    operands, options = world(640, (40, 129, 600), dtype=jnp.bfloat16, block=1, heads=1, group=8)
    check(operands, options, way)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_cache(way, dtype):
    """The definition reads the same 8-bit numbers and scales, so only the order of rounding differs."""
    (*new, cache_key, cache_value, length), options = world(100, (0, 64, 100), block=3)
    cut = lambda x: jnp.clip(x, -1e9, 1e9)
    (cache_key, key_scale), (cache_value, value_scale) = (quantised(cut(x), dtype) for x in (cache_key, cache_value))
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    check((*new, cache_key, cache_value, length), options | scales, way)


@pytest.mark.parametrize("way", ["xla", "blocked"])
def test_scores_by_distance(way):
    """Of keys on both sides, near and far, in the cache, the past and the block; and of the slots of a ring."""
    operands, options = world(300, (0, 129, 300), past=7)
    check(operands, options | {"distances": distances()}, way)
    texts = (9, 96, 500)
    operands, options = world(96, np.minimum(texts, 96))
    positions = jnp.asarray(texts)[:, None] + jnp.arange(T)[None]
    options |= {"query_positions": positions, "key_positions": positions, "cache_positions": ring(96, texts)}
    check(operands, options | {"distances": distances()}, way, window=50)


@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_the_keys(way):
    """Of one kv-head, in a cache that is read once for both, also in eight bits; not for kernels that read them apart."""
    (query, key, _, cache_key, _, length), options = world(300, (0, 129, 300), past=3, heads=1, group=4)
    if way == "pallas_gpu_interpreted":
        with pytest.raises(ValueError, match="it reads values of their own, and these are the keys"):
            plain(query, key, None, cache_key, None, length, **options, implementation=way)
        return
    got = check((query, key, None, cache_key, None, length), options, way)
    np.testing.assert_allclose(
        got, plain(query, key, key, cache_key, cache_key, length, **options), rtol=1e-5, atol=1e-5
    )
    held, scale = quantised(jnp.clip(cache_key, -1e9, 1e9), jnp.int8)
    check((query, key, None, held, None, length), options | {"key_scale": scale}, way)


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_head_with_scales_of_their_own(way):
    """As if each part were quantised alone; kernels have one scale for a slot of a head."""
    (*new, cache_key, cache_value, length), options = world(100, (0, 64, 100), block=3)
    parts = lambda x: jnp.clip(x, -1e9, 1e9).reshape(B, K, 100, 4, H // 4).swapaxes(2, 3)
    (key, key_scale), (value, value_scale) = (quantised(parts(x), jnp.int8) for x in (cache_key, cache_value))
    whole = lambda x: x.swapaxes(2, 3).reshape(B, K, 100, H)
    scales = {"key_scale": key_scale.reshape(B, -1, 100), "value_scale": value_scale.reshape(B, -1, 100)}
    operands = *new, whole(key), whole(value), length
    if way not in ("xla", "blocked"):
        with pytest.raises(ValueError, match="one scale per slot and head, not several"):
            plain(*operands, **options, **scales, implementation=way)
        return
    check(operands, options | scales, way)
    exact = key.astype(jnp.float32) * key_scale[..., None], value.astype(jnp.float32) * value_scale[..., None]
    want = plain(*new, *map(whole, exact), length, **options)
    np.testing.assert_allclose(plain(*operands, **options, **scales, implementation=way), want, rtol=1e-4, atol=1e-4)


def test_the_mask_of_a_chain_and_none():
    operands, _ = world(200, (10, 150, 199))
    for causal in (True, False):
        whole, blocks = (plain(*operands, causal=causal, implementation=kind) for kind in ("xla", "blocked"))
        np.testing.assert_allclose(blocks, whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "blocked"])
@pytest.mark.parametrize("capacity", (40, 260))
def test_holes_of_the_prefix_are_not_seen(implementation, capacity):
    """The same as the seen slots alone, given as uncommitted keys; what the holes hold never matters."""
    lengths = (capacity, capacity - 7, 3)
    (query, key, value, cache_key, cache_value, length), options = world(capacity, lengths)
    unseen = holes(capacity).at[2].set(True)
    spoilt = (jnp.where(unseen[:, None, :, None], 1e4, x) for x in (cache_key, cache_value))
    got = plain(query, key, value, *spoilt, length, **options, unseen=unseen, implementation=implementation)
    seen = ~unseen & (jnp.arange(capacity)[None] < length[:, None])
    visible = jnp.concatenate([jnp.broadcast_to(seen[:, None], (B, T, capacity)), options["visible"]], axis=-1)
    keys, values = (
        jnp.concatenate([old.swapaxes(1, 2), new], axis=1) for old, new in ((cache_key, key), (cache_value, value))
    )
    want = plain(query, keys, values, None, None, length, visible=visible)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_neither_capacity_nor_other_rows_nor_garbage_change_a_bit():
    (query, key, value, cache_key, cache_value, _), options = world(5 * blocked.BLOCK, (20, 130, 390))
    run = functools.partial(plain, **options, implementation="blocked")
    want = run(query, key, value, cache_key, cache_value, jnp.asarray([20, 130, 390]))
    for capacity in (4 * blocked.BLOCK, 5 * blocked.BLOCK):
        for others in (0, 130, 390, 512):
            cut = [x[:, :, :capacity].at[1, :, 130:].set(1e9) for x in (cache_key, cache_value)]
            got = run(query, key, value, *cut, jnp.asarray([others, 130, others]))
            np.testing.assert_array_equal(got[1], want[1])


def test_half_precision_stays_close():
    operands, options = world(300, (0, 129, 300), dtype=jnp.bfloat16)
    exact = plain(*(x.astype(jnp.float32) for x in operands[:5]), operands[5], **options, implementation="xla")
    got = plain(*operands, **options, implementation="blocked")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=0.05)


def test_a_query_that_sees_nothing_gets_zeros():
    operands, options = world(40, (0, 3, 40))
    options["visible"] = options["visible"].at[0, 2].set(False)
    for kind in ("xla", "blocked"):
        out = plain(*operands, **options, implementation=kind)
        assert (out[0, 2] == 0).all() and bool(jnp.isfinite(out).all())


def test_only_used_blocks_are_read():
    """NaN in the blocks beyond the longest row would show: 0 times NaN is NaN."""
    operands, options = world(4 * blocked.BLOCK, (1, 100, blocked.BLOCK))
    spoilt = [x.at[:, :, blocked.BLOCK :].set(jnp.nan) for x in operands[3:5]]
    out = plain(*operands[:3], *spoilt, operands[5], **options, implementation="blocked")
    assert bool(jnp.isfinite(out).all())
    out = plain(*operands[:3], *spoilt, operands[5] + blocked.BLOCK, **options, implementation="blocked")
    assert not bool(jnp.isfinite(out).all())


def test_the_default_is_blocked_for_a_cache_here():
    operands, options = world(300, (0, 129, 300))
    np.testing.assert_array_equal(plain(*operands, **options), plain(*operands, **options, implementation="blocked"))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["blocked", None])
def test_all_ways_have_one_gradient(kind, window):
    """Under jit, of everything that can be differentiated: sinks, queries, own keys and values, and the cache."""
    operands, options = world(300, (0, 129, 300))

    def gradients(kind):
        run = functools.partial(plain, **options, window=window, implementation=kind)
        loss = lambda sinks, *floats: (run(*floats, operands[5], sinks=sinks) ** 2).sum()
        return jax.jit(jax.grad(loss, argnums=range(6)))(sinks() / 9, *operands[:5])

    for got, want in zip(gradients(kind), gradients("xla"), strict=True):
        assert float(jnp.abs(want).max()) > 0
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_without_a_cache_it_can_be_differentiated():
    (query, key, value, *_, length), _ = world(40, (0, 3, 40))
    loss = lambda query: tree_attention(query, key, value, None, None, length, scale=1.0).sum()
    assert bool(jnp.isfinite(jax.grad(loss)(query)).all())


@pytest.mark.parametrize("implementation", [None, "blocked"])
def test_a_cache_without_slots_is_none(implementation):
    """Attention is over the causal block alone, as a softmax by hand gives it."""
    (query, key, value, *_), _ = world(40, (0, 0, 0))
    none = jnp.zeros((*key.swapaxes(1, 2).shape[:2], 0, key.shape[-1]))
    got = tree_attention(
        query, key, value, none, none, jnp.zeros(3, jnp.int32), scale=0.5, causal=True, implementation=implementation
    )
    repeat = query.shape[2] // key.shape[2]
    scores = 0.5 * jnp.einsum("bthd,bshd->bhts", query, jnp.repeat(key, repeat, axis=2))
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None], scores, -jnp.inf))
    want = jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(value, repeat, axis=2))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("rows", "queries"), ((3, 7), (3, 1), (1, 1)))
def test_without_a_cache_queries_are_met_some_at_a_time(monkeypatch, rows, queries):
    """The last of them filled up; and the same values and gradients as of all at once. A mask is each query's and row's own,
    or one for all of them."""
    from specjax.kernels.tree_attention import api

    (query, key, value, *_, length), options = world(8, (0, 0, 0), block=7)
    options |= {"window": 4} if queries > 1 else {}
    options |= {"visible": options["visible"][:rows, :queries], "sinks": sinks(), "scale": 1.0}

    def loss(query, key, value):
        return jnp.sin(tree_attention(query, key, value, None, None, length, **options)).sum()

    found = []
    for size in (512, 3):
        monkeypatch.setattr(api, "QUERIES", size)
        found.append(jax.value_and_grad(loss, argnums=(0, 1, 2))(query, key, value))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)


@pytest.mark.slow
def test_a_decoder_writes_the_same_with_kernels():
    """Greedy, with a drafter's trees of several shapes, in one batch of ragged prompts."""
    config = llama_config(40, 32, 32, 1, 4, 2, 16, max_position_embeddings=64)
    params = LlamaLM(config).init(jax.random.key(0))
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 9)))
    lengths, limit = jnp.asarray([9, 1]), jnp.asarray([15, 7])

    keys = row_keys(0, ["a", "b"])

    @functools.partial(jax.jit, static_argnums=0)
    def generate(kind, params, lengths, limit):
        decoder = speculative(lm := LlamaLM(config, kind), PromptLookup(length=3).bind(lm))
        both = {"target": params, "draft": None}
        given = Prompts(prompts, lengths, keys, limit, SamplingArrays.make(2, temperature=0.0))
        state = decoder.init(both, given, capacity=24)
        return jax.lax.fori_loop(0, 6, lambda _, state: decoder.step(both, state)[0], state).tokens

    want = generate("xla", params, lengths, limit)
    assert len(np.unique(want[0, 9:15])) > 1
    for kind in WAYS[2:]:
        got = generate(kind, params, lengths, limit)
        np.testing.assert_array_equal(got[0, :15], want[0, :15])
        np.testing.assert_array_equal(got[1, :7], want[1, :7])


def test_a_kernel_is_mapped_over_the_ambient_mesh():
    """Rows over `data`, heads over `model`."""
    operands, options = world(100, (0, 64, 100))
    options["sinks"] = sinks()
    chips = np.array(jax.devices()[: B * K]).reshape(B, K)
    mesh = jax.sharding.Mesh(chips, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    want = plain(*operands, **options, implementation="xla")

    @jax.jit
    def mapped(*operands):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return plain(*operands, **options, implementation="pallas_gpu_interpreted")

    operands = jax.device_put(operands, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    np.testing.assert_allclose(mapped(*operands), want, rtol=1e-5, atol=1e-5)


def on(mesh, *operands, **settings):
    """Tree attention of replicated operands, traced under a mesh."""
    mesh = make_mesh(mesh)

    @jax.jit
    def mapped(*operands):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return plain(*operands, **settings)

    return mapped(*jax.device_put(operands, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())))


@pytest.mark.parametrize("way", but_slow(WAYS, "pallas_tpu_interpreted", "pallas_gpu_interpreted"))
@pytest.mark.parametrize("window", but_slow([None, 20], None))
def test_split_slots_are_seen_where_they_lie(way, window):
    """A row within one shard, one that fills all, and an empty one; a query that sees nothing; holes; a past."""
    operands, options = world(96, (9, 96, 0), past=3)
    options["visible"] = options["visible"].at[2, 1].set(False)
    options |= {"unseen": holes(96), "window": window, "sinks": sinks()}
    got = on("context=4,model=2", *operands, **options, implementation=way)
    np.testing.assert_allclose(got, reference(*operands, **options, scale=H**-0.5), rtol=1e-5, atol=1e-5)
    assert (got[2, 1] == 0).all()


def test_a_ring_is_split_too():
    """Its slots, and the tokens of a block."""
    texts = (9, 96, 500)
    operands, options = world(96, np.minimum(texts, 96), block=24)
    positions = jnp.asarray(texts)[:, None] + jnp.arange(24)[None]
    options |= {
        "query_positions": positions,
        "key_positions": positions,
        "cache_positions": ring(96, texts),
        "window": 50,
    }
    got = on("context=4,model=2", *operands, **options)
    np.testing.assert_allclose(got, reference(*operands, **options, scale=H**-0.5), rtol=1e-5, atol=1e-5)
    del options["visible"]
    got = on("context=4,model=2", *operands, **options, split=True)
    np.testing.assert_allclose(got, reference(*operands, **options, scale=H**-0.5), rtol=1e-5, atol=1e-5)


def test_distances_of_split_slots():
    """A block that could be split is not."""
    operands, options = world(96, (0, 33, 96), block=8)
    options["distances"] = distances()
    want = reference(*operands, **options, scale=H**-0.5)
    np.testing.assert_allclose(on("context=4,model=2", *operands, **options), want, rtol=1e-5, atol=1e-5)
    del options["visible"]
    got = on("context=4,model=2", *operands, **options, split=True)
    np.testing.assert_allclose(got, reference(*operands, **options, scale=H**-0.5), rtol=1e-5, atol=1e-5)


def test_scales_of_split_slots():
    (*new, cache_key, cache_value, length), options = world(64, (0, 33, 64))
    cut = lambda x: jnp.clip(x, -1e9, 1e9)
    (cache_key, key_scale), (cache_value, value_scale) = (quantised(cut(x), jnp.int8) for x in (cache_key, cache_value))
    options |= {"key_scale": key_scale, "value_scale": value_scale}
    got = on("context=8", *new, cache_key, cache_value, length, **options)
    want = reference(*new, cache_key, cache_value, length, **options, scale=H**-0.5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", but_slow([None, 20], None))
def test_a_split_block_goes_round(causal, window):
    operands, options = world(96, (9, 96, 0), block=24)
    del options["visible"]
    options |= {"causal": causal, "window": window, "unseen": holes(96), "sinks": sinks()}
    got = on("context=4,model=2", *operands, **options, split=True)
    np.testing.assert_allclose(got, reference(*operands, **options, scale=H**-0.5), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, plain(*operands, **options, split=True), rtol=1e-5, atol=1e-5)  # without a mesh


def test_a_split_block_has_no_mask():
    operands, options = world(40, (0, 3, 40))
    with pytest.raises(ValueError, match="give visible or split, not both"):
        plain(*operands, **options, split=True)
    with pytest.raises(ValueError, match="only attention with a window can read"):
        plain(*operands, **options, cache_positions=ring(40, (0, 3, 40)))


@pytest.mark.slow
def test_narrower_values_on_a_mesh_and_in_a_gradient():
    """Split slots, a split block, and a derivative, which is that of the same values before they were cut."""
    operands, options = world(160, (0, 61, 160), block=8)
    options.pop("visible")
    want = plain(*operands, **options)[..., : H - 6]
    for split in (False, True):
        got = on("context=4,model=2", *narrower(operands), **options, split=split)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    loss = lambda cut: lambda query: jnp.sin(plain(query, *cut(operands)[1:], **options)[..., : H - 6]).sum()
    got, want = (jax.grad(loss(cut))(operands[0]) for cut in (narrower, lambda operands: operands))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["pallas_tpu_interpreted", "pallas_gpu_interpreted"])
def test_kernels_refuse_narrower_values(way):
    operands, options = world(40, (0, 3, 40))
    with pytest.raises(ValueError, match="its values are as wide as its keys, not 10 and 16; choose .*'xla' or None"):
        plain(*narrower(operands), **options, implementation=way)


def test_it_can_be_mapped_over_another_axis():
    """`jax.vmap` over layers' caches, with one query for all."""
    operands, options = world(32, (0, 7, 32))
    query, key, value, *cache, length = operands
    many = [jnp.stack([x, 2 * x]) for x in cache]
    way = lambda k, v: tree_attention(query, key, value, k, v, length, **options, scale=H**-0.5, window=9)
    got = jax.jit(jax.vmap(way))(*many)
    for i in range(2):
        np.testing.assert_allclose(got[i], way(many[0][i], many[1][i]), rtol=1e-5, atol=1e-5)


def test_mapped_over_split_slots_it_exchanges_no_scores():
    """`jax.vmap` under a mesh: messages as long as the queries."""
    operands, options = world(96, (0, 7, 96))
    *new, cache_key, cache_value, length = operands
    mesh = make_mesh("context=8")
    slots = jax.sharding.NamedSharding(mesh, jax.P(None, None, None, "context"))
    many = [jax.device_put(jnp.stack([x, 2 * x]), slots) for x in (cache_key, cache_value)]
    way = lambda k, v: plain(*new, k, v, length, **options)
    with jax.set_mesh(mesh):
        program = jax.jit(jax.vmap(way)).lower(*many).compile()
    np.testing.assert_allclose(program(*many)[0], way(cache_key, cache_value), rtol=1e-5, atol=1e-5)
    assert " all-gather(" not in program.as_text()


def test_a_mesh_of_explicit_axes_is_left_to_jax():
    operands, options = world(32, (0, 7, 32))
    want = plain(*operands, **options)
    with jax.set_mesh(jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Explicit,))):
        got = plain(*operands, **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_platform_without_a_kernel_says_so():
    operands, options = world(40, (0, 3, 40))
    with pytest.raises(ValueError, match="made for TPUs and NVIDIA GPUs.*choose 'xla' or None"):
        plain(*operands, **options, implementation="pallas")


def test_bad_implementations():
    (query, key, value, *_, length), _ = world(40, (0, 3, 40))
    with pytest.raises(
        ValueError, match="no implementation 'frob'; choose 'xla', 'blocked', 'pallas', 'mosaic_gpu' or None"
    ):
        tree_attention(query, key, value, None, None, length, scale=1.0, implementation="frob")
    with pytest.raises(ValueError, match="there is none"):
        tree_attention(query, key, value, None, None, length, scale=1.0, implementation="blocked")
