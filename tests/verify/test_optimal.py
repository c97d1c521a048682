"""The optimal rule for i.i.d. children: its distribution and acceptance over every draft, seen to fail when broken, and
by counting."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA, MODEL, PARAMS, ROWS, context_tables, exact, generate, sampled_p_value
from support.conformance import but_slow

import specjax
from specjax.draft import ModelDrafter
from specjax.expand import IID, Static, WithoutReplacement
from specjax.lm import Block, Wants
from specjax.verify import Optimal, k_seq, optimal
from specjax.verify.bounds import optimal_acceptance

CELLS = 400
"""Of every piece of a token's part on which the partner moves smoothly, for quadrature."""

line_of, factor = jax.jit(optimal.line_of), jax.jit(k_seq.factor)
places = jax.jit(optimal.places)


def pieces(line, k):
    """Where each token's part `[V, 2 V + 3]` has its ends, as shares of it: its turn, and where the partner's part changes."""
    rank, found = line.rank[0], []
    share, start, above, level = (x[0, rank] for x in (line.share, line.behind, line.above, line.level))
    drop = lambda start, length: start**k - (start - length) ** k
    for token, place in enumerate(rank):
        before = [sums[0, place - 1] if place else 0.0 for sums in (line.surplus, line.deficit)]
        own = start[token], above[token], level[token]
        more = lambda step, b, own=own: b + drop(own[0], step) - own[2] * step
        less = lambda step, b, own=own: b + own[2] * step - drop(own[0] - own[1], step)
        ends = [0.0, own[1], share[token]]
        halves = ((more, 0.0, own[1], line.deficit), (less, own[1], share[token] - own[1], line.surplus))
        for (amount, shift, length, others), so_far in zip(halves, before, strict=True):
            low, high = np.zeros(len(rank)), np.full(len(rank), length)
            for _ in range(60):
                short = amount((low + high) / 2, so_far) < others[0]
                low, high = np.where(short, (low + high) / 2, low), np.where(short, high, (low + high) / 2)
            ends += [*(shift + high)]
        found.append(np.sort(ends) / max(share[token], 1e-300))
    return np.clip(found, 0, 1)


def at_a_node(p, q, k):
    """The rule's line, and for cells of every piece their weight, place, partner and chance to go there, `[V, pieces, CELLS]`;
    last, the places and partners of the cells' ends."""
    with jax.enable_x64(True):
        line = jax.tree.map(np.asarray, line_of(*(jnp.asarray(x)[None] for x in (p, q, float(k)))))
        ends = pieces(line, k)
        even = np.arange(2 * CELLS + 1) / (2 * CELLS)  # ends and middles by turns
        even = np.clip(even**2 * (3 - 2 * even), 1e-7, 1 - 1e-7)  # smaller at the ends, where partners change fast
        length = np.diff(ends, axis=1)[..., None]
        steps = ends[:, :-1, None] + length * even**2 * (
            3 - 2 * even
        )  # smaller at the ends, where partners change fast
        tokens = np.broadcast_to(np.arange(len(p))[:, None, None], steps.shape)
        found = places(line, jnp.asarray(tokens.reshape(1, -1)), jnp.asarray(steps.reshape(1, -1)))
        here, there, goes = (np.asarray(x).reshape(steps.shape) for x in found)
    middle = [np.diff(steps[..., ::2], axis=-1), *(x[..., 1::2] for x in (here, there, goes))]
    return line, [*middle, here[..., ::2], there[..., ::2]]


def behind(weight, goes, here, there, at):
    """The chance that a child of this token comes to lie after each of some places; here and there are of cells'
    ends."""
    found = np.zeros_like(at)
    for piece in np.flatnonzero(weight.sum(axis=1)):
        for place, chance in ((here, 1 - goes), (there, goes)):
            sums = np.concatenate([[0], np.cumsum(weight[piece] * chance[piece])])
            known, cells = place[piece], weight[piece]
            if known[0] > known[-1]:
                known, sums, cells = known[::-1], (sums[-1] - sums)[::-1], cells[::-1]
            assert cells[np.diff(known) < -1e-9].sum() < 1e-6  # of slivers rounding decides
            known = np.sort(known)
            found += np.interp(at, known, sums)
    return found


def judged(p, q, k, change=lambda line, found: (line, found)):
    """The distribution of the token that is kept or drawn, over every tuple of children, and how likely it is one of
    them."""
    line, found = at_a_node(p, q, k)
    line, (weight, here, there, goes, *ends) = change(line, found)
    assert here.dtype == np.float64 and 0 <= goes.min() and goes.max() <= 1
    drafted = np.flatnonzero(q)
    ways = [(here, weight * (1 - goes)), (there, weight * goes)]
    after = {
        (token, other): [behind(*(x[other] for x in (weight, goes, *ends)), at[token]) for at, _ in ways]
        for token, other in itertools.product(drafted, repeat=2)
    }
    kept = np.zeros(len(p))
    for token, *others in itertools.product(drafted, repeat=k):
        first = sum(
            (
                chance[token]
                * np.prod([np.ones(weight[0].shape), *(after[token, other][way] for other in others)], axis=0)
            ).sum()
            for way, (_, chance) in enumerate(ways)
        )
        kept[token] += k * q[token] * np.prod(q[others]) * first * line.passes[0, token]  # any of k alike is the first
    left = np.maximum(p - line.kept[0], 0)
    return kept + (1 - kept.sum()) * (left / left.sum() if left.sum() > 1e-9 else p), kept.sum()


