"""Cache policies of autoregressive models: what is folded and when, what the cards ask of each, and texts over drafters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, TARGET, but_slow, ended, params, plain, same, start
from support.conformance import Rows as Batch
from support.shapes import changed

import specjax
from specjax import models
from specjax.assembly.registry import OLDS, make_old
from specjax.decode import Plain, Speculate
from specjax.models.caches import EMS, GEAR, Layer, OldCache, SpAtten
from specjax.models.kv import KVDelta
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh

B, K, G, H = 2, 2, 2, 4
RNG = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
LONG = Batch(
    tuple(tuple(RNG.integers(1, 96, n).tolist()) for n in (33, 3, 20)),
    ("a", "b", "c"),
    ({}, {}, {"temperature": 0.7}),
    24,
)


def chunk_of(size, ring=24):
    """A layer's chunk, which is the first of its ring; all of the ring is seen by as many queries."""
    keys = draw(B, K, ring, H)
    positions = jnp.broadcast_to(jnp.arange(size), (B, size))
    query, seen, fresh = draw(B, K, size, G, H), jnp.ones((B, size, ring), bool), jnp.ones((B, size), bool)
    value = draw(B, K, size, H)
    ring_value = jnp.concatenate([value, draw(B, K, ring - size, H)], axis=2)
    return Layer(keys[:, :, :size], value, keys, ring_value, query, seen, fresh, positions)


def body_of(policy):
    config = changed(TARGET.config, num_attention_heads=K * G, num_key_value_heads=K, head_dim=H)
    return policy.init(config, 0, B, 64, jnp.float32)


@pytest.mark.slow
def test_what_is_folded_is_committed_and_the_newest_are_exact():
    """Commits that write more than is then kept: the ring holds every position after the bodies, none of them
    rejected."""
    policy = EMS(4, 3, budget=9)
    lm = dataclasses.replace(TARGET, old=policy, ahead=5)
    commit = jax.jit(lm.commit, static_argnums=2)
    cache, length, text = lm.init_cache(2, 64), np.zeros(2, int), [{}, {}]
    shape = (2, 5, TARGET.config.near.num_key_value_heads, TARGET.config.near.head_dim)
    for _ in range(30):
        new = np.asarray(RNG.normal(size=shape), np.float32)
        query = (jnp.zeros((2, 5, shape[2], 2 * shape[3])),) * 3
        delta = KVDelta((jnp.asarray(new),) * 3, (jnp.asarray(new),) * 3, jnp.zeros((2, 5), jnp.int32), query)
        cache = commit(cache, delta, None, jnp.asarray(length))
        taken = RNG.integers(0, 6, 2)
        for row in range(2):
            text[row] |= {int(length[row]) + i: new[row, i] for i in range(taken[row])}
        length = length + taken
        seen = cache.layer(1, jnp.asarray(length))
        for row, folded in enumerate(np.asarray(cache.folded)):
            held = np.flatnonzero(~np.asarray(seen.unseen[row, 9:]))
            assert len(held) == length[row] - folded and (folded % 3 == 0) and folded <= max(length[row] - 4, 0)
            for position in range(folded, length[row]):
                np.testing.assert_array_equal(seen.key[row, :, 9 + position % 12], text[row][position])
    assert length.min() > 40 and (np.asarray(cache.folded) > 30).all()


@pytest.mark.slow
def test_ems_keeps_everything_while_there_is_room():
    policy, layer = EMS(chunk=4, budget=12), chunk_of(4)
    body = body_of(policy)
    for i in range(3):
        body = policy.fold((body,), (layer,), jnp.full((B,), 4 * i))[0]
        np.testing.assert_array_equal(body.key[:, :, 4 * i : 4 * i + 4], layer.key)
        np.testing.assert_array_equal(policy.read(body, jnp.full((B,), 4 * i + 4))[2].sum(axis=1), 4 * i + 4)


@pytest.mark.parametrize("threshold", (1.0, -1.0), ids=("evicts", "merges"))
def test_ems_evicts_or_merges(threshold):
    """A threshold of 1 evicts all that is not kept, which is then what came, bit by bit; one of -1 none, and the values
    weighted by their scores add up to what they did."""
    policy = EMS(chunk=4, budget=8, threshold=threshold)
    body, came = body_of(policy), []
    for i in range(3):
        layer = chunk_of(4)
        before, body = body, policy.fold((body,), (layer,), jnp.full((B,), 4 * i))[0]
        came.append(layer.key)
    every = np.asarray(jnp.concatenate(came, axis=2))
    whole = [[key.tolist() in every[b, k].tolist() for key in np.asarray(body.key[b, k])] for b, k in np.ndindex(B, K)]
    assert np.all(whole) if threshold == 1 else not np.all(whole)
    scores = layer.attention(before.key, jnp.ones((B, 8), bool)).sum(axis=2).at[:, :, :8].add(before.score)
    mass, every = scores.sum(axis=2), jnp.concatenate([before.value, layer.value], axis=2)
    values = (scores[..., None] * every).sum(axis=2)
    if threshold == -1:
        np.testing.assert_allclose(body.score.sum(axis=2), mass, rtol=1e-5)
        np.testing.assert_allclose((body.score[..., None] * body.value).sum(axis=2), values, rtol=1e-4, atol=1e-5)
    else:
        assert (body.score.sum(axis=2) < mass - 1e-3).all()


