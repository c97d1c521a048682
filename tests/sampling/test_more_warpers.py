"""The warpers beyond the usual ones: equal to transformers' own classes, and to definitions in float64, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.reference import warpers as oracle
from specjax.sampling import SamplingArrays, warp
from specjax.sampling.warp import penalise
from specjax.warpers import Cut, Text, Warper
from specjax.warpers.min_p import MinP

V = 300
KINDS = {
    "random": lambda rng: rng.normal(size=V),
    "peaked": lambda rng: 6 * rng.normal(size=V),
    "flat": lambda rng: 1e-2 * rng.normal(size=V),
    "one_hot": lambda rng: np.where(np.arange(V) == rng.integers(V), 12.0, rng.normal(size=V)),
    "masked": lambda rng: np.where(rng.random(V) < 0.7, -np.inf, 3 * rng.normal(size=V)),
}
NAMES = {
    "temperature": "TemperatureLogitsWarper",
    "top_h": "TopHLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "typical_p": "TypicalLogitsWarper",
    "epsilon_cutoff": "EpsilonLogitsWarper",
    "eta_cutoff": "EtaLogitsWarper",
}
"""transformers' classes in the order of `GenerationMixin._get_logits_processor`."""
EACH = [
    *({"typical_p": mass} for mass in (0.05, 0.2, 0.5, 0.9, 0.95)),
    *({"epsilon_cutoff": epsilon} for epsilon in (3e-4, 2e-3, 0.3)),
    *({"eta_cutoff": epsilon} for epsilon in (3e-4, 2e-3, 0.3)),
    *({"top_h": share} for share in (0.01, 0.4, 0.8)),
    {"temperature": 0.7, "top_h": 0.9, "typical_p": 0.6},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8, "eta_cutoff": 1e-2},
    {"top_k": 40, "epsilon_cutoff": 0.02},
    {},
]
OFF = {"temperature": 1.0, "top_h": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
OFF |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
warped = jax.jit(lambda logits, params: warp(logits[:, None], params, jnp.ones(len(logits), bool))[:, 0])


def sampling(options, **more):
    return SamplingArrays.make(
        len(options), **{name: [o.get(name, OFF[name]) for o in options] for name in OFF}, **more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_transformers(kind):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(list(KINDS).index(kind))
    logits = np.stack([KINDS[kind](rng) for _ in EACH]).astype(np.float32)
    got = np.asarray(warped(jnp.asarray(logits), sampling(EACH)))
    for row, options in enumerate(EACH):
        scores, exact = torch.tensor(logits[row])[None], np.asarray(logits[row], np.float64)
        for name, kept in NAMES.items():
            if name in options:
                scores = getattr(processors, kept)(options[name])(None, scores)
                exact = getattr(oracle, name, lambda x, heat: x / heat)(exact, options[name])
        for want in (scores[0].numpy(), exact):
            np.testing.assert_array_equal(got[row] == -np.inf, want == -np.inf, err_msg=str(options))
            there = want > -np.inf
            np.testing.assert_allclose(got[row][there], want[there], rtol=1e-6, err_msg=str(options))
        assert (got[row] > -np.inf).any()


def test_each_removes_something_and_typical_sampling_even_the_likeliest():
    logits = np.random.default_rng(5).normal(size=(len(EACH), V)).astype(np.float32)
    got = np.asarray(warped(jnp.asarray(logits), sampling(EACH)))
    removed = (got == -np.inf).sum(axis=1)
    assert (removed[: len(EACH) - 1] > 0)[[0, 1, 2, 3, 4, 6, 7, 10, 11, 12, 13, 14]].all() and removed[-1] == 0
    assert got[0, logits[0].argmax()] == -np.inf  # typical_p 0.05
    assert all(got[row, logits[row].argmax()] > -np.inf for row in range(5, 12))


def test_ties_are_all_kept():
    flat = jnp.zeros((4, V)).at[3, 7].set(1.0)
    options = [{"typical_p": 0.2}, {"epsilon_cutoff": 0.5}, {"eta_cutoff": 0.5}, {"top_h": 0.01}]
    kept = np.isfinite(np.asarray(warped(flat, sampling(options)))).sum(axis=1)
    assert kept.tolist() == [V, V, V, 1]


def test_greedy_and_broken_rows_stay_as_they_are():
    logits = np.random.default_rng(6).normal(size=(4, V)).astype(np.float32)
    logits[1, 3] = np.nan
    options = [{"temperature": 0.0, "typical_p": 0.1}, {"typical_p": 0.1}, {"eta_cutoff": 0.5}, {"top_h": 0.1}]
    got = np.asarray(warped(jnp.asarray(logits), sampling(options)))
    np.testing.assert_array_equal(got[0], logits[0])
    assert np.isnan(got[1]).any() and (got[2:] == -np.inf).any(axis=1).all()


class EarlyMinP(MinP):
    """Before the temperature, and for greedy rows too."""

    of_logits = True


def test_a_cut_of_logits(monkeypatch):
    """A cut needs its lowest score and nothing else, wherever it stands; without one it is no warper."""
    monkeypatch.setitem(penalise.__globals__, "WARPERS", (EarlyMinP(),))
    logits = np.random.default_rng(7).normal(size=(4, V)).astype(np.float32)
    logits[2, 3] = np.nan
    shares, text = np.float32([0.2, 0.3, 0.2, 0.0]), Text(jnp.zeros((4, 1), jnp.int32), jnp.ones(4, jnp.int32))
    params, live = SamplingArrays.make(4, temperature=[0.0, 3.0, 1.0, 0.0], min_p=shares), jnp.ones(4, bool)
    got = np.asarray(penalise(jnp.asarray(logits)[:, None], params, live, text))[:, 0]
    want = logits.copy()
    for row in (0, 1):
        want[row, np.exp(logits[row] - logits[row].max()) < shares[row]] = -np.inf
    np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="abstract method '?lowest"):
        Cut()
    with pytest.raises(TypeError, match="abstract method '?warp"):
        Warper()


@pytest.mark.parametrize("name", ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"))
def test_what_no_one_uses_is_no_part_of_a_program(name):
    """Without a column nothing is traced; with one, rows that do not use it take the cheap branch."""
    logits, live = jnp.zeros((2, 1, V)), jnp.ones(2, bool)
    text = lambda params: str(jax.make_jaxpr(warp)(logits, params, live))
    usual, more = text(SamplingArrays.make(2)), text(SamplingArrays.make(2, **{name: OFF[name]}))
    assert more.count("cond[") == usual.count("cond[") + 1


@pytest.mark.parametrize(
    "bad",
    [{"typical_p": 0}, {"typical_p": 1.5}, {"epsilon_cutoff": 1}, {"eta_cutoff": -1}, {"top_h": [0.5, 2]}],
)
def test_bad_options_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingArrays.make(2, **bad)
