"""Any-subset speculative decoding on an exact joint distribution: its distribution, its text, its passes, and who drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import optimised

import specjax
from specjax.diffusion.assd import Assd
from specjax.diffusion.assd_drafts import ContextNgram, Known, Round, SelfDraft
from specjax.models.joint import JointDistribution
from specjax.prompts import Prompts
from specjax.reference import statistics
from specjax.sampling import SamplingArrays
from specjax.state import Finish

V, N, ROWS, ALPHA = 3, 3, 30_000, 1e-3
MODEL = JointDistribution(V, N)


@functools.cache
def dist(seed=0, size=N):
    """A random joint distribution with a few impossible texts."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(V**size, 0.5))
    weights[rng.random(V**size) < 0.2] = 0
    return (weights / weights.sum()).astype(np.float32)


def params(size=N):
    return {"target": {"log_probs": jnp.log(jnp.asarray(dist(size=size)))}}


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("temperature", "seed"))
def start(decoder, tokens, given, temperature=1.0, seed=5, eos=None, limit=None):
    """A state of rows `[B, L]` of which the positions `given` are known."""
    rows, size = tokens.shape
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), rows)
    prompts, limit = jnp.where(given, tokens, -1), jnp.full((rows,), size) if limit is None else limit
    sampling = SamplingArrays.make(rows, temperature=temperature)
    return decoder.init(params(size), Prompts(prompts, limit, keys, limit, sampling, eos), capacity=size)


@functools.partial(jax.jit, static_argnums=(0,))
def _complete(decoder, params, tokens, given):
    return specjax.run(decoder, params, start(decoder, tokens, given))


def complete(decoder, rows=ROWS, given=None, tokens=None, size=N):
    given = np.zeros((rows, size), bool) if given is None else given
    tokens = np.zeros((rows, size), np.int32) if tokens is None else tokens
    return _complete(decoder, params(size), jnp.asarray(tokens), jnp.asarray(given))


def counts(texts):
    return np.bincount(np.asarray(texts) @ V ** np.arange(N)[::-1], minlength=V**N)


def test_the_model_is_its_table():
    """Conditionals by plain enumeration."""
    tokens, sees = jnp.asarray([[1, 0, 2]]), np.zeros((1, N, N), bool)
    sees[0, 0, 2] = sees[0, 1, 0] = sees[0, 1, 2] = True
    got = np.exp(np.asarray(MODEL(params()["target"], tokens, jnp.asarray(sees), jnp.arange(N)[None]))[0])
    joint = dist().reshape(V, V, V)
    np.testing.assert_allclose(got[0], joint[:, :, 2].sum(1) / joint[:, :, 2].sum(), atol=1e-5)
    np.testing.assert_allclose(got[1], joint[1, :, 2] / joint[1, :, 2].sum(), atol=1e-5)
    np.testing.assert_allclose(got[2], joint.sum((0, 1)), atol=1e-5)


@pytest.mark.parametrize("rule", ("coupled", "rejection"))
@pytest.mark.parametrize("drafter", (SelfDraft(), pytest.param(ContextNgram(), marks=pytest.mark.slow)))
def test_texts_have_the_joint_distribution(rule, drafter):
    """Chi-square of 30,000 texts against the table, at 1e-3; a distance of 0.03 is seen with power 0.99."""
    assert statistics.power(ROWS, V**N, 0.03, ALPHA) > 0.99
    state = complete(Assd(MODEL, 3, rule, drafter))
    assert statistics.chi_square(counts(state.tokens), dist()) > ALPHA


def test_drafts_kept_unseen_are_caught():
    """The check above fails where nothing is verified: positions drawn apart have another distribution."""

    class Gullible(Assd):
        def _coupled(self, p, q, drafted, real, noise, at, keys):
            return jnp.full(drafted.shape[:1], drafted.shape[1]), drafted[:, -1]

    state = complete(Gullible(MODEL, 3))
    apart = counts(state.tokens)
    seen = dist() > 0
    assert apart[~seen].sum() > 0 or statistics.chi_square(apart[seen], dist()[seen] / dist()[seen].sum()) < ALPHA


@pytest.mark.slow
def test_counts_that_are_not_what_was_drawn_from_are_caught():
    """The check above fails where a drafter says another q than it drew from."""

    class Boastful(ContextNgram):
        def __call__(self, asked):
            drafted, q = super().__call__(asked)
            return drafted, jnp.full_like(q, -jnp.log(V))

    state = complete(Assd(MODEL, 3, "rejection", Boastful()))
    got, seen = counts(state.tokens), dist() > 0
    assert got[~seen].sum() == 0  # each is still one that the model could write
    assert statistics.chi_square(got[seen], dist()[seen] / dist()[seen].sum()) < ALPHA


@pytest.mark.slow
def test_coupled_text_is_sequential_text_whatever_the_drafts():
    model, size = JointDistribution(V, 5), 5
    want = complete(Assd(model, 1), 400, size=size)
    assert (want.stats.steps == size).all()
    for drafts in (1, 3):
        got = complete(Assd(model, drafts, drafter=ContextNgram()), 400, size=size)
        assert (got.tokens == want.tokens).all()
        assert (got.stats.steps <= size).all() and got.stats.steps.sum() < 0.9 * want.stats.steps.sum()
    for drafts in (2, 3, 7):
        got = complete(Assd(model, drafts), 400, size=size)
        assert (got.tokens == want.tokens).all()
        assert (got.stats.steps <= size).all() and got.stats.steps.sum() < want.stats.steps.sum()
    empty = jnp.zeros((400, size), jnp.int32), jnp.zeros((400, size), bool)
    program = optimised(_complete.lower(Assd(model, 3), params(size), *empty))
    assert (program(params(size), *empty).tokens == want.tokens).all()


