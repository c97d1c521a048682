"""`specjax train lm`: the loss is that of transformers, and what is written is a model that both read."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import small_training as tiny
from support.objectives import alone, packed
from support.shapes import changed

from specjax import cli, models
from specjax.assembly.registry import build_drafter
from specjax.models import LlamaLM
from specjax.objectives import teacher
from specjax.objectives.base import Batch
from specjax.objectives.next_token import NextToken, without_prompts
from specjax.serve.engine import Engine
from specjax.train.loop import Run

SHAPES = {"llama": tiny.TARGET, "qwen3": LlamaLM(changed(tiny.TARGET.config, qk_norm=True, tie_word_embeddings=True))}
CONFIG = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG |= {"num_key_value_heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("llama", 6),
        ("llama", teacher.CHUNK),
        ("qwen3", 6),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(shape, size, tmp_path, monkeypatch):
    """Documents share our rows, and each has one of theirs; prompts and padding have no labels there."""
    import torch
    import transformers

    monkeypatch.setattr(teacher, "CHUNK", size)  # 6: three slots of two rows at a time
    lm = SHAPES[shape]
    params = jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, jax.jit(lm.init)(jax.random.key(1)))
    models.save(tmp_path / "model", lm, params)
    objective = NextToken(lm)
    run = jax.jit(jax.value_and_grad(lambda params: objective.loss(params, None, packed(), None), has_aux=True))
    (loss, metrics), grads = run(params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    rows = alone()
    tokens = torch.from_numpy(rows.tokens).long()
    last = rows.mask.shape[1] - np.argmax(rows.mask[:, ::-1], axis=1)
    real = torch.from_numpy((np.arange(rows.mask.shape[1])[None] < last[:, None]).astype(np.int64))
    labels = torch.where(torch.from_numpy(rows.mask), tokens, -100)
    output = theirs(input_ids=tokens, attention_mask=real, labels=labels)
    output.loss.backward()
    assert float(loss) == pytest.approx(output.loss.item(), rel=1e-5)
    assert float(metrics["perplexity"]) == pytest.approx(np.exp(output.loss.item()), rel=1e-4)
    assert int(metrics["weight"]) == int((labels[:, 1:] != -100).sum())
    right = (output.logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
    assert float(metrics["accuracy"]) == pytest.approx(right.float().mean().item(), abs=1e-6)
    models.save(tmp_path / "grads", lm, grads)  # gradients under the names of parameters
    ours = load_file(tmp_path / "grads" / "model.safetensors")
    own = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert own.keys() == ours.keys()
    most = max(np.abs(grad).max() for grad in own.values())
    assert most > 0.01
    for name, grad in own.items():
        np.testing.assert_allclose(ours[name], grad, atol=1e-5 * most, err_msg=name)


def test_what_is_not_due_counts_nothing():
    objective, params = NextToken(tiny.DRAFT), tiny.draft_params()
    loss = jax.jit(lambda batch: objective.loss(params, None, batch, None)[0])
    batch = packed()
    last = jnp.asarray(batch.documents == 2)
    padded = dataclasses.replace(batch, tokens=jnp.where(last, 9, batch.tokens))
    assert float(loss(padded)) == float(loss(batch)) > 0
    prompt = dataclasses.replace(batch, tokens=jnp.asarray(batch.tokens).at[0, 0].set(9))
    assert int(batch.tokens[0, 0]) != 9 and float(loss(prompt)) != float(loss(batch))


def test_a_dropped_prompt_is_its_last_token():
    """Two documents in a row, of which the first has a prompt of three tokens, and one without a prompt: by hand."""
    mask = jnp.asarray([[0, 0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]], bool)
    batch = Batch(jnp.arange(16).reshape(2, 8) % 7 + 1, mask, jnp.asarray([[0] * 5 + [1] * 3, [0] * 8]))
    gone = without_prompts(batch, jax.random.key(0), 1.0)
    assert gone.documents.tolist() == [[1, 1, 0, 0, 0, 2, 2, 2], [0] * 8]
    assert gone.positions.tolist()[0] == [0, 1, 0, 1, 2, 0, 1, 2]
    np.testing.assert_array_equal(gone.due(1), batch.due(1))  # the same tokens are predicted
    assert without_prompts(batch, jax.random.key(0), 0.0).documents.tolist() == (2 * batch.documents).tolist()
    plain = without_prompts(dataclasses.replace(batch, documents=None), jax.random.key(0), 1.0)
    assert plain.documents.tolist()[0] == [1, 1, 0, 0, 0, 0, 0, 0]  # one document: what comes later is no prompt


def test_each_prompt_is_dropped_as_often_as_asked():
    mask = jnp.asarray([[0, 0, 1, 0, 0, 1]] * 300, bool)
    batch = Batch(jnp.ones((300, 6), jnp.int32), mask, jnp.asarray([[0] * 3 + [1] * 3] * 300))
    gone = np.asarray(without_prompts(batch, jax.random.key(1), 0.3).documents)
    first, second = gone[:, 0] == 1, gone[:, 3] == 3
    assert abs(first.mean() - 0.3) < 0.1 and abs(second.mean() - 0.3) < 0.1 and (first != second).any()


@pytest.mark.slow
def test_the_loss_without_prompts_is_that_of_bare_answers():
    lm, params = tiny.DRAFT, tiny.draft_params()
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(1, 30, (3, 9)))
    mask = jnp.asarray([[0] * 4 + [1] * 5] * 3, bool)
    objective = NextToken(lm, drop=1.0)
    got = objective.loss(params, None, Batch(tokens, mask), jax.random.key(0))[0]
    bare = NextToken(lm).loss(params, None, Batch(tokens[:, 3:], mask[:, 3:]), None)[0]
    whole = NextToken(lm).loss(params, None, Batch(tokens, mask), None)[0]
    np.testing.assert_allclose(got, bare, rtol=1e-5)
    assert abs(float(whole - bare)) > 1e-3
    assert objective.held_out(None)[0] == NextToken(lm)


def test_a_share_of_prompts_out_of_range():
    with pytest.raises(ValueError, match=r"dropped prompts in \[0, 1\], got drop=1.5"):
        NextToken(tiny.DRAFT, drop=1.5)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a draft model, a diffusion model, a new model's shape, texts, other texts, and prompts."""
    folder = tmp_path_factory.mktemp("files")
    models.save(folder / "target", tiny.TARGET, tiny.target_params())
    models.save(folder / "draft", tiny.DRAFT, tiny.draft_params())
    models.save(folder / "masked", tiny.DRAFT, tiny.draft_params(), diffusion=models.Masked(31, False))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    texts = [{"prompt": [number, 2], "tokens": rng.integers(1, 32, 9).tolist()} for number in range(1, 25)]
    write = lambda name, lines: (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write("data.jsonl", texts[:3])
    write("other.jsonl", texts[3:])
    write("prompts.jsonl", [{"prompt": [number, 5]} for number in range(1, 9)])
    return folder


def train(files, out, *words):
    """Runs the command with few short rows, and gives its status."""
    given = ["train", "lm", "--target", files / "target", "--output", out]
    words = [*given, "--batch-size", 2, "--length", 24, "--checkpoint-every", 1000, *words]
    return cli.main([str(word) for word in words])


def records(out):
    return [json.loads(line) for line in (out / "training" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft", "draft", "--draft-config", "config.json"], "lm trains one model: give --draft or --draft-config"),
        (["--start", "draft"], "--start is not for lm, which learns the text's own tokens"),
        (["--loss", "tvd"], "--loss is not for lm"),
        (["--draft-vocabulary", "8"], "--draft-vocabulary is not for lm"),
        (["--target", "masked"], "is a diffusion model: `specjax train diffusion` trains it"),
        (["--weights", "int8"], "lm trains target's own weights, and they are int8"),
    ],
)
def test_what_is_refused(files, tmp_path, capsys, words, said):
    there = [str(files / word) if (files / word).exists() else word for word in words]
    assert train(files, tmp_path / "out", "--data", files / "data.jsonl", *there) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
def test_a_draft_model_is_pretrained_and_then_learns_what_the_target_writes(files, tmp_path, capsys):
    """As FastDraft: from nothing, on other text, and on completions of the target."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    learned = ["--steps", 40, "--learning-rate", 0.02]
    held = ["--held-out", files / "data.jsonl"]
    assert (
        train(files, first, "--draft-config", files / "config.json", "--data", files / "other.jsonl", *learned, *held)
        == 0
    )
    assert "perplexity" in capsys.readouterr().err
    last = records(first)[-1]
    assert last["held_out_perplexity"] == pytest.approx(np.exp(last["held_out_loss"]), rel=1e-5)
    assert train(files, second, "--draft", first, "--data", files / "data.jsonl", *learned) == 0
    assert records(second)[-1]["loss"] < 0.6 * records(second)[0]["loss"]
    words = ["--prompts", files / "prompts.jsonl", "--max-new-tokens", 12]
    assert train(files, third, "--draft", second, *words, *learned) == 0
    assert records(third)[-1]["loss"] < 0.7 * records(third)[0]["loss"]
    drafter, params = build_drafter(f"draft:model={third}", models.load(files / "target"))
    assert drafter.lm == models.load(first).lm
    assert (params["embed"]["embedding"] != models.load(second).params["embed"]["embedding"]).any()


@pytest.mark.slow
def test_a_stopped_run_goes_on(files, tmp_path, monkeypatch):
    words = ["--draft", files / "draft", "--data", files / "other.jsonl", "--held-out", files / "data.jsonl"]
    words += ["--steps", 4, "--checkpoint-every", 2]
    assert train(files, tmp_path / "whole", *words) == 0
    save = Run.save

    def killed(run, state, position):
        save(run, state, position)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", killed)
        assert train(files, tmp_path / "stopped", *words) == 130
    assert len(records(tmp_path / "stopped")) == 2
    assert train(files, tmp_path / "stopped", *words, "--resume") == 0
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


@pytest.mark.slow
def test_a_model_learns_few_texts_by_heart(files, tmp_path):
    """The target's own parameters, as in hyperfitting: near zero loss, and greedy decoding writes the texts."""
    import torch
    import transformers

    out = tmp_path / "out"
    words = ["--data", files / "data.jsonl", "--steps", 200, "--learning-rate", 0.01, "--save-dtype", "float32"]
    assert train(files, out, *words) == 0
    assert records(out)[-1]["loss"] < 0.05 and records(out)[-1]["accuracy"] == 1
    texts = [json.loads(line)["tokens"] for line in (files / "data.jsonl").read_text().splitlines()]
    engine = Engine(str(out))
    (record,) = engine.run([engine.request([1, 2], max_new_tokens=9)])
    assert record.tokens == texts[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    written = theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=False)
    assert written[0, 2:].tolist() == record.tokens
