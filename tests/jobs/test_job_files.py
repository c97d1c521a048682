"""What a job leaves on the disk: its manifest, output lines that no job wrote, and values that a format does not hold."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from specjax import models
from specjax.jobs import jsonl
from specjax.jobs import output as output_module
from specjax.jobs.options import JobOptions
from specjax.jobs.work import make_manifest
from specjax.models import LlamaLM, llama_config
from specjax.serve.request import Record

MANIFEST = """{
  "version": 2,
  "model": {
    "name": "toy",
    "fingerprint": "e3b0c44298fc1c149afbf4c8996fb924",
    "dtype": "float32"
  },
  "decoding": {
    "decode": null,
    "drafter": "none",
    "shared_prefix": true
  },
  "folders": {},
  "sampling": {
    "max_new_tokens": 128,
    "temperature": 0.5,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop": [
      "x"
    ],
    "ignore_eos": false,
    "num_return_sequences": 1,
    "logprobs": false,
    "suffix": null,
    "prompt_logprobs": false
  },
  "seed": 0,
  "input": {
    "sha256": "7e710c326e1a58864a982bfe96a2f1c0167ce04344d9b81c16aa8b4191a718c9",
    "records": 2
  },
  "output": {
    "order": "as finished"
  }
}
"""
"""As the second version of manifests has it."""


def test_a_manifest_stays_what_it_was(tmp_path):
    given = [
        jsonl.parse(1, b'{"prompt": [1, 2], "id": "a", "seed": 3}'),
        jsonl.parse(2, b'{"prompt": "x", "temperature": 1, "colour": 2}'),
    ]
    options = JobOptions(
        drafter="none", temperature=0.5, input="in.jsonl", stop=("x",), shared_prefix=True, unordered=True, batch_size=3
    )
    (tmp_path / "empty").mkdir()
    lm = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=64))
    model = models.Model(lm, None, None, (), "toy", tmp_path / "empty", np.dtype("float32"))
    manifest = make_manifest(options, SimpleNamespace(model=model), given)
    out = output_module.Output(tmp_path / "out.jsonl", manifest, [])
    out.close()
    kept = output_module.manifest_path(tmp_path / "out.jsonl")
    assert kept.read_text() == MANIFEST
    (tmp_path / "out.jsonl").write_bytes(b'{"torn')
    out = output_module.Output(tmp_path / "out.jsonl", manifest, [])
    out.close()
    for odd in (b"[" * 100_000, b"\xff", b"9" * 5000, b"[1]", b"null"):
        kept.write_bytes(odd)
        (tmp_path / "out.jsonl").write_bytes(b"{}\n")
        with pytest.raises(ValueError, match="is not the manifest of a job: move it"):
            output_module.Output(tmp_path / "out.jsonl", manifest, [])
    kept.write_text(MANIFEST.replace('"seed": 0', '"seed": ' + "[" * 900 + "]" * 900))
    with pytest.raises(ValueError, match="another job, which differs in seed"):
        output_module.Output(tmp_path / "out.jsonl", manifest, [])


ODD_LINES = (
    b"[" * 100_000,
    b"9" * 5000,
    b"[1]",
    b"null",
    b'{"finish_reason": "eos", "line": [1]}',
    b'{"finish_reason": "eos", "line": 1, "sample": {}}',
    b'{"finish_reason": "eos", "line": 1, "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
)


@pytest.mark.parametrize("ordered", (True, False))
def test_output_lines_that_no_job_wrote(tmp_path, ordered):
    path = tmp_path / "out.jsonl"
    items = [Record.failed([1], "no", line=1)]
    for odd in ODD_LINES:
        path.write_bytes(b"")
        output_module.Output(path, {}, items, ordered).close()
        path.write_bytes(odd + b"\n")
        with pytest.raises(ValueError, match="line 1 of the output file"):
            output_module.Output(path, {}, items, ordered)


def test_values_that_a_table_or_json_does_not_hold(tmp_path):
    import pyarrow
    from pyarrow import parquet

    from specjax.jobs import parquet as tables

    journal, table = tmp_path / "j.jsonl", tmp_path / "t.parquet"
    records = [{"prompt": "a"}, {"prompt": "\ud800"}, {"prompt": [10**30]}, {"prompt": [{}]}]
    for odd in records[1:]:
        journal.write_text("".join(json.dumps(record) + "\n" for record in (odd, odd)))
        tables.write(table, journal)
        assert [json.loads(row["prompt"]) for row in parquet.read_table(table).to_pylist()] == [odd["prompt"]] * 2
    parquet.write_table(pyarrow.table({"messages": [[b"x"], None], "prompt": [None, "y"]}), table)
    bad, good = tables.read(table)
    assert "a value that JSON does not have" in bad.error and (good.prompt, good.error) == ("y", None)
