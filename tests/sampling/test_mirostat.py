"""Mirostat against the paper's algorithms written out in float64, and its sums over the paths of a tree."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, MIXED, TARGET, params_of
from support.margin import teacher_forced

import specjax
from specjax.draft import NoDrafter
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys, warp
from specjax.warpers import Text
from specjax.warpers.mirostat import MOST, Mirostat, rank

V = 300
TAU, ETA = 4.0, 0.4


def kept(logits, version, mu):
    """Ids that stay, of one place: algorithm 1 and its alternative."""
    surprise = -np.log2(np.exp(logits - np.logaddexp.reduce(logits)))
    order = np.argsort(-logits, kind="stable")
    if version == 2:
        return {int(i) for i in order if surprise[i] <= mu} | {int(order[0])}
    p, i = 2.0 ** -surprise[order], np.arange(1, min(101, len(logits)))
    b, t = np.log(p[i - 1] / p[i]), np.log((i + 1) / i)
    s = (t * b).sum() / (t * t).sum()
    k = round(((s - 1) * 2**mu / (1 - 50_000 ** (1 - s))) ** (1 / s)) + 1
    return {int(i) for i in order[:k]}


@pytest.mark.parametrize("version", [1, 2])
def test_cuts_as_the_paper_says(version):
    rng = np.random.default_rng(version)
    logits = (rng.normal(size=(12, V)) * np.linspace(0.3, 3, 12)[:, None]).astype(np.float32)
    spent = rng.uniform(-9, 9, size=12).astype(np.float32)
    params = SamplingArrays.make(12, temperature=0.8, mirostat=version, mirostat_tau=TAU, mirostat_eta=ETA)
    text = Text(jnp.zeros((12, 4), jnp.int32), jnp.ones(12, jnp.int32), carried={"mirostat": jnp.asarray(spent)})
    got = np.asarray(warp(jnp.asarray(logits)[:, None], params, jnp.ones(12, bool), text))[:, 0]
    sizes = []
    for row in range(12):
        want = kept(logits[row].astype(np.float64) / 0.8, version, 2 * TAU - ETA * float(spent[row]))
        assert set(np.flatnonzero(got[row] > -np.inf)) == want
        sizes.append(len(want))
    assert len(set(sizes)) > 4 and max(sizes) > 4


@pytest.mark.parametrize(("exponent", "mu", "k"), [(1.1, 6, 9), (1.3, 6, 11), (2.0, 6, 9), (1.3, 4.209412, 5)])
def test_ranks_are_those_of_the_authors_program(exponent, mu, k):
    """What its two functions make of 500 probabilities that fall as a power of their rank; and one step of its mu."""
    logits = -exponent * np.log(np.arange(1, 501))
    assert float(rank(jnp.asarray(logits[:MOST], jnp.float32)[None, None], jnp.full((1, 1), mu))[0, 0]) == k
    assert len(kept(logits, 1, mu)) == k
    if (exponent, mu) == (1.3, 6):
        own = {
            name: jnp.asarray([value])
            for name, value in {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 1.0}.items()
        }
        cost = Mirostat().cost(jnp.asarray(logits, jnp.float32)[None, None], own)[0, 0, 4]
        assert 6 - float(cost) == pytest.approx(4.209412, abs=1e-5)


@pytest.mark.parametrize(("version", "tau", "eta"), [(1, 3.0, 1.0), (2, 5.0, 0.1)])
def test_defaults_are_those_of_the_version(version, tau, eta):
    logits = np.random.default_rng(3).normal(size=(1, 1, V)).astype(np.float32) * 2
    text = Text(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), carried={"mirostat": jnp.asarray([2.5])})
    of = lambda **own: warp(logits, SamplingArrays.make(1, 1.0, mirostat=version, **own), jnp.ones(1, bool), text)
    np.testing.assert_array_equal(of(), of(mirostat_tau=tau, mirostat_eta=eta))
    assert (of() != of(mirostat_tau=tau + 1)).any() and (of() != of(mirostat_eta=0.5)).any()


def test_sums_over_the_paths_of_a_tree():
    rng = np.random.default_rng(0)
    cost = rng.normal(size=(2, 5, 9)).astype(np.float32)
    # root, 3, 3 5, 4, 3 5 3; the last one has no position before it where that is left out
    paths = np.full((2, 5, 3), -1, np.int32)
    for node, path in enumerate(((), (3,), (3, 5), (4,), (3, 5, 3))):
        paths[:, node, : len(path)] = path
    start = np.float32([1.0, -2.0])
    text = Text(jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), paths=lambda: jnp.asarray(paths))
    got = np.asarray(text.summed(jnp.asarray(start), jnp.asarray(cost)))
    for b in range(2):
        one = start[b] + cost[b, 0, 3]
        two = one + cost[b, 1, 5]
        np.testing.assert_allclose(
            got[b], [start[b], one, two, start[b] + cost[b, 0, 4], two + cost[b, 2, 3]], rtol=1e-6
        )
    level = Text(text.tokens, text.length, paths=lambda: jnp.asarray(paths[:, 4:]))
    np.testing.assert_array_equal(level.summed(jnp.asarray(start), jnp.asarray(cost[:, 4:]))[:, 0], start)


@pytest.mark.parametrize("version", [1, 2])
def test_a_text_follows_its_own_surprise(version):
    """Every token of a text lies in the cut that the tokens before it leave, by a replay on the host."""
    prompt = MIXED.prompts[0]
    count = 24
    decoder = specjax.speculative(TARGET, NoDrafter())
    params = params_of(NoDrafter())
    options = {"temperature": 0.6, "mirostat": version, "mirostat_tau": TAU, "mirostat_eta": ETA}
    prompts = Prompts.of([prompt], count, keys=row_keys(7, ["a"]), **options)
    state = decoder.init(params, prompts, capacity=CAPACITY)
    state = specjax.run(decoder, params, state)
    ids = np.asarray(state.tokens)[0, : len(prompt) + count].tolist()
    logits = teacher_forced(TARGET, params["target"], ids).astype(np.float64) / 0.6
    mu, sizes = 2 * TAU, []
    for at in range(len(prompt), len(ids)):
        dist = logits[at - 1]
        left = kept(dist, version, mu)
        assert ids[at] in left
        sizes.append(len(left))
        mu -= ETA * ((np.logaddexp.reduce(dist) - dist[ids[at]]) / np.log(2) - TAU)
    np.testing.assert_allclose(2 * TAU - ETA * float(state.carried["mirostat"][0]), mu, atol=1e-3)
    assert len(set(sizes)) > 4
