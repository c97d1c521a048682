"""A router over drafters or models: what it expects, which arm it takes, what is kept, and the texts."""

import re

import numpy as np
import pytest
from safetensors.numpy import save
from support.two_models import LARGE, LETTERS, PROMPTS, SMALL

import specjax
from specjax.decode import Route, Router
from specjax.decode.routing.method import FILE
from specjax.lm import Block, Wants
from specjax.search import ScorerError
from specjax.search.means import hidden_means
from specjax.search.stepwise import Asked

WARM = {"temperature": 1.0}


def small_router():
    """Features that are given."""
    router = Router(["a", "b"], 2, features=4)
    router.weights = np.asarray([[1, 0], [0, 1], [1, 1], [-1, 0.5]])
    router.shifts = np.arange(4.0)
    return router


def test_bounds_are_those_of_the_corrected_program():
    """The released program adds an arm's first reward twice, which gives a mean of 0.679689."""
    router = small_router()
    np.testing.assert_allclose(
        router.phi(np.asarray([1.0, 0.0])), [0.382051, 0.382051, -0.700030, -0.294260], atol=1e-6
    )
    for context, reward in (((1, 0), 1.0), ((0, 1), 0.0), ((1, 1), 0.5)):
        router.learn(0, np.asarray(context, float), reward)
    mean, deviation = router.values(np.asarray([0.5, 0.5]))
    np.testing.assert_allclose([mean[0], deviation[0], router.explore], [0.397021, 0.604546, 2.960415], atol=1e-6)
    np.testing.assert_allclose(mean[0] + router.explore * deviation[0], 2.186727, atol=1e-6)
    assert (mean[1], router.counts.tolist()) == (0.0, [3, 0])


def test_it_is_ridge_regression():
    rng = np.random.default_rng(0)
    router = Router(["a", "b", "c"], 3, features=20, width=1.0, alpha=0.5)
    contexts, rewards, arms = rng.normal(size=(40, 3)), rng.normal(size=40), rng.integers(0, 3, 40)
    for context, reward, arm in zip(contexts, rewards, arms, strict=True):
        router.learn(arm, context, reward)
    mean, deviation = router.values(contexts[0])
    phi = np.stack([router.phi(own) for own in contexts])
    for arm in range(3):
        own = phi[arms == arm]
        gram = own.T @ own + 0.5 * np.eye(20)
        np.testing.assert_allclose(mean[arm], phi[0] @ np.linalg.solve(gram, own.T @ rewards[arms == arm]), atol=1e-9)
        np.testing.assert_allclose(deviation[arm], np.sqrt(phi[0] @ np.linalg.solve(gram, phi[0])), atol=1e-9)


def test_it_learns_which_arm_pays_for_which_prompts():
    rng = np.random.default_rng(1)
    router = Router(["a", "b"], 2, features=100, width=1.0)
    kinds = rng.integers(0, 2, 400)
    taken = []
    for kind in kinds:
        context = np.asarray([3.0 * kind, -1.0]) + 0.1 * rng.normal(size=2)
        taken.append(router.choose(context, rng))
        router.learn(taken[-1], context, float(rng.random() < (0.9 if taken[-1] == kind else 0.1)))
    assert np.mean(np.asarray(taken[-100:]) == kinds[-100:]) > 0.9
    assert {taken[0], taken[1]} == {0, 1}, "each arm is tried first"


def test_arms_that_are_being_tried_are_not_unseen():
    router, rng = small_router(), np.random.default_rng(0)
    context = np.zeros(2)
    assert {router.choose(context, np.random.default_rng(seed)) for seed in range(8)} == {0, 1}
    assert router.choose(context, rng, np.asarray([1, 0])) == 1


def test_what_was_learnt_goes_on(tmp_path):
    one, other = small_router(), small_router()
    one.learn(1, np.asarray([1.0, 2.0]), 0.5)
    one.save(tmp_path / FILE)
    other.resume(tmp_path / FILE)
    for own in (one, other):
        own.learn(1, np.asarray([0.0, 1.0]), 2.0)
    assert all(
        (mine == theirs).all() for mine, theirs in zip(one._held().values(), other._held().values(), strict=True)
    )
    (tmp_path / "damaged").write_bytes(b"none")
    (tmp_path / "empty").write_bytes(save({}))
    wrong = {
        "cannot read what a router learnt": (small_router(), "damaged"),
        "of other arms, features, models or rewards": (Router(["a", "c"], 2, features=4), FILE),
        "models or rewards: give its own": (Router(["a", "b"], 2, features=4, of="another model"), FILE),
        "give its own, or another folder": (small_router(), "empty"),
    }
    for said, (router, file) in wrong.items():
        with pytest.raises(ValueError, match=said):
            router.resume(tmp_path / file)
        assert router.counts.tolist() == [0, 0]


