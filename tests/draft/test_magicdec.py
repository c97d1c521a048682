"""MagicDec: the target drafts from few slots of its cache; which these are, and what a draft costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET, Rows, but_slow, complete, ended, params, plain
from support.shapes import changed
from support.table_lm import Table

import specjax
from specjax.assembly.registry import build_drafter
from specjax.draft import MagicDec
from specjax.draft.base import View
from specjax.draft.magicdec import MagicDraft, picking
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Model, llama_config
from specjax.models.caches import EMS
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.sampler import Sampler

ONE = LlamaLM(llama_config(24, 16, 32, 1, 4, 2, 8))
"""One layer: what it keeps of a token depends on that token alone."""


def read(lm, weights, tokens, capacity):
    """A cache with these tokens `[B, T]`."""
    block = Block(
        tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.zeros(len(tokens), jnp.int32)
    )
    cache = lm.init_cache(len(tokens), capacity)
    return lm.commit(cache, lm(weights, block, cache, wants=Wants()).delta, None, block.length)


def next_logits(lm, weights, tokens):
    block = Block(
        tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.zeros(len(tokens), jnp.int32)
    )
    return lm(weights, block, None, wants=Wants(logits=True)).logits[:, -1]


@pytest.mark.parametrize("length", but_slow([5, 8, 9, 23], 5, 8, 9))
def test_streaming_is_a_text_without_its_middle(length):
    """The root's distribution is that of the first and the newest tokens, as if these stood side by side."""
    weights = ONE.init(jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (2, length + 1), 0, 24)
    drafter = MagicDec("streaming", budget=8, sinks=3).bind(ONE)
    cache = read(ONE, weights, text[:, :length], 40)
    seen = picking.Picked(drafter._picked(None, cache, jnp.full(2, length)))
    got = ONE(
        weights, Block(text[:, -1:], jnp.full((2, 1), length), jnp.full(2, length)), seen, wants=Wants(logits=True)
    )
    short = text if length <= 8 else jnp.concatenate([text[:, :3], text[:, -6:]], axis=1)
    np.testing.assert_allclose(got.logits[:, 0], next_logits(ONE, weights, short), atol=2e-5)


def test_the_slots_are_those_that_the_last_queries_attend_to():
    """Against sums in numpy, query by query, over two heads that share keys."""
    rng, prompt, count = np.random.default_rng(0), np.array([60, 41]), 7
    key, query = rng.normal(size=(2, 2, 64, 8)), rng.normal(size=(2, 32, 2, 2, 8))
    start = prompt - 32
    positions = start[:, None] + np.arange(32)
    args = [jnp.asarray(x, jnp.float32) for x in (key, query.reshape(2, 32, 2, 16))]
    positions, prompt, start = map(jnp.asarray, (positions, prompt, start))
    got = np.asarray(picking.attended(*args, positions, prompt, start, count, 5))
    for b in range(2):
        for k in range(2):
            received = np.zeros(start[b])
            for w in range(32):
                for g in range(2):
                    scores = np.exp(key[b, k, : positions[b, w] + 1] @ query[b, w, k, g])
                    received += (scores / scores.sum())[: start[b]]
            pooled = np.convolve(received, np.ones(5) / 5, "same")
            assert set(got[b, k][got[b, k] >= 0]) == set(np.argsort(-pooled)[:count])
    short = picking.attended(*args, positions - 38, prompt - 38, jnp.maximum(start - 38, 0), count, 5)
    assert (np.asarray(short) == -1).all()


@pytest.mark.slow
def test_with_room_for_the_whole_text_all_drafts_are_taken():
    rows = Rows(((5, 9, 2, 5, 9), (7, 7, 1)), ("a", "b"), ({"temperature": 0.0}, {"temperature": 1.0}), new_tokens=24)
    for keeps in ("snapkv", "streaming"):
        got, state = complete(MagicDec(keeps, budget=64, recent=40), rows)
        assert got == plain(rows) and int(state.stats.steps.sum()) <= 14


@pytest.mark.slow
def test_windows_and_eight_bits():
    """A target with layers that see a window, in rings, and a cache in eight bits: with room for all, all drafts are taken."""
    config = changed(TARGET.config, sliding_window=4, sliding_layers=(True, False, True))
    lm = dataclasses.replace(TARGET, config=config, cache_dtype="int8")
    rows = Rows(((5, 9, 2, 5, 9), (7, 7, 1)), ("a", "b"), ({"temperature": 0.0}, {"temperature": 1.0}), new_tokens=24)
    want, _ = ended(specjax.speculative(lm).with_rings(), params("none"), rows)
    for keeps in ("snapkv", "streaming"):
        decoder = specjax.speculative(lm, MagicDec(keeps, budget=64, recent=40)).with_rings()
        got, state = ended(decoder, params("magicdec"), rows)
        assert got == want and int(state.stats.steps.sum()) <= 16


def drafting(capacity, keeps):
    """The compiled program that drafts from chosen slots, for a cache of so many slots."""
    drafter, weights = MagicDec(keeps, budget=40).bind(TARGET), TARGET.abstract()
    view = View(
        jnp.zeros((1, capacity), jnp.int32),
        jnp.full(1, capacity - 8),
        jnp.ones(1, bool),
        TARGET.init_cache(1, capacity),
        3,
    )
    slots = drafter.init({"target": weights}, 1, capacity).slots
    draft = MagicDraft(jnp.full(1, capacity // 2), jnp.ones(1, bool), slots)
    sampler = Sampler(row_keys(0, ["a"]), view.tokens, view.length, view.live, SamplingArrays.make(1), greedy=True)
    return jax.jit(drafter._tree).lower(weights, draft, view, sampler).compile()


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["snapkv", "streaming"])
def test_a_draft_does_not_read_more_of_a_longer_text(keeps):
    """All of its passes compute as much, and hold as much besides the cache, over 1,024 and over 16,384 slots."""
    short, long = (drafting(capacity, keeps) for capacity in (1024, 16384))
    assert short.cost_analysis()["flops"] == long.cost_analysis()["flops"] > 0
    held = [own.memory_analysis().temp_size_in_bytes for own in (short, long)]
    assert held[0] == held[1] > 0


def test_what_it_refuses():
    drafter, own = build_drafter("magicdec:keeps=streaming,budget=20,length=7", Model(TARGET, {}))
    assert own is None and drafter.nodes == 8 and drafter.looks_back == 0 and MagicDec().looks_back == 32
    assert MagicDec().nodes == 4
    with pytest.raises(ValueError, match="magicdec keeps snapkv or streaming, not 'all'"):
        MagicDec("all")
    with pytest.raises(ValueError, match="a budget above 32 with keeps=snapkv"):
        MagicDec(budget=32)
    with pytest.raises(ValueError, match="a budget above 16 with keeps=streaming"):
        MagicDec("streaming", budget=16)
    with pytest.raises(ValueError, match="a Table has none to read"):
        drafter.bind(Table())
    with pytest.raises(ValueError, match="and the cache EMS forgets: leave one out"):
        drafter.bind(dataclasses.replace(TARGET, old=EMS()))
