"""What a job holds and does must grow with its lines no faster than they do: bytes and calls are counted, never seconds."""

import dataclasses
import gc
import json
import pickle
import tracemalloc
from collections import Counter

import jax
import numpy as np
import pytest

from specjax import models
from specjax.jobs import generate, jsonl, output, spool
from specjax.jobs.batch_api import Results
from specjax.jobs.completer import RECENT, Asked, Whole
from specjax.jobs.options import JobOptions
from specjax.jobs.spool import Spool
from specjax.jobs.work import make_engine, make_items, make_manifest
from specjax.models import LlamaLM, llama_config
from specjax.sampling.noise import _earlier
from specjax.serve import slots
from specjax.serve.engine import Engine
from specjax.serve.request import Record, Request, needs_of

LONG = 300
"""Tokens of a prompt: a line that is held takes kilobytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lm = LlamaLM(llama_config(300, 8, 8, 1, 2, 1, 4, max_position_embeddings=512))
    models.save(found := tmp_path_factory.mktemp("model") / "m", lm, lm.init(jax.random.key(0)))
    return found


@pytest.fixture
def small_spools(monkeypatch):
    monkeypatch.setattr(spool, "IN_MEMORY", 1 << 12)


def job(folder, path, count):
    """A job of `count` lines, half of them the other half once more, with a bad line among ten."""
    lines = [{"prompt": [(i // 2 + j) % 300 for j in range(LONG)], "max_new_tokens": 1 + i % 3} for i in range(count)]
    texts = ["{" if i % 10 == 9 else json.dumps(line) for i, line in enumerate(lines)]
    (path / "in.jsonl").write_text("\n".join(texts))
    return JobOptions(
        model=str(folder), input=str(path / "in.jsonl"), output=str(path / "out.jsonl"), drafter="none", batch_size=2
    )


def start(options, engine):
    """What a job does before its first token."""
    given = generate._read(options, True)
    items = make_items(options, engine, given)
    whole, manifest = Whole.of(options, engine, items), make_manifest(options, engine, given)
    return given, items, whole, output.Output(options.output, manifest, items, not options.unordered)


def finish(items, out):
    for item in items:
        out.append(Record(item.prompt, None, [1], "length", 1, 1, 1.0, id=item.id, line=item.line))
    out.close()


def grown(what, sizes):
    """Bytes that are held, and at most held, for each further line."""
    found = []
    for size in sizes:
        gc.collect()
        tracemalloc.start()
        try:
            kept = what(size)
            gc.collect()
            found.append(tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
        del kept
    (held, peak), (more, higher) = found
    return (more - held) / (sizes[1] - sizes[0]), (higher - peak) / (sizes[1] - sizes[0])


@pytest.mark.parametrize("unordered", (False, True))
def test_lines_are_not_held(folder, tmp_path, small_spools, unordered):
    """Neither at the start, nor when a job goes on whose records are all there."""
    options = {}
    for size in (64, 384):
        (own := tmp_path / str(size)).mkdir()
        options[size] = dataclasses.replace(job(folder, own, size), unordered=unordered)
    engine = make_engine(options[64], 64)
    for own in options.values():  # what is made once, such as programs and caches, is there
        _, items, _, out = start(own, engine)
        finish(items, out)
    resumed = lambda size: start(options[size], engine)
    held, peak = grown(resumed, (64, 384))
    assert held < 600 and peak < 1200, "an item alone takes 4 kB"


def test_every_line_becomes_a_request_once(folder, tmp_path, small_spools, monkeypatch):
    made, reads = Counter(), Counter()
    request, read = Engine.request, Spool._read
    monkeypatch.setattr(Engine, "request", lambda self, *a, **k: made.update([k["line"]]) or request(self, *a, **k))
    monkeypatch.setattr(Spool, "_read", lambda self, index: reads.update([index]) or read(self, index))
    options = job(folder, tmp_path, 40)
    *_, items, whole, out = start(options, make_engine(options, 40))
    finish(items, out)
    assert set(made.values()) == {1} and len(made) == 36
    assert max(reads.values()) <= 12, "passes over all lines"
    reads.clear()
    *_, out = start(options, make_engine(options, 40))
    assert len(out.done) == 40 and max(reads.values()) <= 12
    out.close()


def test_a_long_text_is_fetched_once(folder, monkeypatch):
    """Not in every call on the device, of which it takes the more the longer it is."""
    fetched = Counter()
    fetch = slots.to_host
    monkeypatch.setattr(
        slots, "to_host", lambda tree: fetched.update([*tree] if isinstance(tree, dict) else ()) or fetch(tree)
    )
    engine = Engine(str(folder), drafter="none")
    requests = [engine.request([1] * 200, max_new_tokens=count, ignore_eos=True) for count in (256, 200)]
    turns = list(engine.turns(requests, slots=2, needs=needs_of(requests)))
    assert [len(record.tokens) for turn in turns for _, record in turn.finished] == [200, 256]
    assert fetched["finish"] == len(turns) >= 8 and fetched["tokens"] == 2


def test_a_spool_is_a_list(small_spools):
    table = np.arange(3)
    values = [
        jsonl.Line(1, "a\ud800", "x", {"seed": 2**70, "stop": ["\n"]}, unknown=("b",)),
        Request([1, 2], (1, 2), line=3, sample=1, max_new_tokens=7, temperature=0.5),
        Record.failed([{"role": "user", "content": "é"}], "no", id=4),
        *[Request("x" * 500, tuple(range(500)), line=i) for i in range(20)],
    ]
    found = Spool(values)
    assert list(found) == values and len(found) == 23 and found[-1] == values[-1] and found[1:4] == values[1:4]
    assert found[0].where == "" and type(found[2]) is Record
    found.append(values[0])
    assert found[5] == values[5] and found[23] == values[0]
    assert list(pickle.loads(pickle.dumps(found))) == [*values, values[0]]
    with pytest.raises(IndexError):
        found[24]
    shared = Spool([Request("a", (1,), constraint=table), Request("b", (1,), constraint=table)])
    assert shared[0].constraint is shared[1].constraint is table


def test_a_full_temporary_folder_is_named(monkeypatch):
    monkeypatch.setattr(spool, "IN_MEMORY", 1)
    found = Spool([Record.failed("x", "no")])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(found._file, "write", full)
    with pytest.raises(
        OSError, match="a temporary file in .*No space left on device.*: set TMPDIR to a folder with room"
    ):
        found.append(Record.failed("y", "no"))


def test_completions_of_an_item_are_told_apart_and_few_are_held(small_spools):
    items = Spool(Request([i], (i,)) for i in range(RECENT + 8))
    asked = Asked(items, [1, 3], 2)
    assert [(one.ids, one.sample) for one in asked] == [((1,), 0), ((1,), 1), ((3,), 0), ((3,), 1)]
    assert [asked[i] for i in range(4)] == list(asked) and asked[-1].ids == (3,)
    every = Asked(items, list(range(len(items))), 1)
    assert [every[i] for i in range(len(every))] == list(items) and len(every._recent) == RECENT


def test_equal_rows_are_numbered_by_their_order():
    rng = np.random.default_rng(0)
    first, second = rng.integers(3, size=(2, 200)).astype(np.uint64)
    seen, expected = Counter(), []
    for pair in zip(first.tolist(), second.tolist(), strict=True):
        expected.append(seen[pair])
        seen[pair] += 1
    assert _earlier(first, second).tolist() == expected and _earlier(first[:0]).tolist() == []


def test_requests_are_read_once_for_what_they_need():
    requests = [
        Request("a", (1,), max_new_tokens=500),
        Request("a", (1,), suppress_tokens=(3, 4, 5)),
        Request("a", (1,), temperature=1.0),
    ]
    needs = needs_of(iter(requests))
    assert not needs.greedy and not needs.brief and dict(needs.form)["suppress_tokens"] == (4,)
    assert needs_of(iter(requests[:1])).greedy and needs_of(iter(requests[:1])).brief
    assert dict(needs_of(iter(requests[:1])).form).get("suppress_tokens") is None


def test_a_record_is_written_without_copies():
    record = Record([1] * 5, None, [2] * 5, "length", 5, 5, 1.0, logprobs=[0.5] * 5)
    found = record.to_json()
    assert (
        found["prompt"] is record.prompt and found["tokens"] is record.tokens and found["logprobs"] is record.logprobs
    )


def test_results_of_a_batch_are_read_one_by_one(tmp_path):
    """In the order of the lines, whatever that of the records."""

    def written(count):
        records = tmp_path / f"{count}.jsonl"
        one = Record(None, "x" * 4000, [1], "length", 1, 1, 1.0)
        own = [dataclasses.replace(one, id=str(i), line=i, sample=sample) for i in range(count) for sample in (1, 0)]
        records.write_text("".join(json.dumps(record.to_json()) + "\n" for record in reversed(own)))
        return records

    paths = {count: written(count) for count in (20, 120)}
    write = lambda count: Results("m", dict.fromkeys(range(count), 1)).write(tmp_path / f"{count}.out", paths[count])
    assert grown(write, (20, 120))[1] < 2000, "a line's records take 8 kB"
    results = [json.loads(line) for line in (tmp_path / "120.out").read_text().splitlines()]
    assert [own["custom_id"] for own in results] == [str(i) for i in range(120)]
    assert {len(own["response"]["body"]["choices"]) for own in results} == {2}
