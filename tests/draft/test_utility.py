"""Cascade's utility: how many experts a step reads, by enumeration, and what is drafted for them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, DRAFT, MIXED, MODELS, TARGET, params, plain, same, start, texts

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft import Goodput, ModelDrafter, PromptLookup, Utility, adaptive
from specjax.expand import Chain
from specjax.models import ExpertsConfig

LENGTHS, NO_CONTEXT = (0, 1, 2, 4, 8), 0


def best(rule, rate, batch=1):
    return int(rule.best(jnp.full((batch,), rate), jnp.ones((batch,), bool), NO_CONTEXT, LENGTHS))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_distinct_experts_are_those_of_all_choices(tokens):
    """Every token chooses two of four experts, all pairs alike."""
    pairs = list(itertools.combinations(range(4), 2))
    every = [len(set().union(*found)) for found in itertools.product(pairs, repeat=tokens)]
    got = float(Utility(experts=4, chosen=2).distinct(jnp.asarray(tokens)))
    np.testing.assert_allclose(got, np.mean(every), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_experts_that_all_tokens_share_leave_goodputs_choice(rate):
    for batch in (1, 4, 16):
        rule = Utility(draft=0.25, token=0.05, share=0.7, overlap=1.0, experts=16, chosen=2)
        other = Goodput(0.25, 0.0, 1.0 - 0.05 * batch, 0.0, 0.05)
        rates, live = jnp.full((batch,), rate), jnp.ones((batch,), bool)
        assert best(rule, rate, batch) == int(other.best(rates, live, NO_CONTEXT, LENGTHS))
        assert best(Utility(draft=0.25, token=0.05), rate, batch) == best(rule, rate, batch)  # as without experts


def test_it_is_off_where_nothing_pays():
    """A token of many experts reads others than its neighbours do. Then drafting costs about as much as it saves."""
    rule = Utility(draft=0.0, token=0.0, share=1.0, experts=1 << 20, chosen=1)
    lengths = (0, 1, 2)
    assert best(rule, 0.0) == 0
    utility = rule.pays(jnp.asarray([0.0]), jnp.asarray([True]), NO_CONTEXT, lengths)
    np.testing.assert_allclose(utility, [1, 1 / 2, 1 / 3], rtol=1e-2)
    few, many = (Utility(draft=0.1, token=0.0, share=0.9, experts=experts, chosen=2) for experts in (8, 256))
    assert best(few, 0.8) > best(many, 0.8) == 0
    assert best(many, 0.8, 256) > 0  # a batch that reads every expert anyway reads no more for its drafts


def test_it_is_the_maximum_of_utility_over_live_rows():
    rule = Utility(draft=0.1, token=0.02, share=0.5, overlap=0.25, experts=32, chosen=4)
    rates, live = np.asarray([0.9, 0.2, 0.8, 0.5], np.float32), np.asarray([True, True, True, False])
    distinct = lambda n: 32 * (1 - (28 / 32) ** (1 + 0.75 * (n - 1)))

    def utility(k):
        tokens = sum(sum(a**i for i in range(k + 1)) for a in rates[live].tolist()) / 3
        return tokens / (k * (0.1 + 0.02 * 4) + 0.5 + 0.5 * distinct(4 * (k + 1)) / distinct(4))

    found = rule.pays(jnp.asarray(rates), jnp.asarray(live), NO_CONTEXT, LENGTHS)
    np.testing.assert_allclose(found, [utility(k) for k in LENGTHS], rtol=1e-5)
    assert int(rule.best(jnp.asarray(rates), jnp.asarray(live), NO_CONTEXT, LENGTHS)) == max(LENGTHS, key=utility)


def test_the_targets_experts_are_read_from_it():
    bound = adaptive(PromptLookup(3), Utility()).bind(MODELS["experts"]).rule
    own = next(one.feed for one in MODELS["experts"].config.layers if isinstance(one.feed, ExpertsConfig))
    assert (bound.experts, bound.chosen) == (own.num_experts, own.num_experts_per_tok) == (4, 2)
    assert adaptive(ModelDrafter(DRAFT, Chain(1)), Utility(), 2).bind(TARGET).rule == Utility()
    assert CONFIG == TARGET.config and Utility(experts=9, chosen=3).for_target(MODELS["experts"]).experts == 9


@pytest.mark.slow
def test_the_text_is_plain_decodings():
    decoder = specjax.speculative(TARGET, adaptive(ModelDrafter(DRAFT), Utility(experts=16, chosen=2, draft=0.05), 2))
    model = {**params("draft-chain"), "draft": {"drafter": params("draft-chain")["draft"], "rule": None}}
    state = decoding.run(decoder, model, start(decoder, MIXED, model=model))
    same(texts(state), plain())
    assert np.asarray(state.stats.accepted)[:, 1:].sum()


def test_lines_and_bad_input():
    made = parse("drafter", DRAFTERS, "draft:model=tiny-draft,rule=utility,length=4,experts=64,chosen=8")
    assert (made.rule, made.length) == (Utility(experts=64, chosen=8), 4)
    for wrong in ({"share": 2.0}, {"overlap": -1.0}, {"chosen": 2}, {"experts": 8}, {"prior": 1.0}, {"draft": -1.0}):
        with pytest.raises(ValueError, match="utility needs"):
            Utility(**wrong)