@pytest.mark.parametrize(
    ("rule", "drafter"),
    (("coupled", SelfDraft()), ("rejection", SelfDraft()), ("rejection", ContextNgram())),
)
def test_given_tokens_stay_and_condition_the_rest(rule, drafter):
    given = np.zeros((ROWS, N), bool)
    given[:, 1] = True
    tokens = np.full((ROWS, N), 2, np.int32)
    state = complete(Assd(MODEL, 2, rule, drafter), given=given, tokens=tokens)
    assert (np.asarray(state.tokens)[:, 1] == 2).all() and (state.stats.steps <= 2).all()
    joint = dist().reshape(V, V, V) * np.asarray([0, 0, 1])[None, :, None]
    want = joint.reshape(-1) / joint.sum()
    kept = want > 0
    got = counts(state.tokens)
    assert got[~kept].sum() == 0
    assert statistics.chi_square(got[kept], want[kept]) > ALPHA


@pytest.mark.slow
def test_no_retrace_and_finished_rows_stay():
    decoder = Assd(MODEL, 2)
    step = jax.jit(decoder.step)
    state = complete(decoder, 4)
    after, _ = step(params(), state)
    assert (after.tokens == state.tokens).all() and (after.stats.steps == state.stats.steps).all()
    step(params(), start(decoder, jnp.ones((4, N), jnp.int32), jnp.asarray([[True, False, False]] * 4), seed=1))
    assert step._cache_size() == 1


@pytest.mark.slow
def test_greedy_rows_end_and_failed_ones():
    """Beside a sampled row: greedy text is the sequential argmax, whatever the drafts and the rule; EOS ends a row where
    plain decoding meets it, before a limit of its own; a model that fails ends its row and says so."""
    joint = dist(size=N).reshape(V, V, V)
    first = int(joint.sum((1, 2)).argmax())
    second = int(joint[first].sum(1).argmax())
    text = [first, second, int(joint[first, second].argmax())]
    tokens, given = jnp.zeros((3, N), jnp.int32), jnp.zeros((3, N), bool)
    eos = jnp.asarray([[-1], [text[1]], [-1]])
    want_length = [N, text.index(text[1]) + 1, 2]
    for decoder in (Assd(MODEL, 1), Assd(MODEL, 3), Assd(MODEL, 3, "rejection")):
        state = start(decoder, tokens, given, temperature=0.0, eos=eos, limit=jnp.asarray([N, N, 2]))
        done = specjax.run(decoder, params(), state)
        assert done.length.tolist() == want_length
        assert done.finish.tolist() == [Finish.LENGTH, Finish.EOS, Finish.LENGTH]
        for row, length in enumerate(want_length):
            assert done.tokens[row, :length].tolist() == text[:length]
        broken = jax.tree.map(lambda x: x * jnp.nan, params())
        failed = specjax.run(decoder, broken, start(decoder, tokens, given))
        assert failed.finish.tolist() == [Finish.ERROR] * 3 and failed.length.tolist() == [0] * 3


def by_loops(tokens, there, at, drafted, size):
    """Counts of n-grams token by token: q `[K, size]` of a text's drafts."""
    known = [token if here else None for token, here in zip(tokens, there, strict=True)]
    found, last = [], dict(zip(at, drafted, strict=True))
    for place in at:
        before = None if place == 0 else known[place - 1]
        before = last.get(place - 1) if place and before is None else before
        after = [b for a, b in zip(known, known[1:], strict=False) if a is not None and a == before and b is not None]
        from_ = after or [token for token in known if token is not None]
        found.append([from_.count(token) / len(from_) for token in range(size)])
    return np.asarray(found)


A, B, C = range(3)
NO = -9
TEXTS = {
    "the card's": ([A, B, A, C, NO, NO], [4, 5]),
    "both sides": ([NO, A, NO, B, C, A, B, NO, NO, A], [0, 2, 7, 8]),
    "one known": ([NO, NO, B, NO], [0, 1, 3]),
}


@pytest.mark.parametrize("name", list(TEXTS))
def test_counts_of_n_grams_are_those_of_a_loop(name):
    tokens, at = TEXTS[name]
    there = np.asarray(tokens) != NO
    for seed in range(8):
        noise = jax.random.gumbel(jax.random.key(seed), (1, len(at), 3))
        known = Known(jnp.asarray([tokens]), None, jnp.asarray([there]))
        drafted, q = ContextNgram()(Round(None, known, jnp.asarray([at]), noise))
        want = by_loops(tokens, there, at, drafted[0].tolist(), 3)
        np.testing.assert_allclose(np.exp(q[0]), want, atol=1e-6)
        np.testing.assert_array_equal(drafted[0], np.argmax(np.asarray(q[0] + noise[0]), axis=1))
    if name == "the card's":
        assert np.exp(q[0, 0]).tolist() == pytest.approx([0.5, 0.25, 0.25])  # nothing follows c


def test_nothing_known_drafts_nothing():
    known = Known(jnp.zeros((1, 4), jnp.int32), None, jnp.zeros((1, 4), bool))
    drafted, _ = ContextNgram()(Round(None, known, jnp.asarray([[0, 1]]), jnp.zeros((1, 2, 3))))
    assert drafted.tolist() == [[-1, -1]]


@pytest.mark.parametrize("wrong", ({"drafts": 0}, {"rule": "greedy"}))
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match="assd needs drafts >= 1"):
        Assd(MODEL, **wrong)