def test_each_layer_has_the_budget_that_is_its_own():
    """A layer keeps what it would if all had its budget, in arrays of that size."""
    policy, sizes = EMS(chunk=4, budgets=(4, 12, 8)), (4, 12, 8)
    config = changed(TARGET.config, num_attention_heads=K * G, num_key_value_heads=K, head_dim=H)
    bodies = tuple(policy.init(config, i, B, 64, jnp.float32) for i in range(3))
    alone = [body_of(EMS(chunk=4, budget=size)) for size in sizes]
    for i in range(4):
        layers, folded = tuple(chunk_of(4) for _ in sizes), jnp.full((B,), 4 * i)
        bodies = policy.fold(bodies, layers, folded)
        for at, (size, layer) in enumerate(zip(sizes, layers, strict=True)):
            alone[at] = EMS(chunk=4, budget=size).fold((alone[at],), (layer,), folded)[0]
    assert [body.key.shape[2] for body in bodies] == list(sizes)
    assert [body.score.shape[2] for body in bodies] == list(sizes)
    for body, want in zip(bodies, alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, body, want)


@pytest.mark.slow
def test_budgets_of_layers_take_the_memory_that_they_say():
    """And equal ones write the text of one budget; unequal ones another."""
    assert written(EMS(4, 4, budgets=(8, 8, 8)), "none")[0] == written(EMS(4, 4, budget=8), "none")[0]
    got, state = written(EMS(4, 4, budgets=(4, 8, 12)), "none")
    assert got != plain(LONG)
    assert [body.key.shape[2] for body in state.cache.bodies] == [4, 8, 12]


