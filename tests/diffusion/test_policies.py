"""Every further unmask policy against its oracle, and what each of them promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, forward, make, params, texts, uniform_of

import specjax
from specjax.diffusion import (
    Credit,
    Dream,
    EndOfText,
    EntropyBudget,
    Factor,
    Fixed,
    FreeDave,
    Hierarchy,
    Prophet,
    Redo,
    RunningConfidence,
    SlowFast,
    Threshold,
)  # fmt: skip
from specjax.diffusion.unmask import Guess
from specjax.reference import diffusion as oracle
from specjax.state import Finish


class Seeing(SlowFast):
    """A `SlowFast` whose passes see the whole canvas, as the oracle's do."""

    def sees(self, memory):
        return None


ORACLES = {
    "credit": lambda: (Credit(Threshold(0.6)), oracle.credit(oracle.threshold(0.6), 0.7, 0.8, 0.2)),
    "prophet": lambda: (Prophet(Fixed(), 3.0, 1.5, 0.8), oracle.prophet(oracle.fixed(0, "low_confidence"), 3.0, 1.5, 0.8)),
    "hierarchy": lambda: (Hierarchy(0.7, 0.3), oracle.hierarchy(0.7, 0.3)),
    "slow_fast": lambda: (Seeing(2, 0.3, 1.0, 0.4), oracle.slow_fast(2, 0.3, 1.0, 0.4)),
    "dream-origin": lambda: (Dream(5), oracle.dream(5, "origin", 1e-3)),
    "dream-entropy": lambda: (Dream(3, "entropy"), oracle.dream(3, "entropy", 1e-3)),
    "dream-drawn": lambda: (Dream(3, "entropy", alg_temp=0.3), oracle.dream(3, "entropy", 1e-3, 0.3)),
    "dream-margin": lambda: (Dream(12, "margin"), oracle.dream(12, "margin", 1e-3)),
    "dream-threshold": lambda: (Dream(3, "threshold", threshold=0.5), oracle.dream_threshold(3, 0.5)),
    "threshold-least": lambda: (Threshold(0.6, 4), oracle.threshold(0.6, 4)),
    "factor-published": lambda: (Factor(0.7, published=True), oracle.factor(0.7, published=True)),
    "eb": lambda: (EntropyBudget(1.0), oracle.entropy_budget(1.0, "entropy")),
    "eb-margin": lambda: (EntropyBudget(2.0, "margin"), oracle.entropy_budget(2.0, "margin")),
    "redo": lambda: (Redo(3, 2, 0.6), oracle.redo(3, 2, 0.6)),
    "rcr": lambda: (RunningConfidence(3), oracle.running_confidence(3)),
}  # fmt: skip


def wanted(row, block_length, pick, shift):
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    return oracle.generate(forward, canvas, MASK, block_length, pick, shift=shift, uniforms=uniform_of(row))


FAST = ("credit", "prophet", "dream-drawn", "redo", "rcr")
PAIRS = [
    pytest.param(name, *form, marks=[pytest.mark.slow] * (name not in FAST or form[1]))
    for name in ORACLES
    for form in ((8, False), (5, True))
]


@pytest.mark.parametrize(("name", "block_length", "shift"), PAIRS)
def test_equal_to_the_oracle(name, block_length, shift):
    policy, _ = ORACLES[name]()
    decoder = make(policy, block_length, shift)
    state = specjax.run(decoder, params(), begin(decoder))
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        assert (text, steps) == wanted(row, block_length, ORACLES[name]()[1], shift)


def guess(dists, masked=None, step=0, entry=None):
    """A row of open positions with these distributions `[W][V]`."""
    dists = jnp.asarray([dists], jnp.float32)
    masked = jnp.ones(dists.shape[:2], bool) if masked is None else jnp.asarray([masked])
    return Guess(
        tokens=jnp.argmax(dists, axis=-1).astype(jnp.int32), log_probs=jnp.log(dists), masked=masked, committed=~masked,
        step=jnp.asarray([step]), entry=jnp.asarray([dists.shape[1] if entry is None else entry]),
        noise=jnp.zeros(dists.shape[:2]), sampled=jnp.zeros((1,), bool), log_own=jnp.log(dists),
    )  # fmt: skip


