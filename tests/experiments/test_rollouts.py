"""Training by rollouts: the step, one small run of all of it, and the page against its results."""

import json

import jax
import jax.numpy as jnp
import pytest
from support.small_target import TARGET

from experiments.rollouts import report, train
from specjax.objectives.base import Batch
from specjax.rollouts import token_logprobs

SMALL = train.Sizes(updates=3, prompts=2, group=2, new=8, longest=64, every=2, fits=1, held_out=1)


@pytest.mark.slow
def test_an_update_raises_what_was_rewarded():
    target = TARGET.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 3, 24)
    batch = Batch(tokens, jnp.broadcast_to(jnp.arange(12)[None] >= 4, (4, 12)))
    old = token_logprobs(TARGET, target, tokens)
    moments, rewards = train.optimizer.init(target), jnp.asarray([[1.0, 0.0], [1.0, 1.0]])
    target, _ = train.update(TARGET, target, moments, batch, rewards)
    gain = jnp.where(batch.mask, token_logprobs(TARGET, target, tokens) - old, 0.0).sum(axis=1)
    assert gain[0] > 0 > gain[1]


def test_questions_are_those_with_short_prompts():
    class Words:
        apply_chat_template = staticmethod(lambda chat, **more: {"input_ids": chat[0]["content"].split()})

    asked = train.asked_of(train.tasks.generate("lists", level=2, seed=3, count=20), 2, Words(), 20)
    assert [len(ids) <= 20 for _, ids in asked] == [True, True]
    with pytest.raises(ValueError, match="fewer than 3 questions have at most 1 tokens"):
        train.asked_of([asked[0][0]], 3, Words(), 1)


@pytest.mark.slow
def test_a_small_run_writes_results_tables_and_picture(tmp_path, capsys):
    (tmp_path / "README.md").write_text("Said.\n\n<!-- measured -->\n<!-- end -->\n")
    report.finish(tmp_path, train.measured(SMALL))
    found, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "README.md").read_text()
    assert [row["update"] for row in found["rows"]] == [0, 1, 2] and page.count("| plain |") == 1
    assert [len(found["held_out"][name]) for name in ("before", "after")] == [4, 4]
    assert ["refresh_seconds" in row for row in found["rows"]] == [False, True, False]
    for row in found["rows"]:
        assert list(row["decoders"]) == list(train.DECODERS) and 0 <= row["reward"] <= 1
        assert all(own["seconds"] > 0 and not own["other_texts"] for own in row["decoders"].values())
        assert row["decoders"]["plain"]["tokens_per_step"] == 1.0
        assert row["decoders"]["plain"]["passes"] >= max(own["passes"] for own in row["decoders"].values())
    assert (tmp_path / "rollouts.png").stat().st_size and "points, 95% interval" in capsys.readouterr().out


def test_the_page_says_what_its_results_do():
    found, page = json.loads((report.HERE / "results.json").read_text()), (report.HERE / "README.md").read_text()
    assert report.written(page, found) == page, "run python -m experiments.rollouts.train --show"
    assert (report.HERE / "rollouts.png").exists() and report.picture(found).axes
    assert all(len(found["held_out"][name]) == 256 for name in ("before", "after"))
