"""Drafts of the target itself from a smaller cache: nearly all are taken, and there are two caches."""

import dataclasses

import jax.numpy as jnp
import pytest
from support.conformance import TARGET, Rows, complete, plain
from support.table_lm import Table

import specjax
from specjax.assembly.registry import build_drafter
from specjax.draft import SmallCache
from specjax.expand import Chain
from specjax.models.caches import EMS

ROWS = Rows(((5, 9, 2, 5, 9), (7, 7, 1)), ("a", "b"), ({"temperature": 0.0}, {"temperature": 1.0}), new_tokens=32)


@pytest.mark.slow
def test_most_drafts_are_taken():
    """Of three per step nearly all: 16 steps are the fewest for two texts of 32 tokens. The text is the whole
    cache's."""
    got, state = complete(SmallCache(expander=Chain(3)), ROWS)
    assert got == plain(ROWS) and 16 <= int(state.stats.steps.sum()) <= 20
    assert state.draft.cache.key[0].values.dtype == jnp.int8 and state.cache.key[0].dtype == jnp.float32


def test_what_it_is_for():
    drafter, params = build_drafter("small_cache:cache_dtype=float8_e4m3fn,length=5", specjax.models.Model(TARGET, {}))
    assert params is None and drafter.nodes == 6 and drafter.bind(TARGET).target.cache_dtype == "float8_e4m3fn"
    rings = dataclasses.replace(TARGET, ahead=8)
    assert drafter.bind(rings).target.ahead is None
    with pytest.raises(ValueError, match="needs a second kind of cache for its target, and a Table has only one"):
        drafter.bind(Table())
    with pytest.raises(ValueError, match="unknown cache_dtype 'int2'"):
        SmallCache("int2").bind(TARGET)
    with pytest.raises(ValueError, match="both have a cache in int8"):
        SmallCache("int8").bind(dataclasses.replace(TARGET, cache_dtype="int8"))
    with pytest.raises(ValueError, match="and the cache EMS forgets: leave one out"):
        SmallCache().bind(dataclasses.replace(TARGET, old=EMS()))
