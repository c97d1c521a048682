"""Every loss against its formula in float64, its gradient against finite differences and closed forms."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.objectives.losses import (
    JSD,
    LK,
    LOSSES,
    TVD,
    TVDPP,
    CrossEntropy,
    ForwardKL,
    acceptance,
    agreement,
)
from specjax.objectives.means import MEAN
from specjax.train.select import select

B, T, V = 2, 3, 7
RNG = np.random.default_rng(0)
TARGET, DRAFT, REFERENCE = (2 * RNG.standard_normal((B, T, V)) for _ in range(3))
MASK = np.array([[True, True, False], [True, True, True]])


def dist(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def mean(values):
    return values[MASK].mean()


def kl(a, b):
    return (a * (np.log(a) - np.log(b))).sum(axis=-1)


def kl_of_likeliest(p, q, count):
    at = np.argsort(p, axis=-1)[..., -count:]
    return kl(np.take_along_axis(p, at, axis=-1), np.take_along_axis(q, at, axis=-1))


def jsd(p, q, beta):
    middle = beta * p + (1 - beta) * q
    return beta * kl(p, middle) + (1 - beta) * kl(q, middle)


def alpha(p, q):
    return np.minimum(p, q).sum(axis=-1)


def tvd(p, q):
    return 0.5 * np.abs(p - q).sum(axis=-1)


def sigma(p, q):
    """The standard deviation of the reward 1[p > q] over counted positions and tokens drawn from q there, by enumeration."""
    reward, chance = (q < p)[MASK], q[MASK] / MASK.sum()
    middle = (chance * reward).sum()
    return np.sqrt((chance * (reward - middle) ** 2).sum()) + 1e-6


def lk_lambda(p, q, fixed, scale=0.8, decay=2.0):
    """`fixed` is the distribution that the weight is computed from: held constant in the gradient."""
    share = scale * math.exp(-decay * mean(alpha(p, fixed)))
    return share * mean(kl(p, q)) + (1 - share) * (1 - mean(alpha(p, q)))


FORMULAS = {
    "forward_kl": (LOSSES["forward_kl"](), lambda p, q, fixed: mean(kl(p, q))),
    "forward_kl of two": (ForwardKL(2, 3.0), lambda p, q, fixed: mean(kl(p, q) + 3 * kl_of_likeliest(p, q, 2))),
    "reverse_kl": (LOSSES["reverse_kl"](), lambda p, q, fixed: mean(kl(q, p))),
    "jsd": (JSD(), lambda p, q, fixed: mean(jsd(p, q, 0.5))),
    "jsd 0.2": (JSD(0.2), lambda p, q, fixed: mean(jsd(p, q, 0.2))),
    "tvd": (TVD(), lambda p, q, fixed: mean(tvd(p, q))),
    "tvdpp": (TVDPP(), lambda p, q, fixed: mean(tvd(p, q)) / sigma(p, fixed)),
    "lk alpha": (LK(), lambda p, q, fixed: -math.log(mean(alpha(p, q)))),
    "lk lambda": (LK("lambda", 0.8, 2.0), lk_lambda),
    "cross_entropy": (
        CrossEntropy(),
        lambda p, q, fixed: mean(-np.log(np.take_along_axis(q, p.argmax(-1)[..., None], -1)[..., 0])),
    ),
}


def test_every_loss_has_a_formula_here():
    assert {type(loss) for loss, _ in FORMULAS.values()} == set(LOSSES.values())


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_are_the_formulas(name):
    loss, formula = FORMULAS[name]
    value, grad = jax.value_and_grad(lambda z: loss(jnp.asarray(TARGET), z, jnp.asarray(MASK)))(jnp.asarray(DRAFT))
    p, q = dist(TARGET), dist(DRAFT)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, formula(p, q, q), rtol=1e-5)
    step, wanted = 1e-5, np.zeros_like(DRAFT)
    for at in np.ndindex(DRAFT.shape):
        ends = []
        for sign in (1, -1):
            moved = DRAFT.copy()
            moved[at] += sign * step
            ends.append(formula(p, dist(moved), q))
        wanted[at] = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(grad, wanted, atol=2e-6)
    assert not np.any(np.asarray(grad)[0, 2])  # masked


@pytest.mark.parametrize("name", FORMULAS)
def test_equal_distributions_lose_nothing(name):
    loss, _ = FORMULAS[name]
    same = jnp.asarray(TARGET, jnp.float32)
    value, grad = jax.value_and_grad(lambda z: loss(same, z, jnp.asarray(MASK)))(same)
    if name not in ("cross_entropy", "forward_kl of two"):  # they are least elsewhere
        np.testing.assert_allclose(value, 0, atol=2e-6)
        np.testing.assert_allclose(grad, 0, atol=2e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_extremes_stay_finite(name):
    """Distributions without common support, tokens that cannot come, and nothing to predict."""
    loss, _ = FORMULAS[name]
    far = jnp.full((1, 2, V), -1e4).at[:, :, 0].set(1e4)
    other = jnp.full((1, 2, V), -1e4).at[:, :, 1].set(1e4)
    for target, draft in ((far, other), (far, far)):
        value, grad = jax.value_and_grad(lambda z, p: loss(p, z, jnp.ones((1, 2), bool)))(draft, target)
        assert np.isfinite(value) and np.all(np.isfinite(grad))
    never = (
        jnp.zeros((1, 2, V)).at[:, :, 3:].set(-jnp.inf)
    )  # both leave out the same tokens, as a draft vocabulary does
    value, grad = jax.value_and_grad(lambda z: loss(never, z, jnp.ones((1, 2), bool)))(never.at[:, :, 0].set(1.0))
    assert np.isfinite(value) and np.all(np.isfinite(grad))
    nothing = jnp.zeros((B, T), bool)
    value, grad = jax.value_and_grad(lambda z: loss(jnp.asarray(TARGET), z, nothing))(jnp.asarray(DRAFT))
    assert value == 0 and not np.any(grad)


def test_gradient_of_acceptance_in_closed_form():
    p, q = dist(TARGET), dist(DRAFT)
    below = q < p
    wanted = q * (below - (q * below).sum(axis=-1, keepdims=True))
    grad = jax.grad(lambda z: acceptance(jnp.asarray(TARGET), z).sum())(jnp.asarray(DRAFT))
    np.testing.assert_allclose(grad, wanted, atol=1e-6)
    np.testing.assert_allclose(acceptance(jnp.asarray(TARGET), jnp.asarray(DRAFT)), 1 - tvd(p, q), rtol=1e-5)
    assert np.array_equal(agreement(jnp.asarray(TARGET), jnp.asarray(DRAFT)), p.argmax(-1) == q.argmax(-1))


def gradient(loss):
    return np.asarray(jax.grad(lambda z: loss(jnp.asarray(TARGET), z, jnp.asarray(MASK)))(jnp.asarray(DRAFT)))


def test_tvdpp_is_tvd_over_sigma_and_a_policy_gradient():
    spread = sigma(dist(TARGET), dist(DRAFT))
    np.testing.assert_allclose(gradient(TVDPP()), gradient(TVD()) / spread, atol=1e-6)
    assert abs(spread - 1) > 0.3  # or the line above would not see sigma

    def surrogate(z, baseline):
        """`-E_q[(r - baseline) grad log q]`, the expectation in full."""
        log_q = jax.nn.log_softmax(z)
        reward = (jnp.exp(log_q) < dist(TARGET)).astype(jnp.float32)
        weight = jax.lax.stop_gradient(jnp.exp(log_q) * (reward - baseline)) / spread
        return -MEAN((weight * log_q).sum(axis=-1), jnp.asarray(MASK))

    for baseline in (0.0, 0.4, -3.0):  # a constant added to the reward changes nothing
        grad = jax.grad(surrogate)(jnp.asarray(DRAFT), baseline)
        np.testing.assert_allclose(gradient(TVDPP()), grad, atol=2e-6)


def test_lk_between_its_ends():
    mean_alpha = mean(alpha(dist(TARGET), dist(DRAFT)))
    np.testing.assert_allclose(gradient(LK("alpha")), gradient(TVD()) / mean_alpha, atol=1e-6)
    np.testing.assert_allclose(gradient(LK("lambda", 1.0, 0.0)), gradient(ForwardKL()), atol=1e-6)
    np.testing.assert_allclose(gradient(LK("lambda", 0.0, 0.0)), gradient(TVD()), atol=1e-6)
    np.testing.assert_allclose(gradient(LK("lambda", 1.0, 1e3)), gradient(TVD()), atol=1e-6)


def test_cross_entropy_takes_labels():
    labels = np.array([[0, 1, 2], [3, 4, 5]])
    args = jnp.asarray(TARGET), jnp.asarray(DRAFT), jnp.asarray(MASK)
    own = CrossEntropy("text")(*args, jnp.asarray(labels))
    q = np.take_along_axis(dist(DRAFT), labels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(own, mean(-np.log(q)), rtol=1e-5)
    some = CrossEntropy("text")(
        *args, jnp.asarray(np.where(labels == 4, -1, labels))
    )  # of these the draft has no column
    np.testing.assert_allclose(some, -np.log(q)[MASK & (labels != 4)].mean(), rtol=1e-5)
    assert CrossEntropy()(*args, jnp.asarray(labels)) == CrossEntropy()(*args)  # its labels are the target's
    with pytest.raises(ValueError, match="labels=text needs the text's tokens"):
        CrossEntropy("text")(*args)


def test_weights_are_a_mask_with_shades():
    weights = np.array([[0.5, 2.0, 0.0], [0.0, 0.25, 1.0]])
    got = TVD()(jnp.asarray(TARGET), jnp.asarray(DRAFT), jnp.asarray(weights))
    np.testing.assert_allclose(got, np.average(tvd(dist(TARGET), dist(DRAFT)), weights=weights), rtol=1e-5)


def test_the_mean_is_over_tokens_not_rows():
    """Rows of two and three tokens: parts weighted by their tokens make the whole, equal weights would not."""
    parts = [TVD()(TARGET[i : i + 1], DRAFT[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    whole = TVD()(TARGET, DRAFT, MASK)
    np.testing.assert_allclose((2 * parts[0] + 3 * parts[1]) / 5, whole, rtol=1e-6)
    assert abs((parts[0] + parts[1]) / 2 - whole) > 1e-3


@pytest.mark.parametrize(
    "make",
    [
        lambda: JSD(0.0),
        lambda: JSD(1.0),
        lambda: LK("beta"),
        lambda: LK(kl_scale=2.0),
        lambda: LK(kl_decay=-1.0),
        lambda: CrossEntropy("words"),
    ],
)
def test_fields_out_of_range(make):
    with pytest.raises(ValueError, match="loss (jsd|lk|cross_entropy): "):
        make()


def test_losses_are_static():
    for kind in LOSSES.values():
        assert hash(kind()) == hash(dataclasses.replace(kind()))


def chosen(keep, mask=MASK):
    return np.asarray(select(*map(jnp.asarray, (TARGET, DRAFT, REFERENCE, mask)), keep))


@pytest.mark.parametrize("keep", [0.01, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0])
def test_selected_tokens_have_the_most_room(keep):
    room = kl(dist(TARGET), dist(DRAFT)) - kl(dist(TARGET), dist(REFERENCE))
    count = max(1, round(keep * MASK.sum()))
    threshold = np.sort(room[MASK])[-count]
    assert np.array_equal(chosen(keep), MASK & (room >= threshold))
    assert chosen(keep).sum() == count and abs(count / MASK.sum() - keep) <= 1 / MASK.sum()


def test_keeping_all_is_the_plain_loss():
    assert np.array_equal(chosen(1.0), MASK)
    assert not chosen(0.5, np.zeros_like(MASK)).any()
    grad = jax.grad(lambda z: select(TARGET, z, REFERENCE, MASK, 0.4).astype(jnp.float32).sum())(jnp.asarray(DRAFT))
    assert not np.any(grad)