DISTRIBUTIONS = {
    "full": [*np.random.default_rng(0).dirichlet(np.full(4, 0.6), 2)],
    "far apart": [np.array([0.04, 0.06, 0.3, 0.6]), np.array([0.7, 0.2, 0.07, 0.03])],
    "sparse": [np.array([0.0, 0.5, 0.2, 0.3]), np.array([0.4, 0.0, 0.5, 0.1])],
    "equal": [np.array([0.4, 0.3, 0.2, 0.1])] * 2,
    "sure draft": [np.array([0.4, 0.3, 0.2, 0.1]), np.eye(4)[1]],
    "sure target": [np.eye(4)[2], np.array([0.4, 0.3, 0.2, 0.1])],
    "cut off": [np.array([0.0, 0.2, 0.8, 0.0]), np.array([0.0, 0.7, 0.3, 0.0])],
    "both sure": [np.eye(4)[2], np.eye(4)[2]],
    "nothing shared": [np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])],
}


@pytest.mark.parametrize("name", but_slow(DISTRIBUTIONS, *sorted(DISTRIBUTIONS.keys() - {"sparse", "sure target"})))
def test_the_distribution_is_the_targets_and_the_acceptance_the_optimum(name):
    p, q = DISTRIBUTIONS[name]
    for k in (1, 2, 3):
        dist, rate = judged(p, q, k)
        np.testing.assert_allclose(dist, p, atol=1e-6)
        assert rate == pytest.approx(optimal_acceptance(p, q, k, replacement=True), abs=1e-6)


def test_it_accepts_more_than_the_others():
    """So it is another rule than they are; none of them is the optimum."""
    p, q = DISTRIBUTIONS["far apart"]
    for k in (2, 3):
        none, left = 1.0, p
        for _ in range(k):
            none *= 1 - np.minimum(left, q).sum()
            left = np.maximum(left - q, 0) / np.maximum(left - q, 0).sum()
        r = float(factor(*(jnp.asarray(x, jnp.float32)[None] for x in (p, q)), jnp.full(1, float(k)))[0])
        shared = 1 - (1 - np.minimum(p / r, q).sum()) ** k
        assert judged(p, q, k)[1] > max(1 - none, shared) + 1e-3


def test_many_tokens_and_children_in_closed_form():
    """What passes sums up to the optimum, no beginning of the line has less than is wanted of it, and c is a
    distribution."""
    for seed, k in itertools.product(range(3), (1, 2, 5, 16)):
        p, q = np.random.default_rng(seed).dirichlet(np.full(50, 0.2), 2)
        with jax.enable_x64(True):
            line = jax.tree.map(
                np.asarray, optimal.line_of(*map(jnp.asarray, (p[None], q[None], np.full(1, float(k)))))
            )
        assert line.kept.sum() == pytest.approx(optimal_acceptance(p, q, k, replacement=True), abs=1e-10)
        assert (line.kept[0] <= p + 1e-15).all() and (line.level * line.share).sum() == pytest.approx(1, abs=1e-10)
        assert (line.surplus - line.deficit).min() > -1e-12
        assert abs(line.surplus[0, -1] - line.deficit[0, -1]) < 1e-12


@pytest.mark.slow
def test_places_are_uniform_in_float32():
    """At 4,000 tokens: as many children come to lie after a place as lie there, and a token has the density that it
    should."""
    rng, vocab, k, cells = np.random.default_rng(0), 4000, 4, 16
    p, q = rng.dirichlet(np.full(vocab, 0.05), 2).astype(np.float32)
    line = line_of(jnp.asarray(p)[None], jnp.asarray(q)[None], jnp.full(1, float(k)))
    tokens = np.repeat(np.arange(vocab), cells)[None]
    steps = np.tile((np.arange(cells) + 0.5) / cells, vocab)[None].astype(np.float32)
    here, there, goes = (np.asarray(x, np.float64)[0] for x in places(line, tokens, steps))
    weight = np.repeat(q.astype(np.float64), cells) / cells
    assert (goes * weight).sum() > 0.05
    for place in np.linspace(0.05, 0.95, 19):
        behind = (weight * (1 - goes))[here < place].sum() + (weight * goes)[there < place].sum()
        assert behind == pytest.approx(place, abs=float(q.max()) / cells)
    density = k * ((1 - goes) * here ** (k - 1) + goes * there ** (k - 1))
    wanted = np.asarray(line.level)[0, np.asarray(line.rank)[0]]
    assert (weight * abs(density - np.repeat(wanted, cells))).sum() < 1e-5
    assert line.kept.sum() == pytest.approx(optimal_acceptance(p, q, k, replacement=True), abs=1e-5)


