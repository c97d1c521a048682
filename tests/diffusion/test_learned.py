"""Learn2PD: the ends of its filter, and a filter that is trained, written, and read back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.small_diffusion import LIMITS, PROMPTS, begin, make, params, texts

import specjax
from specjax import cli, models
from specjax.decode import Diffusion
from specjax.diffusion import Credit, EndOfText, Fixed, Learn2PD
from specjax.diffusion.unmask.learn2pd import judge, read_filter
from specjax.diffusion.unmask.learn2pd.objective import TrainFilter
from specjax.models import LlamaLM, Masked, llama_config
from specjax.objectives.base import Batch
from specjax.serve.engine import Engine


def constant(value, width=8, hidden=4):
    """A filter that says the same of every position."""
    filter = Learn2PD(block_length=width, hidden=hidden).init_params(jax.random.key(0), None)
    filter = jax.tree.map(jnp.zeros_like, filter)
    return {**filter, "second": {**filter["second"], "bias": jnp.full((width,), value)}}


@pytest.mark.parametrize("wrap", (lambda policy: policy, Credit), ids=("alone", "behind-credit"))
def test_the_ends_of_a_filter(wrap):
    """One that accepts all takes a pass per block; one that accepts none commits the surest token per pass."""
    decoder = make(wrap(Learn2PD(block_length=8, hidden=4)), 8)
    bold = specjax.run(decoder, params() | {"unmask": constant(9.0)}, begin(decoder))
    open_positions = [limit - len(prompt) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert bold.stats.steps.tolist()[:3] == [-(-count // 8) for count in open_positions[:3]]
    shy = specjax.run(decoder, params() | {"unmask": constant(-9.0)}, begin(decoder))
    if not isinstance(decoder.policy, Credit):
        plain = make(Fixed(), 8)
        assert texts(shy) == texts(specjax.run(plain, params(), begin(plain)))
    assert shy.stats.steps.tolist()[:3] == open_positions[:3]


def test_the_filter_is_a_perceptron():
    filter = Learn2PD(block_length=3, hidden=5).init_params(jax.random.key(1), None)
    sure = np.asarray([[0.2, 1.0, 0.7]], np.float32)
    h = sure @ np.asarray(filter["first"]["kernel"]) + np.asarray(filter["first"]["bias"])
    want = np.asarray(jax.nn.gelu(h)) @ np.asarray(filter["second"]["kernel"]) + np.asarray(filter["second"]["bias"])
    np.testing.assert_allclose(judge(filter, jnp.asarray(sure)), want, rtol=1e-5)


def test_a_damaged_filter_is_one_clear_line(tmp_path):
    file = tmp_path / "filter.safetensors"
    file.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=f"{file} is damaged, or no file of safetensors"):
        read_filter(file)
    save_file({"first.kernel": np.zeros((4, 2), np.float32)}, file)
    with pytest.raises(ValueError, match="is not a filter: it holds first.kernel in place of"):
        read_filter(file)


def test_what_it_needs():
    with pytest.raises(ValueError, match="this Learn2PD is for blocks of 4, not of 8"):
        make(Learn2PD(block_length=4), 8)
    with pytest.raises(ValueError, match="this Credit is for blocks of 4, not of 8"):
        make(Credit(Learn2PD(block_length=4)), 8)
    with pytest.raises(ValueError, match=r"threshold in \(0, 1\)"):
        Learn2PD(threshold=1.0)


class Echo:
    """A model that predicts 5 where the position is even, and 6 where it is odd, surely; the second block as surely wrong."""

    vocab_size = 8

    def __call__(self, weights, block, cache, *, wants):
        want = jnp.where(block.positions % 2 == 0, 5, 6)
        scale = jnp.where(block.positions % 2 == 0, 8.0, 1.0)[:, :, None]
        logits = scale * jax.nn.one_hot(want, 8)
        return type("Output", (), {"logits": logits})


def test_labels_are_what_the_answer_says():
    """Even positions are right and sure, odd ones wrong and unsure: the metrics count the first pass and the one after."""
    objective = TrainFilter(Echo(), 7, False, policy=Learn2PD(block_length=4, hidden=4), passes=3)
    tokens = jnp.asarray([[1, 1, 5, 4, 5, 4]])
    batch = Batch(tokens, jnp.asarray([[False, False, True, True, True, True]]))
    filter = constant(9.0, 4)
    loss, metrics = objective.loss(filter, None, batch, jax.random.key(0))
    # pass 1: 4 open, 2 right; pass 2: 2 open, none right, so all are filled in; pass 3: nothing is open
    assert float(metrics["weight"]) == 6 and float(metrics["acceptance"]) == 1.0
    np.testing.assert_allclose(metrics["right"], 2 / 6, rtol=1e-6)
    p = 1 / (1 + np.exp(-9.0))
    np.testing.assert_allclose(loss, -(2 * np.log(p) + 4 * np.log(1 - p)) / 6, rtol=1e-4)


@pytest.mark.slow
def test_a_filter_is_trained_written_and_read(tmp_path, capsys):
    """A model that knows its answer by heart: the filter learns to take whole blocks."""
    lm = LlamaLM(llama_config(12, 16, 24, 1, 2, 2, 8, max_position_embeddings=64))
    models.save(tmp_path / "model", lm, jax.jit(lm.init)(jax.random.key(0)), diffusion=Masked(11, False))
    lines = [{"prompt": [1, 2], "tokens": [3, 4, 5, 6, 3, 4, 5, 6]}] * 16
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train = lambda name, target, output, steps: cli.main(
        ["train", name, "--target", str(target), "--data", str(tmp_path / "data.jsonl"), "--output", str(output)]
        + ["--steps", str(steps), "--batch-size", "4", "--length", "10", "--learning-rate", "0.02"]
    )
    assert train("diffusion", tmp_path / "model", tmp_path / "taught", 500) == 0
    assert train("learn2pd:block_length=4,hidden=8", tmp_path / "taught", tmp_path / "filter", 150) == 0
    capsys.readouterr()
    engine = Engine(
        str(tmp_path / "taught"),
        decode=Diffusion(unmask=f"learn2pd:model={tmp_path / 'filter'},threshold=0.8", block_length=4),
    )
    (record,) = engine.run([engine.request([1, 2], max_new_tokens=8, ignore_eos=True)])
    assert record.tokens == [3, 4, 5, 6, 3, 4, 5, 6] and record.steps == 2
    stacked = Engine(
        str(tmp_path / "taught"),
        decode=Diffusion(unmask=f"end_of_text+learn2pd:model={tmp_path / 'filter'},threshold=0.8"),
    )
    assert isinstance(stacked.decoder.policy, EndOfText) and stacked.decoder.block_length == 4
    (again,) = stacked.run([stacked.request([1, 2], max_new_tokens=8, ignore_eos=True)])
    assert again.tokens == record.tokens
    with pytest.raises(ValueError, match="was trained for the target"):
        Engine(str(tmp_path / "model"), decode=Diffusion(unmask=f"learn2pd:model={tmp_path / 'filter'}"))
    usual = Engine(str(tmp_path / "taught"), decode=Diffusion(unmask=f"learn2pd:model={tmp_path / 'filter'}"))
    assert usual.decoder.block_length == 4
    with pytest.raises(ValueError, match="for blocks of 4, not of 32"):
        Engine(
            str(tmp_path / "taught"), decode=Diffusion(unmask=f"learn2pd:model={tmp_path / 'filter'}", block_length=32)
        )
    with pytest.raises(ValueError, match="Learn2PD needs parameters of its own"):
        Engine(str(tmp_path / "taught"), decode=Diffusion(unmask=Learn2PD(block_length=4)))


def test_a_filter_has_to_be_named():
    with pytest.raises(ValueError, match="name it with model=FOLDER"):
        Engine("tiny-diffusion", decode=Diffusion(unmask="learn2pd"))