def test_credit_grows_to_its_limit_with_constant_distributions():
    """The card's check: the raised gap grows to alpha log(1 + p^gamma / (1 - beta)); alpha 0 is the inner policy."""
    policy, dist = Credit(), [[0.5, 0.3, 0.2]]
    memory, gaps = policy.init(1, 1, 3), []
    for step in range(60):
        _, memory = policy(guess(dist, step=step), memory)
        gaps.append(float(policy.alpha * np.log1p(memory[0][0, 0, 0])))
    assert np.all(np.diff(gaps) > -1e-6)
    np.testing.assert_allclose(gaps[-1], 0.7 * np.log(1 + 0.5**0.2 / (1 - 0.8)), rtol=1e-4)
    assert float(memory[0][0, 0, 1:].sum()) == 0


@pytest.mark.slow
def test_credit_without_weight_is_the_inner_policy():
    for policies in ((Credit(Threshold(0.5), alpha=0.0), Threshold(0.5)), (Hierarchy(0.5, 1.1), Threshold(0.5))):
        got, want = (specjax.run(make(p), params(), begin(make(p))) for p in policies)
        assert texts(got) == texts(want) and got.stats.steps.tolist() == want.stats.steps.tolist()


@pytest.mark.slow
def test_prophet_at_its_ends():
    """No gap is wide enough: the inner policy; every gap is: one pass per block."""
    never, inner = make(Prophet(Fixed(), *[np.inf] * 3)), make(Fixed())
    assert texts(specjax.run(never, params(), begin(never))) == texts(specjax.run(inner, params(), begin(inner)))
    always = make(Prophet(Fixed(), *[-np.inf] * 3))
    state = specjax.run(always, params(), begin(always))
    assert state.stats.steps.tolist() == [2, 3, 2, 2 if PROMPTS[3].index(MASK) + 8 < LIMITS[3] else 1]


def test_prophet_looks_for_its_answer_in_the_canvas():
    """New texts of 16, 20, 12 and, from the first open position on, 13 tokens."""
    decoder = make(Credit(Prophet(Fixed(), answer=9, length=4)))
    with pytest.raises(
        ValueError, match="up to place 12 of the new text, which has 12 places: ask for at least 13 new tokens"
    ):
        begin(decoder)
    begin(decoder, (0, 1, 3))


def test_gaps_are_the_models_own():
    """At a temperature that makes every distribution sharp, nothing is settled earlier: the pass that settles it is the
    greedy one's."""
    policy = Prophet(Dream(8, "low_confidence"), 3.0, 3.0, 3.0)
    dist = jnp.asarray([[[2.0, 0.0, -9.0]]])
    own, sharp = (jax.nn.log_softmax(x, axis=-1) for x in (dist, 10 * dist))
    sure = dataclasses.replace(guess(np.exp(sharp[0])), log_own=own)
    assert not policy(sure, ())[0].commit.any()
    assert policy(dataclasses.replace(sure, log_own=sharp), ())[0].commit.all()


def test_credit_leaves_drawn_tokens_alone():
    drawn = dataclasses.replace(guess([[0.5, 0.4, 0.1]]), sampled=jnp.ones((1,), bool))
    memory = (jnp.asarray([[[0.0, 4.0, 0.0]]]), ())
    assert Credit()(drawn, memory)[0].tokens.tolist() == [[0]]
    assert Credit()(guess([[0.5, 0.4, 0.1]]), memory)[0].tokens.tolist() == [[1]]


def test_hierarchy_commits_one_of_every_run():
    dists = [[0.5, 0.5 - 1e-3, 1e-3], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05], [0.45, 0.44, 0.11], [0.95, 0.03, 0.02]]
    choice, _ = Hierarchy(0.93, 0.4)(guess(dists, masked=[True, True, False, True, True]), ())
    assert choice.commit[0].tolist()[:2] == [False, True] and choice.commit[0].tolist()[3:] == [False, True]


def test_dream_draws_positions_in_proportion():
    """Of 20,000 draws of one of three positions, each falls as often as its distribution says, within four standard
    errors."""
    count, sureness = 20_000, np.asarray([0.9, 0.6, 0.5])
    dists = np.stack([[p, 1 - p, 1e-9] for p in sureness])
    noise = jnp.asarray(np.random.default_rng(0).uniform(size=(count, 3)), jnp.float32)
    many = dataclasses.replace(jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), guess(dists)), noise=noise)
    choice, _ = Dream(2, "low_confidence", alg_temp=0.2)(many, ())
    dist = np.exp(sureness / 0.2) / np.exp(sureness / 0.2).sum()
    assert (choice.commit.sum(axis=1) == 1).all()
    seen = np.asarray(choice.commit.mean(axis=0))
    assert (np.abs(seen - dist) < 4 * np.sqrt(dist * (1 - dist) / count)).all(), (seen, dist)


