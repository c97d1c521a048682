"""EAGLE: the head's cache holds committed pairs and nothing else; a draft at depth s is what training's pass s saw."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, TARGET, but_slow, complete, params, plain, same, start
from support.steps_seen import read_pairs, read_text, row_texts, steps

import specjax
from specjax.draft import DFlash, Eagle, Eagle3
from specjax.draft.eagle3 import default_taps
from specjax.draft.head import most_frequent
from specjax.expand import Chain, TopK
from specjax.models import llama_config
from specjax.sampling import Sampler

NAMES = ("eagle2", "eagle3-top_k", "mtp", "peagle", "dflash", "clover2")


@pytest.mark.parametrize("name", but_slow(NAMES, "eagle3-top_k", "mtp", "peagle", "dflash", "clover2"))
def test_the_cache_is_a_fresh_pass_over_committed_pairs(name):
    drafter, model = DRAFTERS[name].bind(TARGET), params(name)
    _, states, _ = steps(drafter, model, 4)
    for state in (states[0], states[-1]):
        for row, text in enumerate(row_texts(state)):
            pairs = len(text) - 1
            assert int(state.draft.length[row]) == pairs
            if pairs == 0:
                continue
            h, delta = read_pairs(drafter, model, text)
            np.testing.assert_allclose(state.draft.feature[row], h[0, -1], rtol=1e-3, atol=1e-4)
            for cache, fresh in zip(state.draft.cache.key, delta.key, strict=True):
                np.testing.assert_allclose(
                    np.asarray(cache)[row, :, :pairs], fresh[0].swapaxes(0, 1), rtol=1e-3, atol=1e-4
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "fspad", "mtp"])
def test_a_draft_at_depth_s_is_pass_s_of_training(name):
    """Distributions along a drafted chain, against the unrolled passes over the text made of prompt and draft."""
    from specjax.objectives.base import Batch

    drafter = dataclasses.replace(DRAFTERS[name], expander=Chain(3)).bind(TARGET)
    model = params(name)
    decoder, states, _ = steps(drafter, model, 2)
    state, row = states[-1], 1
    view, sampler = _view(decoder, state)
    seen = []

    class Watched(type(drafter)):
        def logits(self, params, h):
            seen.append(super().logits(params, h))
            return seen[-1]

    watched = Watched(**{f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)})
    tree, dists = jax.jit(lambda *args: (watched.propose(*args).tree, tuple(seen)))(model, state.draft, view, sampler)
    text = row_texts(state)[row] + tuple(np.asarray(tree.tokens)[row, 1:].tolist())
    features = drafter.features(read_text(text, drafter.feature_wants))
    batch = Batch(jnp.asarray([text]), jnp.ones((1, len(text)), bool))
    read, reread = jax.jit(drafter.read), jax.jit(drafter.reread)
    h, past = read(model, features[:, :-1], batch.pairs(), None)
    last = len(row_texts(state)[row]) - 2  # the last committed pair
    np.testing.assert_allclose(dists[0][row, 0], drafter.logits(model, h)[0, last], rtol=1e-3, atol=1e-3)
    for s in (1, 2):
        h, delta = reread(model, jnp.pad(h[:, :-1], ((0, 0), (1, 0), (0, 0))), batch.pairs(s), None, past)
        past = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, delta)
        np.testing.assert_allclose(dists[s][row, 0], drafter.logits(model, h)[0, last + s], rtol=1e-3, atol=1e-3)


def _view(decoder, state):
    from specjax.draft import View

    view = View(state.tokens, state.length, ~state.done, state.cache, max_depth=decoder.drafter.depth)
    return view, Sampler(state.key, state.tokens, state.length, ~state.done, state.sampling)


@pytest.mark.slow
def test_only_target_features_pass_through_fc():
    """EAGLE-3's recurrent passes feed on the layer's own output: a poisoned fc must not reach them."""
    drafter, model = DRAFTERS["eagle3"].bind(TARGET), params("eagle3")
    decoder, states, _ = steps(drafter, model, 1)
    view, sampler = _view(decoder, states[-1])
    poisoned = {**model["draft"], "fc": {"kernel": jnp.full_like(model["draft"]["fc"]["kernel"], jnp.nan)}}
    propose = jax.jit(drafter.propose)
    clean = propose(model, states[-1].draft, view, sampler).tree.tokens
    got = propose({**model, "draft": poisoned}, states[-1].draft, view, sampler).tree.tokens
    np.testing.assert_array_equal(got, clean)


@pytest.mark.slow
def test_a_beam_of_one_is_the_chain():
    one = Eagle(TopK(k=1, depth=3, nodes=4))
    model = params("eagle1")
    got, beam = complete(one, model=model)
    same(got, plain())
    _, chain = complete(Eagle(Chain(3)), model=model)
    np.testing.assert_array_equal(beam.stats.accepted, chain.stats.accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", but_slow(("draft-chain", "eagle3", "medusa", "hydra-prefix"), "draft-chain", "eagle3", "hydra-prefix")
)
def test_trimmed_drafters_propose_kept_tokens_alone(name):
    drafter, model = DRAFTERS[name].bind(TARGET), params(name)
    ids = most_frequent(np.bincount(np.concatenate(plain()), minlength=96), 40)
    small, own = drafter.trimmed(model["draft"], model["target"], ids)
    own = {"target": model["target"], "draft": own}
    got, _ = complete(small, model=own)
    same(got, plain())
    decoder = specjax.speculative(TARGET, small)
    state = specjax.run(decoder, own, start(decoder, MIXED, model=own), 2)  # the program of `complete`
    view, sampler = _view(decoder, state)
    tree = jax.jit(small.propose)(own, state.draft, view, sampler).tree
    drafted = np.asarray(tree.tokens)[:, 1:][np.asarray(tree.valid)[:, 1:]]
    assert drafted.size and np.isin(drafted, ids).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", but_slow(["medusa", "draft-chain"], "draft-chain"))
def test_keeping_every_token_changes_no_draft(name):
    drafter, model = DRAFTERS[name].bind(TARGET), params(name)
    whole, own = drafter.trimmed(model["draft"], model["target"], np.arange(96))
    _, kept = complete(whole, model={"target": model["target"], "draft": own})
    _, full = complete(drafter, model=model)
    np.testing.assert_array_equal(kept.stats.accepted, full.stats.accepted)


def test_default_taps():
    assert default_taps(32) == (1, 15, 28)
    assert default_taps(8) == (1, 4, 7)
    assert default_taps(3) == (0, 1, 2)
    assert default_taps(1) == (0,)


def test_bad_heads_are_refused():
    wide = llama_config(96, 128, 64, 1, 8, 4, 8)
    with pytest.raises(ValueError, match="width 128, the target's are 64"):
        Eagle(config=wide).bind(TARGET)
    with pytest.raises(ValueError, match="increasing layers"):
        Eagle3(taps=(2, 1)).bind(TARGET)
    with pytest.raises(ValueError, match="inner must not be negative"):
        Eagle3(inner=-1).bind(TARGET)
    with pytest.raises(ValueError, match="eagle3: 6 heads are not a multiple of 4 kv_heads: choose both"):
        Eagle3(heads=6).bind(TARGET)
    with pytest.raises(ValueError, match="dflash: head_dim=5 does not fit the rope"):
        DFlash(head_dim=5).bind(TARGET)
    with pytest.raises(ValueError, match="increasing layers"):
        Eagle3(taps=(0, 3)).bind(TARGET)
