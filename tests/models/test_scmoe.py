"""SCMoE: the weak pass by transformers with another choice of experts, its scores by a formula, and one text whatever is
drafted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import small_target as small
from support.conformance import DRAFT, MODELS, TARGET, but_slow, texts
from support.small_experts import ours

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.decode import ExpertContrast, Plain
from specjax.models.contrastive import SelfContrastive
from specjax.models.experts import ExpertsConfig, route
from specjax.models.routing import routed
from specjax.models.tabular import TabularLM
from specjax.sampling import row_keys
from specjax.serve.engine import Engine

torch = pytest.importorskip("torch")

RANK, ALPHA, BETA = 3, 0.2, 0.8
IDS = np.random.default_rng(0).integers(0, 96, (2, 12))


def only(monkeypatch, rank):
    """Makes transformers' routers take the expert of one rank, whatever number they ask for."""
    best = torch.topk

    def taken(scores, k, dim=-1, **more):
        values, experts = best(scores, rank, dim=dim, **more)
        return values[..., rank - 1 :], experts[..., rank - 1 :]

    monkeypatch.setattr(torch, "topk", taken)


@pytest.fixture(scope="module")
def mixtral(references):
    """A tiny Mixtral of transformers, and what is loaded from its folder."""
    reference = references("mixtral")
    return reference, models.load(reference.folder, dtype="float32")


@pytest.mark.parametrize("name", but_slow(("qwen2_moe", "mixtral", "olmoe"), "mixtral", "olmoe"))
def test_the_weak_pass_is_transformers_with_one_expert(references, monkeypatch, name):
    """Mixtral divides the one weight by itself; OLMoE and Qwen2-MoE keep it, and the last one a shared expert."""
    reference = references(name)
    model = models.load(reference.folder, dtype="float32")
    strong = reference.logits(IDS)
    for rank in (1, RANK):
        with monkeypatch.context() as patch:
            only(patch, rank)
            weak = reference.logits(IDS)
        assert np.abs(weak - strong).max() > 1e-2
        got = ours(dataclasses.replace(model, lm=routed(model.lm, rank, 1, "a test")), IDS, causal=True)
        np.testing.assert_allclose(got, weak, atol=2e-4)
    np.testing.assert_allclose(ours(model, IDS, causal=True), strong, atol=2e-4)


@pytest.mark.slow
def test_the_text_is_that_of_the_formula(mixtral, monkeypatch):
    """Greedy, by whole passes of transformers, both sides."""
    (reference, model), others = mixtral, 0
    prompts = IDS[0, :5].tolist(), IDS[1, :9].tolist()
    steer = ExpertContrast(RANK, ALPHA, BETA)
    records = specjax.generate(
        model, prompts, decode=Plain(steer=steer), max_new_tokens=10, sampling=specjax.Sampling(ignore_eos=True)
    )
    for prompt, record in zip(prompts, records, strict=True):
        text = list(prompt)
        for _ in range(10):
            strong = reference.logits(np.asarray([text]))[0, -1].astype(float)
            with monkeypatch.context() as patch:
                only(patch, RANK)
                weak = reference.logits(np.asarray([text]))[0, -1].astype(float)
            kept = strong >= strong.max() + np.log(ALPHA)
            text.append(int(np.where(kept, (1 + BETA) * strong - BETA * weak, -np.inf).argmax()))
            others += text[-1] != strong.argmax()
        assert record.tokens == text[len(prompt) :]
    assert others > 1, "the contrast changes nothing"


def test_scores_by_hand():
    """Up to a constant, of logits: the likeliest token of the strong side alone is another one."""
    lm = SelfContrastive(TARGET, DRAFT)
    log = lambda logits: jnp.asarray(logits) - jnp.log(jnp.exp(jnp.asarray(logits)).sum())
    got = np.asarray(lm.blended(log([2.0, 1.5, 0.0, -1.0]), log([2.5, 0.5, 0.0, -1.0])))
    np.testing.assert_allclose(got[:3] - got[1], [-0.25, 0.0, -2.0], atol=1e-6)
    assert got[3] == -np.inf


