"""The comparison of refilled slots with static batches."""

import dataclasses

import jax
import numpy as np
import pytest
from support import gguf_files

from experiments.costs import jobs
from specjax import models
from specjax.models import LlamaLM, llama_config
from specjax.serve.engine import Engine


def test_refill_fills_slots_and_changes_no_text():
    lm = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=320))
    model = models.Model(lm, lm.init(jax.random.key(0)), None, (), "toy", None, np.dtype("float32"))
    engine = Engine(model, drafter="none")
    report = jobs.compare(engine, [[1 + i] for i in range(8)], slots=2, repeats=1, peer=False)
    refill, static = report["rows"]
    assert report["tokens"] == sum(jobs.lengths(8)) and refill["equal_texts"] == static["equal_texts"] == 8
    # a static batch of two takes as many passes as its longer text is long
    pairs = np.reshape(jobs.lengths(8), (4, 2))
    assert static["occupancy"] == round(pairs.sum() / (2 * pairs.max(axis=1).sum()), 4) < refill["occupancy"] <= 1
    short = LlamaLM(dataclasses.replace(lm.config, max_position_embeddings=64))
    with pytest.raises(ValueError, match="longer than the 64"):
        jobs.compare(
            Engine(dataclasses.replace(model, lm=short), drafter="none"), [[1]], slots=1, repeats=1, peer=False
        )


@pytest.mark.slow
@pytest.mark.covers("jobs", "folders", "with_transformers", "gguf")
def test_transformers_reads_what_lies_in_a_gguf_file_too(tmp_path):
    for package in ("gguf", "torch"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    gguf_files.build("qwen3", tmp_path / "plain")
    gguf_files.write("qwen3", tmp_path / "plain", tmp_path / "tiny.gguf")
    engine = Engine(models.load(tmp_path / "tiny.gguf"), drafter="none")
    report = jobs.compare(engine, [[5, 7], [9]], slots=2, repeats=1, peer=True, most=12)
    assert [(row["decoder"], row["equal_texts"]) for row in report["rows"]] == [
        ("refill", 2), ("static", 2), ("transformers", 2),
    ]  # fmt: skip


def test_lengths_are_in_their_range():
    counts = jobs.lengths(50, most=40)
    assert len(set(counts)) > 10 and 8 <= min(counts) < max(counts) <= 40
