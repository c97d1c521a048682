"""Momentum decoding against sets of n-grams, and what it is refused with."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET, params_of

from specjax.decode import Beam
from specjax.draft import NoDrafter
from specjax.sampling import SamplingArrays
from specjax.sampling.warp import penalise
from specjax.serve.engine import Engine
from specjax.warpers import Text

V, ALPHA, K = 12, 0.05, 5


def chosen(history, logits, alpha, k):
    """The released program's rule, by sets."""
    chances = np.exp(logits - np.logaddexp.reduce(logits))
    seen = {n: {tuple(history[i : i + n]) for i in range(len(history) - n + 1)} for n in range(1, 6)}

    def repeats(token):
        ends = {n: (*history[len(history) - n + 1 :], token) for n in range(1, 6) if n - 1 <= len(history)}
        return max((n for n, gram in ends.items() if gram in seen[n]), default=0)

    likely = np.argsort(-chances, kind="stable")[:k]
    return int(max(likely, key=lambda token: chances[token] - alpha * repeats(token)))


@pytest.mark.parametrize("k", [1, K])
def test_takes_what_the_released_rule_takes(k):
    rng, rows = np.random.default_rng(k), 200
    lengths = rng.integers(1, 24, size=rows)
    tokens = rng.integers(0, 3, size=(rows, 24))  # few ids, so that much repeats
    logits = rng.normal(size=(rows, V)).astype(np.float32)
    logits[:, :3] += 1
    params = SamplingArrays.make(rows, momentum_alpha=ALPHA, momentum_k=k)
    text = Text(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
    got = np.asarray(penalise(jnp.asarray(logits)[:, None], params, jnp.ones(rows, bool), text))[:, 0]
    want = [chosen(tokens[row, : lengths[row]].tolist(), logits[row].astype(float), ALPHA, k) for row in range(rows)]
    assert got.argmax(axis=1).tolist() == want and ((got > -np.inf).sum(axis=1) == k).all()
    moved = (logits.argmax(axis=1) != np.asarray(want)).sum()
    assert moved > rows // 10 if k > 1 else moved == 0


def test_of_greedy_rows_alone():
    model = TARGET, params_of(NoDrafter())["target"]
    with pytest.raises(
        ValueError,
        match="^momentum_alpha chooses the token itself: leave the temperature at 0, or leave momentum_alpha out",
    ):
        Engine(model, drafter="none").request([1], momentum_alpha=0.2, temperature=0.5)
    with pytest.raises(ValueError, match="^momentum_alpha chooses the token itself: leave it out, or decode otherwise"):
        Engine(model, decode=Beam(num_beams=2)).request([1], momentum_alpha=0.2)
