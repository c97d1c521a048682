"""What the recipe of the diffusion model masks, and the lines that its evaluation fills in."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models

MASKING = tomllib.loads((Path(__file__).parents[2] / "experiments" / "diffusion" / "config.toml").read_text())[
    "masking"
]


def masks(rows=400, length=128, **changes):
    from experiments.diffusion.masking import corrupt

    return map(np.asarray, corrupt(jax.random.key(0), rows, length, MASKING | changes))


def test_every_row_learns_something_and_the_first_token_is_known():
    masked, learned = masks()
    assert learned.any(axis=1).all() and not (learned & ~masked).any() and not masked[:, 0].any()


def test_rows_of_each_kind():
    """Anywhere; a span with both sides known; a block behind which nothing is."""
    masked, learned = masks(uniform=1.0, infill=0.0, most=0.6)
    assert (masked == learned).all() and 0.25 < masked[:, 1:].mean() < 0.35 and masked[:, 1:].mean(axis=1).max() < 0.75
    masked, learned = masks(uniform=0.0, infill=1.0, span=16)
    ends = [np.flatnonzero(row)[[0, -1]] for row in masked]
    assert (masked == learned).all() and max(last - first for first, last in ends) < 16
    masked, learned = masks(uniform=0.0, infill=0.0, block=32)
    for row, own in zip(masked, learned, strict=True):
        at = np.flatnonzero(own)
        assert at[-1] - at[0] < 32 and (row & ~own)[at[-1] + 1 :].sum() == (row & ~own).sum()
        assert row[at[0] + 32 :].all()


def test_the_view_to_the_right_opens():
    """None, then exponentially more, then all; and what is not in view does not matter."""
    from experiments.diffusion.train import logits_of, view_ahead

    recipe = {"length": 256, "anneal": 0.1}
    assert [view_ahead(recipe, spent) for spent in (0.0, 0.025, 0.05, 0.075, 0.1, 1.0)] == [0, 3, 15, 63, 256, 256]
    lm = models.LlamaLM(models.LlamaConfig(11, 16, 16, 2, 2, 1, 8, max_position_embeddings=32))
    params = lm.init(jax.random.key(0))
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8]])
    changed = tokens.at[0, 6].set(9)
    narrow, all_of_it = (
        [np.asarray(logits_of(lm, params, x, ahead)) for x in (tokens, changed)] for ahead in (jnp.int32(1), None)
    )
    # two layers see two tokens ahead at most
    np.testing.assert_allclose(narrow[0][0, :4], narrow[1][0, :4], atol=1e-6)
    assert not np.allclose(narrow[0][0, 4:6], narrow[1][0, 4:6]) and not np.allclose(
        all_of_it[0][0, 0], all_of_it[1][0, 0]
    )


def test_training_starts_from_the_target():
    from experiments.diffusion.train import masked_tokenizer, started

    model = models.load("pycode", dtype="float32")
    lm, params = started(model, 1)
    assert lm.config.qkv_bias and not any(
        bool(layer["attention"][name]["bias"].any()) for layer in params["layers"].values() for name in "qkv"
    )
    table, before = params["embed"]["embedding"], model.params["embed"]["embedding"]
    np.testing.assert_array_equal(np.delete(table, 1, axis=0), np.delete(before, 1, axis=0))
    np.testing.assert_allclose(table[1], jnp.mean(before, axis=0), rtol=1e-5, atol=1e-7)
    renamed = masked_tokenizer(model.tokenizer.backend_tokenizer)
    assert (
        renamed.token_to_id("<|mask|>") == 1
        and renamed.encode("def f():").ids == model.tokenizer("def f():")["input_ids"]
    )


def test_infills_are_single_lines_of_held_out_code():
    from experiments.diffusion.evaluate import infills

    tokenizer = models.load("pycode", dtype="float32").tokenizer
    tasks = infills(tokenizer, 50)
    assert len(tasks) == 50 and tasks == infills(tokenizer, 50)
    for task in tasks:
        assert 3 <= len(task.line) <= 10 and "\n" not in tokenizer.decode(task.line)
        assert tokenizer.decode(task.after).startswith(("\n", "\r\n"))
        assert (len(task.before), len(task.after)) == (64, 32)
