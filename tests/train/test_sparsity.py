"""The losses of BlockFFN's routers: numbers by hand, torch's gradients, documents, and a run of the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.objectives import packed

from specjax import cli, models
from specjax.models.block_ffn import blocks_of
from specjax.models.llama import LlamaLM
from specjax.objectives.base import Batch
from specjax.objectives.means import MEAN
from specjax.objectives.next_token import NextToken
from specjax.objectives.sparsity import Sparsity, changed, chunks, shares, unused

EPS = 1e-5


def row(length, **more):
    tokens = jnp.zeros((1, length), jnp.int32)
    return Batch(tokens, jnp.ones((1, length), bool), **more)


def test_numbers_by_hand():
    """Products over the chunk: 0.5 * 0.9, 1 and 0.8 * 0.3. Cross-entropies at logits 2 and -1."""
    given = jnp.asarray([[[0.5, 0, 0.2], [0.1, 0, 0.7]]])
    found = unused(given, jnp.ones((1, 2), bool), jnp.zeros((1, 2), jnp.int32))
    assert float(found[0, 0]) == pytest.approx(0.436652, abs=1e-6)
    raw = jnp.asarray([[[0.02, -0.01], [0.01, 0.03]]])
    assert float(changed(raw, 100.0)[0, 0]) == pytest.approx(0.965323, abs=1e-6)


def test_losses_and_gradients_are_those_of_torch():
    """Of two layers, in a row of two documents with 8 and 4 tokens and chunks of 4; as the publication computes each."""
    torch = pytest.importorskip("torch")
    length, ends, size = 12, (8, 12), 4
    documents = jnp.asarray([[0] * 8 + [1] * 4], jnp.int32)
    raw = [np.random.default_rng(seed).normal(size=(length, 5)).astype(np.float32) * 0.03 for seed in (0, 1)]
    sparsity = Sparsity(0.05, size, 0.002)

    def ours(raw):
        return sparsity([x[None] for x in raw], row(length, documents=documents), EPS, MEAN)

    (loss, metrics), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))([jnp.asarray(x) for x in raw])
    theirs = [torch.from_numpy(x).requires_grad_() for x in raw]
    chunk, local = [], []
    for x in theirs:
        active = torch.relu(x)
        normed = active * torch.rsqrt(active.pow(2).mean(-1, keepdim=True) + EPS)
        share = normed / (normed.sum(-1, keepdim=True) + 1e-5)
        logs = torch.log(1 - share.view(length // size, size, -1) + 1e-5).sum(1)
        chunk.append(1 - torch.exp(logs).mean())
        after = [t for t in range(1, length) if t not in ends]
        left, right = x[[t - 1 for t in after]], x[after]
        local.append(torch.nn.functional.binary_cross_entropy_with_logits(left * 100, torch.sigmoid(right * 100)))
    wanted = 0.05 * sum(chunk) / 2 + 0.002 * sum(local) / 2
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    assert float(metrics["chunk_sparsity"]) == pytest.approx((sum(chunk) / 2).item(), rel=1e-5)
    assert float(metrics["locality"]) == pytest.approx((sum(local) / 2).item(), rel=1e-5)
    for own, other in zip(grads, theirs, strict=True):
        assert np.abs(other.grad.numpy()).max() > 1e-3
        np.testing.assert_allclose(own, other.grad.numpy(), rtol=1e-5, atol=1e-5)
    used = np.stack([x > 0 for x in raw])
    assert float(metrics["token_experts"]) == pytest.approx(used.mean())
    assert float(metrics["chunk_experts"]) == pytest.approx(used.reshape(2, 3, size, 5).any(axis=2).mean())


def test_chunks_begin_with_documents_and_padding_counts_nothing():
    batch = packed()
    found = np.asarray(chunks(batch, 4))
    assert found[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4]
    raw = jnp.asarray(np.random.default_rng(0).normal(size=(*batch.tokens.shape, 5)), jnp.float32)
    of = jax.jit(lambda raw: Sparsity(1.0, 4, 1.0)([raw], batch, EPS, MEAN))
    loss, metrics = of(raw)
    padding = ~np.asarray(batch.mask) & (np.arange(14)[None] > 10)
    assert padding.any()
    other, more = of(jnp.where(padding[:, :, None], 7.0, raw))
    assert float(loss) == pytest.approx(float(other), rel=1e-6)
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {name: float(x) for name, x in more.items()}
    )
    assert float(shares(raw, EPS).sum(axis=-1).max()) == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_an_objective_adds_them():
    """And only them: text and metrics of text are those without."""
    params, batch = jax.jit(tiny.BLOCKS.init)(jax.random.key(0)), packed()
    run = lambda sparsity: jax.jit(lambda: NextToken(tiny.BLOCKS, sparsity).loss(params, None, batch, None))()
    (plain, words), (both, more) = run(None), run(Sparsity(0.3, 4, 0.7))
    assert words.keys() == more.keys() - {"chunk_sparsity", "locality", "token_experts", "chunk_experts"}
    added = 0.3 * float(more["chunk_sparsity"]) + 0.7 * float(more["locality"])
    assert float(both) - float(plain) == pytest.approx(added, rel=1e-4)
    assert 0 < float(more["token_experts"]) <= float(more["chunk_experts"]) <= 1


def test_what_is_refused():
    for fields, message in (
        ({"chunk": -1.0}, "lm: chunk must not be negative"),
        ({"chunk": 1.0, "chunk_length": 0}, "chunk_length must be at least 1 token, got 0"),
        ({"chunk_length": 8}, "give chunk or locality a factor"),
    ):
        with pytest.raises(ValueError, match=message):
            Sparsity(**fields)
    with pytest.raises(ValueError, match="no layer of this model is a BlockFFN"):
        blocks_of(tiny.DRAFT.config)


@pytest.mark.slow
def test_a_run_of_the_command_makes_experts_few(tmp_path, capsys):
    """With the factors, a chunk of the same texts uses fewer experts than without; a model without routers is refused."""
    config = dataclasses.replace(tiny.BLOCKS.config, family="minicpm")
    params = jax.jit(tiny.BLOCKS.init)(jax.random.key(0))
    models.save(tmp_path / "model", LlamaLM(config), params)
    models.save(tmp_path / "plain", tiny.TARGET, tiny.target_params())
    rng = np.random.default_rng(0)
    texts = [{"prompt": [i, 2], "tokens": rng.integers(1, 32, 20).tolist()} for i in range(1, 13)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    given = [
        "train",
        "--target",
        "model",
        "--data",
        "data.jsonl",
        "--batch-size",
        "2",
        "--length",
        "24",
        "--steps",
        "60",
    ]
    given += ["--learning-rate", "0.02", "--checkpoint-every", "1000"]
    there = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in given]
    last = {}
    for name, line in (("off", "lm:chunk=0.000001,chunk_length=8"), ("on", "lm:chunk=4,chunk_length=8,locality=0.1")):
        out = tmp_path / name
        assert cli.main([there[0], line, *there[1:], "--output", str(out)]) == 0
        last[name] = json.loads((out / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["on"]["chunk_experts"] < 0.8 * last["off"]["chunk_experts"]
    assert last["on"]["chunk_sparsity"] < 0.8 * last["off"]["chunk_sparsity"]
    there[there.index(str(tmp_path / "model"))] = str(tmp_path / "plain")
    capsys.readouterr()
    assert cli.main([there[0], "lm:chunk=0.05", *there[1:], "--output", str(tmp_path / "refused")]) == 2
    assert "no layer of this model is a BlockFFN" in capsys.readouterr().err