def test_ems_keeps_what_queries_look_at():
    """Of equal keys but two, which all queries ask for, those two stay while others come and go."""
    policy = EMS(chunk=4, budget=4, threshold=1.0, pool=1)
    body, mark = body_of(policy), jnp.eye(H)[0] * 8.0
    for i in range(4):
        layer = chunk_of(4)
        key = layer.key * 0.1
        key = key.at[:, :, 1:3].set(mark) if i == 0 else key
        ring = jnp.concatenate([key, layer.ring[:, :, 4:] * 0.1], axis=2)
        layer = dataclasses.replace(layer, key=key, ring=ring, query=jnp.broadcast_to(mark, layer.query.shape))
        body = policy.fold((body,), (layer,), jnp.full((B,), 4 * i))[0]
    assert (np.isclose(np.asarray(body.key), np.asarray(mark)).all(axis=-1).sum(axis=2) == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("axis", (2, 3), ids=("by channel", "by token"))
def test_gear_restores_a_chunk(axis):
    """Sixteen bits are exact but for rounding; a rank makes the error less, a higher one less again, of all ranks none is left;
    outliers, whatever else there is, come back as they are."""
    x = (draw(B, K, 16, 8) * 0.1).at[0, 1, 3, 2].set(4.0)
    norm = lambda x: float(jnp.linalg.norm(x))
    for bits in (2, 4, 8, 16):
        errors = []
        for rank in (0, 2, 4, 8):
            policy = GEAR(chunk=16, bits=bits, rank=rank)
            part = policy.packed(x, axis)
            assert part.codes.shape == (B, K, 16, 8 * min(bits, 8) // 8) and part.codes.dtype.itemsize == 1 + (
                bits == 16
            )
            back = policy.restored(part, axis)
            exact = [jnp.take_along_axis(y, part.places.astype(int), axis=axis) for y in (x, back)]
            np.testing.assert_array_equal(*exact)
            assert part.places.shape[axis] == 2 and back[0, 1, 3, 2] == 4.0
            errors.append(norm(back - x) / norm(x))
        assert errors == sorted(errors, reverse=True) and errors[1] < 0.8 * errors[0]
        assert errors[3] < 1e-3 * errors[0] and (bits != 16 or errors[0] < 1e-5)
    bare = GEAR(chunk=16, outliers=0.0)
    assert bare.packed(x, axis).values.size == 0
    off = lambda policy: norm(policy.restored(policy.packed(x, axis), axis) - x)
    assert off(bare) > 1.3 * off(GEAR(chunk=16))


@pytest.mark.slow
def test_spatten_forgets_in_a_cascade():
    """What layers keep is nested, and as many as they are to; the first tokens stay; the others are the most important of those
    that the layer below has, by a count in Python."""
    policy = SpAtten(chunk=4, important=12, last=6, start=2)
    config = changed(TARGET.config, num_hidden_layers=3, num_attention_heads=K * G, num_key_value_heads=K, head_dim=H)
    bodies, totals = tuple(policy.init(config, i, B, 64, jnp.float32) for i in range(3)), [{}, {}, {}]
    assert [body.key.shape[2] for body in bodies] == [12, 9, 6]
    for step in range(6):
        layers = [chunk_of(4) for _ in range(3)]
        layers = tuple(
            dataclasses.replace(x, positions=4 * step + x.positions, ring=jnp.roll(x.ring, 4 * step, axis=2))
            for x in layers
        )
        wanted, below, fresh = [], None, {}
        for i, (body, layer) in enumerate(zip(bodies, layers, strict=True)):
            received = layer.attention(body.key, body.positions >= 0)[0].sum(axis=(0, 1))
            held = [*body.positions[0], *layer.positions[0]]
            own = {int(p): float(x) for p, x in zip(held, received, strict=True) if p >= 0}
            fresh = {p: x + fresh.get(p, 0.0) for p, x in own.items() if below is None or p in below}
            totals[i] = {p: totals[i].get(p, 0.0) + x for p, x in fresh.items()}
            below = set(sorted(totals[i], key=lambda p, i=i: (p >= 2, -totals[i][p]))[: body.key.shape[2]])
            wanted.append(below)
        bodies = policy.fold(bodies, layers, jnp.full((B,), 4 * step))
        for body, want, layer in zip(bodies, wanted, layers, strict=True):
            held = [int(p) for p in body.positions[0]]
            assert {p for p in held if p >= 0} == want
            for slot in (slot for slot, p in enumerate(held) if p >= 4 * step):
                np.testing.assert_array_equal(body.key[0, :, slot], layer.key[0, :, held[slot] - 4 * step])
    held = [{int(p) for p in body.positions[1]} for body in bodies]
    assert held[2] < held[1] < held[0] and {0, 1} <= held[2] and [len(x) for x in held] == [12, 9, 6]


def written(policy, name, mesh=None):
    """Texts of a drafter of the table over such a cache, and the final state."""
    decoder = specjax.speculative(dataclasses.replace(TARGET, old=policy, ahead=16), DRAFTERS[name], mesh=mesh)
    return ended(decoder, params(name), LONG)


WHOLE = {
    "ems": EMS(4, 4, budget=64),
    "gear": GEAR(4, 4, rank=4, prefill_rank=TARGET.config.near.head_dim, outliers=0.5),
    "spatten": SpAtten(4, 4, 64, 64),
}
"""They lose nothing here: two have room for all, and what GEAR keeps of errors has their full rank."""
LINES = [("ems", "draft-static"), ("gear", "none"), ("spatten", "kangaroo")]


@pytest.mark.slow
@pytest.mark.parametrize("line", but_slow(LINES, ("gear", "none"), ("spatten", "kangaroo")), ids="-".join)
def test_what_loses_nothing_writes_the_whole_caches_text(line):
    policy, name = line
    got, state = written(WHOLE[policy], name)
    same(got, plain(LONG))
    assert int(state.cache.folded.min()) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(WHOLE))
def test_layers_with_windows_keep_theirs(policy):
    """Beside a layer that sees the whole text: windows of more and of fewer tokens than the ring has besides."""
    for window in (4, 30):
        lm = dataclasses.replace(
            TARGET, config=changed(TARGET.config, sliding_window=window, sliding_layers=(True, False, True))
        )
        want, _ = ended(specjax.speculative(lm), params("none"), LONG)
        old = dataclasses.replace(lm, old=WHOLE[policy], ahead=16)
        got, state = ended(specjax.speculative(old, DRAFTERS["prompt_lookup"]), params("prompt_lookup"), LONG)
        same(got, want)
        assert int(state.cache.folded.min()) >= 16 and [body is None for body in state.cache.bodies] == [
            True,
            False,
            True,
        ]