@pytest.mark.slow
def test_prompts_are_told_apart_by_their_mean_hidden_state():
    asked = Asked.of([LARGE], PROMPTS[:2], 4, 0, {})
    for row, ids in enumerate(PROMPTS[:2]):
        tokens = np.asarray([ids], np.int32)
        block = Block(tokens, np.arange(len(ids))[None], np.zeros(1, np.int32))
        hidden = LARGE.lm(LARGE.params, block, LARGE.lm.init_cache(1, 8), wants=Wants(final=True)).final[0]
        np.testing.assert_allclose(hidden_means(LARGE, asked.ids, 3)[row], np.mean(hidden, axis=0), atol=1e-4)


def test_drafters_do_not_change_the_text():
    """Of two prompts, each of which tries an arm."""
    how = {"max_new_tokens": 6, "seed": 3, **WARM}
    wanted = specjax.generate(LARGE, PROMPTS[:2], drafter="none", progress=False, **how)
    way = Route("prompt_lookup:length=3|none")
    written = way(LARGE, PROMPTS[:2], **how)
    assert [own.tokens for own in written] == [own.tokens for own in wanted]
    assert {own.steps[0].by for own in written} == {"prompt_lookup:length=3", "none"}
    assert next(iter(way.learnt.values())).counts.tolist() == [1, 1]


@pytest.mark.slow
def test_what_drafters_paid_is_kept(tmp_path):
    """By a line, in parts, and again from the folder."""
    how = {"max_new_tokens": 10, "seed": 3, "progress": False, **WARM}
    prompts = [*PROMPTS, [9, 9, 9]]
    wanted = specjax.generate(LARGE, prompts, drafter="none", **how)
    line = f"route:drafters=prompt_lookup:length=3|none,folder={tmp_path}"
    found = specjax.generate(LARGE, prompts, decode=line, batch_size=2, **how)
    assert [own.tokens for own in found] == [own.tokens for own in wanted]
    for own in found:
        assert own.score == own.new_tokens / own.steps
    way = Route("prompt_lookup:length=3|none", folder=str(tmp_path))
    written = way(LARGE, PROMPTS[:2], max_new_tokens=10, seed=3, batch_size=2, **WARM)
    assert [own.tokens for own in written] == [own.tokens for own in wanted[:2]]
    assert {own.steps[0].by for own in written} <= {"prompt_lookup:length=3", "none"}
    (router,) = way.learnt.values()
    padded = 1  # the last part of five prompts in twos is filled with its own prompt once more
    assert router.counts.sum() == len(prompts) + padded + 2 and router.counts.min() > 0


@pytest.mark.slow
def test_models_are_chosen_by_what_their_texts_are_worth():
    """Every text is that of its model alone; the one whose texts are worth more is taken more."""
    heard = []

    def worth(prompt, text):
        heard.append((prompt, text))
        return float(text in large)

    letters = ["".join(LETTERS[token] for token in ids) for ids in PROMPTS] * 4
    how = {"max_new_tokens": 8, "seed": 3}
    alone = {
        name: specjax.generate(own, letters, drafter="none", temperature=0.0, progress=False, **how)
        for name, own in (("none", LARGE), ("small (1)", SMALL))
    }
    large = [own.text for own in alone["none"]]
    way = Route("none", (SMALL,), worth, width=100.0, delta=0.5)
    written = way(LARGE, letters, batch_size=1, temperature=0.0, **how)
    for number, own in enumerate(written):
        assert own.tokens == alone[own.steps[0].by][number].tokens
        assert own.score == float(own.text in large)
    assert len(heard) == len(letters)
    by = [own.steps[0].by for own in written]
    assert {*by} == {"none", "small (1)"} and by.count("none") > by.count("small (1)")


FAILS = lambda prompt, text: 1 / 0
WRONG = {
    "two different arms at least": lambda: Route("none"),
    "name drafters and models with | between them, got 'none|none'": lambda: Route("none|none"),
    "features must be a whole number from 1 on, got 0": lambda: Route(features=0),
    "width must be above 0": lambda: Route(width=0.0),
    "delta between 0 and 1, got 10.0 and 1.0": lambda: Route(width=10.0, delta=1.0),
    "give reward=pkg.function": lambda: Route("none", "tiny-draft"),
    "reward must be tokens_per_step or a function": lambda: Route(reward=3).bind(LARGE),
    "reward cannot read nothing.here": lambda: Route(reward="nothing.here").bind(LARGE),
    "the reward of route failed: ZeroDivisionError": lambda: Route(reward=FAILS)._paid("a", "b", 1, 1),
    "must be a finite number, got nan": lambda: Route(reward=lambda *own: float("nan"))._paid("a", "b", 1, 1),
    "goes step by step on one device": lambda: Route().bind(LARGE, mesh=object()),
    "unknown drafter 'nobody'": lambda: Route("nobody|none")(LARGE, [[1]], max_new_tokens=2),
    "have different vocabularies": lambda: Route("none", (specjax.models.abstract("tiny"),), FAILS).bind(LARGE),
}  # fmt: skip


@pytest.mark.parametrize("said", list(WRONG))
def test_what_cannot_be_done(said):
    with pytest.raises((ValueError, ScorerError), match=re.escape(said)):
        WRONG[said]()
