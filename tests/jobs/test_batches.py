"""Batches of rows, as Ray Data maps them: the texts of `generate`, however the rows are split."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from support import processes
from support.two_models import LARGE

import specjax
from specjax.jobs.batches import COLUMNS, Generate

PROMPTS = ["dab", "cc", "kill", "dab", "ace"]
OPTIONS = {"drafter": "none", "temperature": 0.8, "seed": 3, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def complete():
    return Generate(LARGE, batch_size=2, **OPTIONS)


def batch(**columns):
    return {name: np.array(values) for name, values in columns.items()}


def test_any_split_gives_the_texts_of_generate(complete):
    """Sampled; two rows share a prompt, and their ids tell them apart."""
    ids = ["a", "b", "c", "d", "e"]
    rows = [{"prompt": prompt, "id": name} for prompt, name in zip(PROMPTS, ids, strict=True)]
    wanted = specjax.generate(LARGE, rows, batch_size=2, **OPTIONS)
    assert wanted[0].tokens != wanted[3].tokens and len({record.text for record in wanted}) > 3
    for size in (5, 2):
        parts = [slice(at, at + size) for at in range(0, 5, size)]
        found = [complete(batch(prompt=PROMPTS[own], id=ids[own], number=[7] * len(ids[own]))) for own in parts]
        for name in COLUMNS:
            values = [value for own in found for value in own[name]]
            assert values == [getattr(record, name) for record in wanted]
        assert all(
            (own["number"] == 7).all() and own["prompt"].tolist() == PROMPTS[at]
            for own, at in zip(found, parts, strict=True)
        )


def test_rows_that_are_equal_have_equal_texts(complete):
    """Without ids nothing tells rows apart, in one batch as in two; another seed does."""
    together = complete(batch(prompt=PROMPTS, seed=[3, 3, 3, 4, 3]))["text"].tolist()
    alone = [complete(batch(prompt=[prompt]))["text"].item() for prompt in PROMPTS]
    assert [*together[:3], together[4]] == [*alone[:3], alone[4]] and together[3] != together[0] == alone[3]


def test_values_as_tables_have_them(complete):
    """Token ids as arrays, options that only some rows have, a row without a prompt, columns of other things."""
    prompts = np.empty(3, object)
    prompts[:] = [np.array([3, 0, 1]), "dab", None]
    found = complete({"prompt": prompts, "max_new_tokens": np.array([2.0, np.nan, 2.0]), "vector": np.ones((3, 4))})
    assert found["tokens"][0] == found["tokens"][1][:2] and len(found["tokens"][1]) > 2
    assert found["finish_reason"].tolist()[2] == "error" and found["text"][2] is None and found["tokens"][2] == []
    assert "needs one of prompt and messages" in found["error"][2] and found["error"][0] is None
    none = complete(batch(prompt=np.array([], "U3")))
    assert [len(none[name]) for name in ("prompt", *COLUMNS)] == [0] * 5


def test_a_bad_row_ends_no_batch_and_other_columns_are_not_read(complete):
    """Bytes where a line has an object, a whole id that a table holds as a float, and a column that no line could have."""
    deep = np.empty(3, object)
    for _ in range(100):
        deep[0] = [deep[0]]
    rows = batch(prompt=["dab", "dab", "d\ud800"], meta=deep)
    rows |= {"drafter": np.array([b"x", None, None], object), "id": np.array([5.0, 6.0, np.nan])}
    found = complete(rows)
    assert found["error"][0].startswith("a value that JSON does not have") and "not valid Unicode" in found["error"][2]
    assert found["error"][1] is None and found["meta"] is rows["meta"]
    assert found["tokens"][1] == complete(batch(prompt=["dab"], id=[6]))["tokens"][0]


@pytest.mark.parametrize("given", ["dab", {"prompt": "dab"}, [{"prompt": "dab"}]])
def test_a_batch_of_another_kind(complete, given):
    with pytest.raises(ValueError, match="a batch is a dict of columns"):
        complete(given)


@pytest.mark.parametrize(
    ("columns", "message"),
    (
        ({"question": ["dab"]}, "needs a column prompt or messages; its columns are question"),
        ({"prompt": ["dab"], "text": ["x"]}, "has a column 'text', which the completions would replace"),
        ({"prompt": ["dab"], "id": [1, 2]}, "columns differ in length"),
    ),
)
def test_a_batch_that_cannot_be_used(complete, columns, message):
    with pytest.raises(ValueError, match=message):
        complete(batch(**columns))


def test_options_that_cannot_be_used():
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        Generate(LARGE, batch_size=0)
    with pytest.raises(TypeError, match="Generate.. has no keyword 'max_tokens': it is max_new_tokens here"):
        Generate(LARGE, max_tokens=3)
    with pytest.raises(ValueError, match="temperature"):
        Generate(LARGE, temperature=-1.0)


MAPPED = """
import sys
import ray
from specjax.jobs.batches import Generate
ray.init("local", include_dashboard=False, log_to_driver=False)
rows = [{"prompt": [1 + i % 4] * (1 + i % 3), "id": f"{i}", "number": i} for i in range(12)]
rows.append({"messages": [{"role": "user", "content": "x"}], "id": "12", "number": 12})
options = {"model": sys.argv[1], "drafter": "none", "temperature": 0.9, "max_new_tokens": 5, "batch_size": 2}
found = ray.data.from_items(rows, override_num_blocks=3).map_batches(
    Generate, fn_constructor_kwargs=options, batch_size=4, compute=ray.data.ActorPoolStrategy(size=2)
)
found = sorted(found.take_all(), key=lambda row: row["number"])
import specjax
wanted = specjax.generate(sys.argv[1], [{k: row[k] for k in ("prompt", "id")} for row in rows[:12]], drafter="none",
                          temperature=0.9, max_new_tokens=5)
assert [list(row["tokens"]) for row in found[:12]] == [record.tokens for record in wanted]
assert [row["finish_reason"] for row in found[:12]] == [record.finish_reason for record in wanted]
assert "no tokenizer" in found[12]["error"] and found[12]["finish_reason"] == "error", found[12]
print(len(found))
"""


@pytest.mark.slow
@pytest.mark.covers("jobs", "ray")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'specjax[ray]'")
def test_ray_maps_batches(tmp_path):
    """Two workers, blocks that do not divide into batches, a model without a tokenizer."""
    model = processes.save(tmp_path / "model")
    words = [sys.executable, "-c", MAPPED, str(model)]
    environment = processes.environment(1) | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(words, env=environment, cwd=processes.ROOT, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout.strip()[-2:]) == (0, "13"), done.stderr[-2000:]