def test_the_text_does_not_depend_on_the_drafter():
    """Greedy and drawn rows: each token is the best of its scores and its place's noise, in a whole pass of either side."""
    lm = small.with_experts()
    target, drafter = SelfContrastive(lm, routed(lm, RANK, 1, "a test"), ALPHA, BETA), small.line_of("token_recycling")
    own = small.params_of(drafter, lm, ())
    decoder = dataclasses.replace(specjax.speculative(target, drafter), whole=True)
    state = decoding.run(decoder, own, small.begin(decoder, own))
    assert np.sum(state.stats.accepted, axis=0)[1:].sum(), "nothing is drafted right"
    heats, keys = jnp.asarray(small.HEATS), row_keys(0, small.NAMES)
    scores, bare = (np.asarray(small.scores_of(one, own["target"], state.tokens, keys, heats)) for one in (target, lm))
    others = 0
    for row, (prompt, text) in enumerate(zip(small.PROMPTS, texts(state), strict=True)):
        after = slice(len(prompt) - 1, len(prompt) - 1 + small.NEW)
        assert text == scores[row, after].argmax(axis=-1).tolist()
        others += sum(text != bare[row, after].argmax(axis=-1))
    assert others > 2, "the contrast changes nothing"


@pytest.mark.parametrize("scoring", ("softmax", "sigmoid", "biased", "chosen", "inputs", "sparsemixer"))
def test_a_later_rank_is_the_next_of_the_order_of_choice(scoring):
    """All ranks one by one are all experts, and the first ones are those of the usual choice."""
    config = ExpertsConfig(8, 2, 4, scoring, False, 1.5)
    given, bias = jnp.asarray(np.random.default_rng(1).normal(size=(7, 8)), jnp.float32), jnp.arange(8) / 8
    own = None if scoring in ("softmax", "sparsemixer", "inputs") else bias
    alone = [
        route(given, own, dataclasses.replace(config, first_rank=rank, num_experts_per_tok=1)) for rank in range(1, 9)
    ]
    order = np.concatenate([experts for _, experts in alone], axis=1)
    assert (np.sort(order) == np.arange(8)).all()
    weights, experts = route(given, own, config)
    np.testing.assert_array_equal(experts, order[:, :2])
    if scoring == "chosen":  # a softmax over those that are taken
        assert all((np.asarray(weights) == 1).all() for weights, _ in alone)
    else:
        np.testing.assert_allclose(weights, np.concatenate([weights for weights, _ in alone[:2]], axis=1), rtol=1e-6)


def test_a_model_with_other_experts_is_not_saved(mixtral, tmp_path):
    lm = routed(mixtral[1].lm, RANK, 1, "a test")
    with pytest.raises(models.ModelError, match="first_rank=3"):
        models.save(tmp_path / "x", lm, mixtral[1].params)


def test_refused(mixtral):
    for lm in (TARGET, TabularLM(4)):
        with pytest.raises(ValueError, match="scmoe chooses among a model's experts, and this one has none"):
            ExpertContrast().target(models.Model(lm, {}), None)
    for rank, said in (
        (6, "scmoe asks for expert 6 of a token, and this model's choose from 5"),
        (0, "from 1, .* got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Engine(mixtral[1], f"plain:steer=(scmoe:rank={rank})")
    with pytest.raises(ValueError, match="choose from 2"):  # of four, in groups of two
        routed(MODELS["experts"], 3, 1, "a test")
    with pytest.raises(ValueError, match="alpha of a contrast must be in"):
        Engine(mixtral[1], Plain(steer=ExpertContrast(alpha=2)))
    with pytest.raises(ValueError, match="steer 'scmoe' has no field 'layers'"):
        Engine(mixtral[1], "plain:steer=(scmoe:layers=low)")
