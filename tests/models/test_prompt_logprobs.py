"""Log-probabilities of prompts in records: those of `specjax.score` and of transformers; every prompt is read once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cli, models
from specjax.models import LlamaLM, Masked, llama_config
from specjax.serve.prompt_logprobs import with_prompt_logprobs
from specjax.serve.request import Record, Request
from specjax.serve.slots import Turn
from specjax.serve.text_reader import Found

PROMPTS = [np.random.default_rng(0).integers(0, 128, size).tolist() for size in (9, 1, 16, 5, 2)]


def check(found, ids, reference):
    """Against transformers: `[T]`, the first token's aside."""
    dists = np.asarray(jax.nn.log_softmax(jnp.asarray(reference.logits(np.asarray([ids]))[0]), axis=1))
    assert found[0] is None
    np.testing.assert_allclose(found[1:], dists[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)


@pytest.mark.slow
def test_records_have_those_of_score_and_of_transformers(references):
    reference = references("llama3")
    model = models.load(reference.folder, dtype="float32")
    options = {"drafter": "none", "max_new_tokens": 3, "batch_size": 2, "num_return_sequences": 2}
    records = specjax.generate(model, PROMPTS, logprobs="prompt", **options)
    plain = specjax.generate(model, PROMPTS, **options)
    assert [record.tokens for record in records] == [record.tokens for record in plain]
    assert plain[0].prompt_logprobs is None and "prompt_logprobs" not in plain[0].to_json()
    for ids, first, second in zip(PROMPTS, records[::2], records[1::2], strict=True):
        check(first.prompt_logprobs, ids, reference)
        assert second.prompt_logprobs == first.prompt_logprobs is not second.prompt_logprobs
    longer = [(ids, record) for ids, record in zip(PROMPTS, records[::2], strict=True) if len(ids) > 1]
    scores = specjax.score(model, [ids[:1] for ids, _ in longer], [ids[1:] for ids, _ in longer], batch_size=2)
    for (_, record), score in zip(longer, scores, strict=True):
        np.testing.assert_allclose(record.prompt_logprobs[1:], score.logprobs, atol=2e-5)


@pytest.mark.slow
def test_a_job_writes_them(references, tmp_path, capsys):
    reference = references("llama3")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in PROMPTS[:2]) + '{"prompt": []}\n')
    words = ["generate", "--model", str(reference.folder), "--dtype", "float32", "--drafter", "none"]
    words += ["--input", str(source), "--output", str(target), "--batch-size", "2", "--max-new-tokens", "3"]
    assert cli.main([*words, "--prompt-logprobs"]) == 1
    *records, bad = [json.loads(line) for line in target.read_text().splitlines()]
    for ids, record in zip(PROMPTS, records, strict=False):
        check(record["prompt_logprobs"], ids, reference)
    assert "prompt_logprobs" not in bad
    capsys.readouterr()
    assert cli.main(words) == 2  # another job
    assert "differs in sampling prompt_logprobs (true there, false here)" in capsys.readouterr().err


def test_diffusion_models_are_refused_before_any_work(tmp_path, capsys):
    lm = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=64))
    models.save(tmp_path / "masked", lm, lm.init(jax.random.key(0)), diffusion=Masked(23, False))
    with pytest.raises(ValueError, match="masked is a diffusion model, whose records have no log-probabilities"):
        specjax.generate(str(tmp_path / "masked"), [[1, 2]], logprobs="prompt")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [1, 2]}\n')
    words = ["generate", "--model", str(tmp_path / "masked"), "--input", str(source), "--output", str(target)]
    assert cli.main([*words, "--prompt-logprobs"]) == 2
    assert "ask an autoregressive model" in capsys.readouterr().err and not target.exists()


def test_every_prompt_is_read_once_and_when_it_is_due():
    read = []

    class Once:
        def run(self, texts, *, batch_size):
            assert len(texts) <= batch_size == 2 and all(text.first == 1 for text in texts)
            read.extend(text.ids for text in texts)
            return [Found([-float(i) for i in text.ids[1:]], False) for text in texts]

    ids = [(1, 2), (3,), (1, 2), (4, 5, 6), (3,)]
    requests = [Request(list(one), one) for one in ids]
    turns = [Turn([(at, Record.failed(None, "x")) for at in some], 0, 0, 0) for some in ([1], [0, 4], [3, 2])]
    due = []
    for turn in with_prompt_logprobs(iter(turns), Once(), requests, 2):
        due.append(list(read))
        assert [record.prompt_logprobs for _, record in turn.finished] == [
            [None, *[-float(i) for i in ids[at][1:]]] for at, _ in turn.finished
        ]
    assert due == [[(1, 2), (3,)], [(1, 2), (3,)], [(1, 2), (3,), (4, 5, 6)]]