def test_dream_is_sure_where_it_draws():
    for rule in ("origin", "random"):
        with pytest.raises(ValueError, match="alg_temp"):
            Dream(3, rule, alg_temp=0.5)


@pytest.mark.slow
def test_dream_leaves_no_mask_after_its_last_pass():
    for rule in ("origin", "low_confidence"):
        decoder = make(Dream(4, rule), 16)
        state = specjax.run(decoder, params(), begin(decoder))
        blocks = [-(-(limit - first) // 16) for limit, first in zip(LIMITS, (3, 2, 5, 1), strict=True)]
        assert all(steps <= 4 * count for steps, count in zip(state.stats.steps.tolist(), blocks, strict=True))
        assert not any(MASK in text for text in texts(state))


@pytest.mark.slow
def test_a_predicted_end_of_text_ends_the_canvas():
    """The canvas shrinks to what was predicted to be the end, before that is written; and no further where nothing is."""
    decoder, plain = make(EndOfText(Threshold(0.6)), 16), make(Threshold(0.6), 16)
    whole = texts(specjax.run(plain, params(), begin(plain)))
    assert texts(specjax.run(decoder, params(), begin(decoder))) == whole
    step, shrunk = jax.jit(decoder.step), 0
    for eos in whole[0][9:15:2]:
        state = begin(decoder, eos=eos)
        while not state.done.all():
            before = state
            state, _ = step(params(), state)
            for row, (limit, old) in enumerate(zip(state.limit.tolist(), before.limit.tolist(), strict=True)):
                dist = forward(np.asarray(before.tokens)[row, :old].tolist()) if limit < old else None
                assert limit == old or (
                    int(np.argmax(dist[limit - 1, :MASK])) == eos and before.tokens[row, limit - 1] == MASK
                )
                shrunk += limit < old and MASK in np.asarray(state.tokens)[row, :limit]
        assert not any(MASK in text for text in texts(state))
    assert shrunk  # some ends were predicted while positions before them were open


@pytest.mark.parametrize(
    ("policy", "block"),
    (
        pytest.param(RunningConfidence(4), 8, marks=pytest.mark.slow),
        (Redo(3, 2, 0.6), 8),
        pytest.param(RunningConfidence(), 3, marks=pytest.mark.slow),
    ),
    ids=str,
)
def test_what_may_be_taken_back_is_not_streamed(policy, block):
    """Tokens only count as known when their block is finished, or the whole text; and the prompt's stay."""
    decoder = make(policy, block)
    step, state = jax.jit(decoder.step), begin(decoder)
    seen = [list(text) for text in texts(state)]
    reopened = 0
    for _ in range(40):
        before = state
        state, _ = step(params(), state)
        reopened += int(((state.tokens == MASK) & (before.tokens != MASK)).sum())
        for row, text in enumerate(texts(state)):
            assert len(text) >= len(seen[row]) and text[: len(seen[row])] == seen[row]
            seen[row] = text
    assert (reopened > 0 or block == 3) and set(state.finish.tolist()) == {Finish.LENGTH}
    assert all(
        got == given
        for text, p in zip(seen, PROMPTS, strict=True)
        for got, given in zip(text, p, strict=False)
        if given != MASK
    )


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: Credit(Redo()), "Credit cannot stand before Redo"), (lambda: Prophet(FreeDave()), "stand before FreeDave"),
        (lambda: Threshold(float("nan")), "at least 0"), (lambda: SlowFast(0), "explore >= 1"),
        (lambda: Prophet(answer=3), "an answer that begins at 3 and no length"),
        (lambda: Credit(beta=2.0), "beta in"), (lambda: Dream(0), "steps >= 1"), (lambda: Dream(rule="frob"), "origin"),
        (lambda: Redo(count=0), "count >= 1"), (lambda: RunningConfidence(-1), "steps must be at least 0"),
    ],
)  # fmt: skip
def test_bad_settings(make_it, said):
    with pytest.raises(ValueError, match=said):
        make_it()


def test_a_decoder_of_policies_is_hashable():
    assert hash(make(Credit(Prophet(Threshold())))) == hash(make(Credit(Prophet(Threshold()))))
    assert dataclasses.replace(make(Credit()), target=LM) == make(Credit())