LOSSY = {
    "ems": EMS(4, 4, budget=8),
    "gear": GEAR(4, 4, bits=2, rank=0, prefill_rank=0, outliers=0.0),
    "spatten": SpAtten(4, 4, 8, 4, start=2),
    "spatten whole": SpAtten(4, 4, 8, 4, start=2, heads=0.5, values=0.5, bits=4, more=2, threshold=0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", but_slow(LOSSY, "ems", "spatten"))
def test_a_text_does_not_depend_on_those_beside_it(name):
    """Prompts of which the last token begins a chunk, and others, beside a longer one and beside none that is."""
    decoder = specjax.speculative(dataclasses.replace(TARGET, old=LOSSY[name])).with_rings()
    rows = Batch((*(LONG.prompts[0][:n] for n in (21, 17, 18)), LONG.prompts[0]), tuple("abcd"), ({},) * 4, 16)
    short = dataclasses.replace(rows, prompts=(*rows.prompts[:3], rows.prompts[0]))
    for each in (rows, short):
        assert start(decoder, each, model=params("none")).cache.folded.tolist()[:3] == [16, 12, 12]
    want, got = (ended(decoder, params("none"), each)[0][:3] for each in (rows, short))
    assert got == want


@pytest.mark.slow
def test_a_small_budget_is_lossy_and_drafts_still_help():
    """On a mesh of heads and slots the text is that of one device."""
    want, alone = written(EMS(4, 4, budget=8), "none")
    got, state = written(EMS(4, 4, budget=8), "draft-static")
    assert want != plain(LONG) and all(len(text) == 24 for text in (*want, *got))
    assert written(EMS(4, 4, budget=8), "none", make_mesh("model=2,context=2", jax.devices()[:4]))[0] == want
    assert int(state.stats.steps.sum()) < 0.9 * int(alone.stats.steps.sum())


def test_who_may_have_one():
    assert make_old("ems:budget=64,threshold=0.5") == EMS(budget=64, threshold=0.5) and "ems" in OLDS
    engine = Engine("tiny", decode=Plain(cache="ems:budget=64,chunk=16"))
    assert engine.decoder.target.old == EMS(chunk=16, budget=64) and engine.decoder.target.ahead == 1
    assert engine.model.lm.old is None  # prompts are scored by the whole cache
    for plan, error in (
        ("beam:cache=ems", "decode 'beam' has no field 'cache'"),
        ("plain:cache=prefix", "unknown cache of an autoregressive model 'prefix'; choose ems, gear, spatten"),
        ("plain:cache=ems,steer=(guidance:scale=2)", "EMS is for plain caches of models .* not of a "),
        ("plain:cache=(ems:budget=65)", "ems needs a chunk of at least 1, a budget of some chunks"),
        ("plain:cache=(ems:pool=4)", "and an odd pool, got"),
        ("plain:cache=(ems:budgets=64 33)", "ems needs a chunk of at least 1, a budget of some chunks"),
        ("plain:cache=(ems:budgets=64 32)", "ems: budgets has 2 numbers, and 8 layers of the model keep older tokens"),
    ):
        with pytest.raises(ValueError, match=error):
            Engine(engine.model, plan)
    with pytest.raises(ValueError, match="EMS is for plain caches of models .* not in int8"):
        Engine(models.load(engine.model, cache_dtype="int8"), Plain(cache="ems"))
    windows = changed(TARGET.config, sliding_window=4, sliding_layers=(True, True, True))
    narrow = TARGET.config.every(models.AttentionConfig, v_head_dim=4)
    forgetful = dataclasses.replace(TARGET, old=EMS())
    for make, error in (
        (lambda: dataclasses.replace(forgetful, config=windows), "has no layer that sees the whole text"),
        (lambda: dataclasses.replace(forgetful, config=narrow), "values of another width than keys"),
        (lambda: forgetful.init_cache(1, 64), "goes back in a text"),
        (
            lambda: GEAR(bits=2).init(changed(TARGET.config, head_dim=6), 0, 1, 64, jnp.float32),
            "a head's 6 numbers",
        ),
        (
            lambda: GEAR(prefill_rank=9).init(changed(TARGET.config, head_dim=8), 0, 1, 64, jnp.float32),
            "gear's ranks 2 and 9 .* choose lower ranks",
        ),
        (lambda: GEAR(prefill_rank=-1), "ranks >= 0"),
        (
            lambda: specjax.speculative(forgetful).empty({"target": {}}, 1, 64, jnp.float32),
            r"EMS forgets.*with_rings\(\)",
        ),
        (
            lambda: Engine(engine.model, decode=Speculate("swift:first=true", cache="ems")),
            "the drafter Swift reads all of .* EMS forgets",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            make()
    swift = Engine(engine.model, decode=Speculate("swift", cache="ems")).decoder
    assert swift._width(400) == 224 > swift.target.ahead == swift.drafter.depth + 1 + swift.drafter.looks_back
    assert isinstance(
        jax.eval_shape(lambda: dataclasses.replace(TARGET, old=EMS(), ahead=4).init_cache(1, 64)), OldCache
    )