# ---- planted faults -------------------------------------------------------------------------------------------------


def all_pass(line, found):
    return line._replace(passes=np.ones_like(line.passes)), found


def nobody_goes(line, found):
    return line, [*found[:3], np.zeros_like(found[3]), *found[4:]]


def surely_goes(line, found):
    return line, [*found[:3], (found[3] > 0) * 1.0, *found[4:]]


def without_a_cap(line, found):
    return line._replace(kept=DISTRIBUTIONS["far apart"][0][None] * 1.0), found


@pytest.mark.parametrize("fault", [all_pass, nobody_goes, surely_goes, without_a_cap])
def test_faults_are_caught(fault):
    p, q = DISTRIBUTIONS["far apart"]
    assert abs(judged(p, q, 2, fault)[0] - p).max() > 1e-3


# ---- by counting ----------------------------------------------------------------------------------------------------


def kept_of_a_tree(p, q):
    """The mean number of tokens kept of "2 | 1 2", given distributions by context. Either of the first two is as likely
    to be chosen, and the children of equal ones are those of one place."""
    line, _ = at_a_node(p[0], q[0], 2)
    passed, both = np.asarray(line.kept)[0], q[0] ** 2 * np.asarray(line.passes)[0]
    rate = lambda token, k: optimal_acceptance(p[1][token], q[1][token], k, replacement=True)
    below = [both[x] * rate(x, 3) + (passed[x] - both[x]) * (rate(x, 1) + rate(x, 2)) / 2 for x in range(len(p[0]))]
    return passed.sum() + sum(below)


@pytest.mark.slow
def test_the_jitted_decoder():
    """Three tokens of 60,000 texts by chi-square at 1e-3, and the mean accepted number within three standard errors."""
    drafter = ModelDrafter(MODEL.lm, IID(tree="2 | 1 2"))
    assert sampled_p_value(drafter, Optimal(), optimise=True) > ALPHA
    kept = np.asarray(generate(drafter, Optimal(), steps=1, optimise=True).stats.accepted) @ np.arange(3)
    expected = kept_of_a_tree(exact(), context_tables(PARAMS["draft"], 2))
    assert abs(kept.mean() - expected) < 3 * kept.std() / np.sqrt(ROWS)


@pytest.mark.slow
def test_the_committed_pair():
    """On distributions of the shipped models: the share of drawn children that pass is the optimum, within three
    standard errors."""
    target, draft = (specjax.models.load(name) for name in ("tiny", "tiny-draft"))
    tokens = jnp.asarray(target.tokenizer.encode("def add(a, b):\n    return a + b\n\nWhat is 17 + 25? It is 42."))[
        None
    ]
    block = Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32))
    read = lambda model: model.lm(model.params, block, None, wants=Wants(logits=True)).logits[0, 4::4]
    dists = [jax.nn.softmax(read(model).astype(jnp.float32)) for model in (target, draft)]
    rule, draws, k = Optimal(), 256, 3

    @jax.jit
    def passed(p, q, key):
        wide = lambda dist: jnp.broadcast_to(dist, (draws, len(dist)))
        own, noise, coins = jax.random.split(key, 3)
        tokens = jax.random.categorical(own, jnp.log(q), shape=(draws, k))
        state = rule.enter(wide(p), jnp.log(wide(q)), jnp.full(draws, k))
        state = rule.compare(state, tokens, jnp.ones(tokens.shape, bool), jax.random.uniform(noise, (*tokens.shape, 3)))
        return jax.random.uniform(coins, (draws,)) < state.chance

    rates, best = [], []
    for n, (p, q) in enumerate(zip(*dists, strict=True)):
        rates.append(np.asarray(passed(p, q, jax.random.key(n))))
        best.append(optimal_acceptance(np.asarray(p), np.asarray(q), k, replacement=True))
    errors = np.sqrt(sum(b * (1 - b) / draws for b in best)) / len(best)
    assert len(best) >= 5 and np.mean(best) < 0.97
    assert abs(np.mean(rates) - np.mean(best)) < 3 * errors


def test_what_fits():
    for drafter in (ModelDrafter(MODEL.lm, IID(k=2)), ModelDrafter(MODEL.lm, WithoutReplacement(k=1)), MODEL):
        Optimal().check(drafter)
    for expander in (WithoutReplacement(), Static()):
        with pytest.raises(
            ValueError, match="the optimal verifier cannot judge (coupled|without_replacement) children"
        ):
            Optimal().check(ModelDrafter(MODEL.lm, expander))
