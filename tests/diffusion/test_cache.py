"""Cache policies: what they reuse, and that reusing nothing is the uncached sampler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, L, begin, caches, make, params, texts

import specjax
from specjax import diffusion
from specjax.diffusion import Dual, Fixed, Freeze, Greedy, Interval, NoCache, Prefix, Threshold, Vicinity, layerwise
from specjax.diffusion.cache import Canvas, Delayed
from specjax.kernels.tree_attention import api
from specjax.lm import Block, Wants
from specjax.state import Finish

SMALL = {"refresh": 3, "prompt": 5, "response": 3, "before": 2, "after": 2, "reach": 2, "warmup": 1}
POLICIES = caches() | caches(**SMALL) | {"freeze-window": Freeze(4), "interval-share": Interval(5, 3, 0.25)}
"""Those of the registry, with fields that matter on small canvases, and two options."""
ALWAYS = caches(refresh=1, prompt=1, response=1, warmup=99) | {"interval-share": Interval(1, 4, 1.0)}
"""Those that can be told to compute everything in every pass."""


def cached(cache, policy=None, **settings):
    return dataclasses.replace(make(policy or Fixed(2), **settings), cache=cache)


def complete(decoder, rows=range(4), **settings):
    return specjax.run(decoder, params(), begin(decoder, rows, **settings))


def test_what_can_always_be_computed_anew():
    assert set(ALWAYS) >= {"prefix", "dual", "delayed", "greedy", "interval", "vicinity"}


@pytest.mark.parametrize("name", but_slow(ALWAYS, "dual", "prefix", "greedy", "vicinity", "interval-share"))
def test_always_refreshing_is_no_cache(name):
    got, want = (complete(cached(cache)) for cache in (ALWAYS[name], NoCache()))
    assert texts(got) == texts(want)
    assert got.stats.steps.tolist() == want.stats.steps.tolist()


@pytest.mark.parametrize(
    "name",
    but_slow(
        POLICIES, "prefix", "delayed", "greedy", "freeze", "interval", "vicinity", "freeze-window", "interval-share"
    ),
)
def test_rows_do_not_see_each_other(name):
    """And all of them are filled in."""
    decoder = cached(POLICIES[name], Threshold(0.4))
    state = complete(decoder)
    apart = [text for rows in ((0, 1), (2, 3)) for text in texts(complete(decoder, rows, slots=4))[:2]]
    assert apart == texts(state)
    assert set(state.finish.tolist()) == {Finish.LENGTH} and not any(MASK in text for text in texts(state))


@pytest.mark.slow
def test_queries_are_met_some_at_a_time(monkeypatch):
    """As on long canvases: the passes that enter a block write the same."""
    decoder = cached(Prefix(), Threshold(0.4))
    monkeypatch.setattr(api, "QUERIES", 9)
    some = complete(decoder, capacity=L + 1)  # another program than that of all at once
    monkeypatch.undo()
    assert texts(some) == texts(complete(decoder))


@functools.cache
def partial_pass(size):
    """One pass that computes `active` positions of a canvas anew: logits everywhere, and the caches after it."""

    @jax.jit
    def run(tokens, active, cache, seen=size):
        at = jnp.arange(size)[None]
        visible = jnp.broadcast_to(active[None, None], (1, size, size))
        block = Block(tokens[None], at, jnp.asarray([seen]), visible, unseen=active[None], causal=False)
        output = LM(params()["target"], block, cache, wants=Wants(logits=True))
        return output.logits[0], LM.commit(cache, output.delta, None, jnp.where(active, at, size))

    return run


def oracle(prompt, limit, block, suffix, shift):
    """Fast-dLLM's loop for one row, as the paper tells it: the whole canvas once per block, then the block, or what
    follows."""
    tokens = np.full(limit, MASK)
    tokens[: len(prompt)] = prompt
    lo = len(prompt)
    while lo < limit:
        hi, cache = min(lo + block, limit), LM.init_cache(1, limit)
        entering, half = True, -(-(hi - lo) // 2)  # two passes per block, the first half of it first
        while (tokens[lo:hi] == MASK).any():
            active = np.full(limit, entering)
            active[lo : hi if suffix else limit] = True
            if shift and tokens[lo] == MASK:
                active[lo - 1] = True
            logits, cache = partial_pass(limit)(jnp.asarray(tokens), jnp.asarray(active), cache)
            logits = np.asarray(logits, np.float64)
            logits[:, MASK] = -np.inf
            blanks = [i for i in range(lo, hi) if tokens[i] == MASK]
            rows = logits[[i - shift for i in blanks]]
            dist = np.exp(rows - rows.max(1, keepdims=True))
            sure = (dist / dist.sum(1, keepdims=True)).max(1)
            first = shift and entering  # whose logits are shifted, a block's first token is committed alone
            for j in [0] if first else np.argsort(-sure, kind="stable")[: None if shift else half]:
                tokens[blanks[j]] = rows[j].argmax()
            entering = False
        lo = hi
    return tokens.tolist()


@pytest.mark.parametrize("shift", (False, pytest.param(True, marks=pytest.mark.slow)), ids=("own", "shifted"))
@pytest.mark.parametrize("cache", (Dual(), Prefix()), ids=("dual", "prefix"))
def test_fast_dllm_against_its_loop(cache, shift):
    decoder = cached(cache, Fixed(2), shift=shift)
    state = complete(decoder, rows=[0, 1, 2])
    for row in range(3):
        want = oracle(PROMPTS[row], LIMITS[row], 8, isinstance(cache, Dual), int(shift))
        assert texts(state)[row] == want


def test_the_costliest_program_writes_the_same():
    """One width for every pass, as wide as any: what a plan compiles."""
    decoder = cached(Prefix(), Fixed(2))
    one, usual = (complete(each, rows=[0, 1, 2]) for each in (decoder.costliest, decoder))
    assert texts(one) == texts(usual) and one.stats.steps.tolist() == usual.stats.steps.tolist()
    with pytest.raises(ValueError, match="growth must be 0 or at least 2, got 1"):
        dataclasses.replace(decoder, growth=1).checked()


@pytest.mark.slow
def test_a_pass_over_everything_writes_the_caches_of_a_fresh_pass():
    decoder = cached(Dual(), Fixed(2))
    before = begin(decoder)
    tokens = before.tokens
    after = jax.jit(decoder.step)(params(), before)[0]
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    visible = (at < before.limit[:, None])[:, None]
    block = Block(tokens, at, jnp.zeros(4, jnp.int32), visible, causal=False)
    fresh = LM(params()["target"], block, None, wants=Wants()).delta
    for layer in range(LM.num_layers):
        np.testing.assert_allclose(after.cache.key[layer], fresh.key[layer].swapaxes(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("together", (1, 2 * 32, 5 * 32))
def test_rows_that_ask_for_everything_are_read_apart(monkeypatch, together):
    """One by one, two at a time (of three: a place is left) or all at once; another row reads a part, and one nothing."""
    monkeypatch.setattr(diffusion.partial_pass, "TOGETHER", together)
    tokens = jax.random.randint(jax.random.key(0), (5, 1, 32), 0, MASK)
    seen = jnp.asarray([20, 20, 32, 7, 26])
    wide = jnp.asarray([True, False, True, False, True])
    at = jnp.arange(32)[None]
    active = jnp.where(wide[:, None], at < seen[:, None], (at > 9) & (at < 14) & (jnp.arange(5) == 1)[:, None])[:, None]
    source = jnp.broadcast_to(jnp.arange(10, 14), (5, 4))
    weights = params()["target"]
    whole = jax.jit(functools.partial(diffusion.partial_pass.read_whole, LM))
    old = whole(weights, jnp.flip(tokens[:, 0], 1), seen)
    cache = LM.commit(LM.init_cache(5, 32), old.delta, None, jnp.zeros(5, jnp.int32))
    read = jax.jit(lambda *given: diffusion.partial_pass.read_drafts(LM, weights, *given, sizes=(9, 32), wide=wide))
    features, after = read(cache, tokens, active, seen, source)

    fresh = whole(weights, tokens[:, 0], seen)
    np.testing.assert_allclose(features[wide][:, 0], fresh.final[wide][:, 10:14], rtol=1e-4, atol=1e-4)
    want = LM.commit(cache, fresh.delta, None, jnp.where(wide[:, None], at, 32))
    for row in (0, 2, 3, 4):
        for got, kept in zip(jax.tree.leaves(after), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got[row, :, : seen[row]], kept[row, :, : seen[row]], rtol=1e-4, atol=1e-4)
    alone = partial_pass(32)(tokens[1, 0], active[1, 0], jax.tree.map(lambda leaf: leaf[1:2], cache), 20)
    logits = LM.unembed(weights, features[1:2, 0])[0]
    np.testing.assert_allclose(logits, alone[0][10:14], rtol=1e-4, atol=1e-4)
    for got, kept in zip(jax.tree.leaves(after), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_allclose(got[1], kept[0], rtol=1e-4, atol=1e-4)


def canvas(**changes):
    """Twelve positions: a prompt of three, blocks of four, the first of them half done."""
    masked = jnp.asarray([[0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0]], bool)
    fields = dict(
        masked=masked, fresh=jnp.zeros((1, 12), bool).at[0, 6].set(True),
        inside=jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]], bool), prompt_length=jnp.asarray([3]),
        start=jnp.asarray([3]), step=jnp.asarray([2]), passes=jnp.asarray([2]), reach=jnp.asarray([7]), width=4,
    )  # fmt: skip
    return Canvas(**(fields | changes))


@pytest.mark.parametrize(
    ("cache", "want"),
    (
        (Dual(), "000111100000"), (Prefix(), "000111111111"), (Delayed(), "000011111110"),
        (Greedy(8, 1), "000011110000"), (Freeze(), "000111111111"), (Freeze(2), "000111111000"),
        (Interval(9, 9), "000111100000"), (Interval(9, 2), "000111111111"), (Interval(2, 9), "111111100000"),
        (Interval(9, 9, 0.5), "000000000000"), (Interval(9, 2, 0.5), "000111111111"),
        (Vicinity(1, 2, 1), "001111111000"), (NoCache(), "111111111111"),
    ),
    ids=str,
)  # fmt: skip
def test_what_is_computed_anew(cache, want):
    assert "".join(str(int(x)) for x in cache.active(canvas())[0]) == want


@pytest.mark.parametrize(("reach", "want"), ((0, "000010101000"), (1, "000011111000"), (2, "000011111110")))
def test_what_comes_next_and_its_nearest_open_neighbours(reach, want):
    """Of 8 the neighbours 7 and 9 are nearest; then of 4 there are 5, and far away 10."""
    plan = jnp.full((1, 12), 12).at[0, 8].set(0).at[0, 4].set(1)
    assert "".join(str(int(x)) for x in Greedy(8, reach).active(canvas(plan=plan))[0]) == want


def test_each_layer_computes_what_moved_most():
    """Where one token changed and one position is to be chosen, it is that one, in every layer; all else is as it was."""
    tokens = jnp.asarray([[3, 1, 4, MASK, 7, MASK, MASK, 2, MASK, MASK, MASK, MASK]])
    new, seen = jnp.arange(12)[None] >= 3, jnp.asarray([12])
    pass_over = jax.jit(lambda kept, tokens, must: layerwise.read_by_layer(
        LM, params()["target"], kept, tokens, must, new, 0.12, seen
    ))  # fmt: skip
    blank = layerwise.begin(LM, params()["target"], 1, 12, jnp.float32)
    before, kept = pass_over(blank, tokens, new | True)
    features, after = pass_over(kept, tokens.at[0, 5].set(9), new & False)
    moved = lambda a, b: np.flatnonzero(np.abs(np.asarray(a - b)).max(axis=-1).reshape(-1, 12).max(axis=0) > 1e-6)
    assert moved(before, features).tolist() == [5]
    for layer in range(LM.num_layers):
        for leaf in (lambda kept: kept.kv.key, lambda kept: kept.kv.value, lambda kept: kept.added):
            assert moved(leaf(kept)[layer], leaf(after)[layer]).tolist() == [5]


@pytest.mark.parametrize(
    ("kind", "fields"),
    (
        (Dual, (-1,)),
        (Prefix, (-1,)),
        (Delayed, (0,)),
        (Greedy, (2, -1)),
        (Freeze, (-5,)),
        (Interval, (0,)),
        (Interval, (1, 1, 2.0)),
        (Vicinity, (-1,)),
    ),
)
def test_fields_out_of_range(kind, fields):
    with pytest.raises(ValueError, match="at least|>="):
        kind(*fields)


def test_entering_a_block_freezes_the_one_before():
    entering = canvas(start=jnp.asarray([7]), step=jnp.asarray([0]))
    assert "".join(str(int(x)) for x in Freeze().active(entering)[0]) == "000111111111"
    assert bool(Dual().active(entering).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_add_up_as_in_a_whole_pass(dtype):
    """In the type in which layers add up, whatever that of the weights: what is kept is not rounded on the way."""
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params()["target"])
    tokens = jnp.arange(20, dtype=jnp.int32)[None] % MASK
    everywhere = jnp.ones((1, 20), bool)
    kept = layerwise.begin(LM, weights, 1, 20, "float32")
    features, after = layerwise.read_by_layer(
        LM, weights, kept, tokens, everywhere, everywhere, 0.25, jnp.asarray([20])
    )
    block = Block(tokens, jnp.arange(20, dtype=jnp.int32)[None], jnp.asarray([0]), causal=False)
    whole = lambda weights: LM(weights, block, None, wants=Wants(final=True)).final
    exact = whole(jax.tree.map(lambda leaf: leaf.astype("float32"), weights))
    error = lambda found: float(jnp.abs(found.astype(jnp.float32) - exact).max())
    assert [leaf.dtype for leaf in after.added] == [leaf.dtype for leaf in kept.added]
    assert features.dtype == whole(weights).dtype and error(whole(weights)) < 1e-5 and error(features) < 1e-5
