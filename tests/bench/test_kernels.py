"""The bench of the kernels, at tiny sizes."""

import json

import pytest

from experiments.costs import kernels

TINY = "--batch 1 --nodes 3 --depth 1 --heads 2 --kv-heads 1 --width 128 --slots 32 --filled 9 --vocab 50 --repeats 2 --calls 2"


@pytest.mark.slow
def test_json(capsys):
    assert kernels.main([*TINY.split(), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["copy_bytes_per_second"] > 0 and content["shape"]["nodes"] == 3
    rows = {(row["operation"], row["implementation"]): row for row in content["rows"]}
    for name in kernels.OPERATIONS:
        for kind in (None, "xla"):
            assert rows[name, kind]["ms"] > 0 and rows[name, kind]["share"] > 0 and rows[name, kind]["why"] is None
    for name in ("kv_commit", "verify"):  # no kernel runs on a CPU, and the row says so
        assert rows[name, "pallas"]["ms"] is None and "CPU" in rows[name, "pallas"]["why"]
    assert not any("interpreted" in (kind or "") for _, kind in rows)


def test_table_of_one_operation(capsys):
    assert kernels.main([*TINY.split(), "--operations", "verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "GB/s" in lines[0] and all(line.startswith("verify") for line in lines[1:]) and len(lines) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--operations verify,matmul", "unknown 'matmul'"),
        ("--kv-heads 3", "multiple of --kv-heads 3"),
        ("--depth 16", "--depth 16 must be below"),
        ("--filled 2040", "need --slots"),
        ("--batch 0", "--batch must be at least 1"),
        ("--calls 0", "--calls"),
    ],
)
def test_bad_options(capsys, words, said):
    assert kernels.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
