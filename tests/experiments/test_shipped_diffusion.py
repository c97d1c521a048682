"""The shipped diffusion model: what it knows of held-out lines, on its own, by the commands' defaults, and as a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import models
from specjax.bench.stdlib import heldout_functions
from specjax.lm import Block, Wants
from specjax.serve.engine import Engine


@pytest.fixture(scope="module")
def model():
    return models.load("pycode-diffusion", dtype="float32")


def test_it_is_the_targets_sibling(model):
    """4M to 8M parameters, 16 MB at most, and the target's vocabulary but for the mask."""
    count = sum(x.size for x in jax.tree.leaves(model.params))
    assert 4e6 < count < 8e6 and sum(file.stat().st_size for file in model.path.iterdir()) <= 16e6
    ours, theirs = (m.tokenizer.get_vocab() for m in (model, models.load("pycode")))
    assert len(ours) == len(theirs) and set(ours.items()) - set(theirs.items()) == {("<|mask|>", model.masked.mask_id)}
    assert model.masked.shift and not model.masked.block


def nats(model, tasks, sides):
    """Mean nats a token of whole masked lines, of which the first, or both, sides are known."""
    total, count = 0.0, 0
    read = jax.jit(
        lambda tokens: model.lm(
            model.params,
            Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32), causal=False),
            None,
            wants=Wants(logits=True),
        ).logits[0]
    )
    for task in tasks:
        after = task.after if sides == 2 else [model.masked.mask_id] * len(task.after)
        ids = [*task.before, *[model.masked.mask_id] * len(task.line), *after]
        logits = np.array(read(jnp.asarray([ids])), np.float64)
        logits[:, model.masked.mask_id] = -np.inf
        for i, token in enumerate(task.line):
            row = logits[len(task.before) + i - 1]
            total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[token]
            count += 1
    return total / count


@pytest.mark.slow
def test_it_knows_more_of_a_line_with_what_follows(model):
    from experiments.diffusion.evaluate import infills

    tasks = [task for task in infills(model.tokenizer, 200) if len(task.line) == 6][:24]
    assert len(tasks) == 24
    both, before = nats(model, tasks, 2), nats(model, tasks, 1)
    assert both < before < 0.75 * np.log(4096)


def test_the_commands_defaults_fill_in(model):
    engine = Engine(model)
    request = engine.request("def total(values):\n    result = 0\n", suffix="\n    return result\n", max_new_tokens=8)
    (record,) = engine.run([request])
    assert record.new_tokens == 8 and record.steps <= 8 and model.masked.mask_id not in record.tokens


@pytest.mark.slow
def test_it_drafts_for_the_target():
    """The shipped pair: plain decoding's text, in fewer steps."""
    target = models.load("pycode", dtype="float32")
    plain, drafted = Engine(target, "none"), Engine(target, "diffuspec")
    for temperature in (0.0, 1.0):
        texts = [
            list(
                engine.run(
                    [engine.request(p, max_new_tokens=48, temperature=temperature) for p in heldout_functions(4)],
                    batch_size=4,
                    ignore_eos=True,
                )
            )
            for engine in (plain, drafted)
        ]
        assert [r.tokens for r in texts[0]] == [r.tokens for r in texts[1]]
        assert sum(r.steps for r in texts[1]) < sum(r.steps for r in texts[0])


def test_a_diffusion_model_is_no_autoregressive_draft():
    with pytest.raises(ValueError, match="is a diffusion model: pick an autoregressive one"):
        specjax.spec.registry.build_drafter("draft:model=pycode-diffusion", models.load("pycode"))
