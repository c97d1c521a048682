"""Datastores: how positions are sorted, what a folder keeps, the command, and what it refuses."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from specjax import cli, models
from specjax.draft.datastore import SPAN, build, ranks
from specjax.draft.heads.datastore import load_datastore, save_datastore
from specjax.jobs.datastore import read
from specjax.reference import retrieval as oracle

documents_of = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(documents_of)
def test_positions_are_sorted_by_the_text_before_them(documents):
    if max(map(len, documents)) < 2:
        with pytest.raises(ValueError, match="nothing to look up"):
            build(documents, 3)
        return
    store = build(documents, 3)
    kept = [d for d in documents if d]
    assert store["tokens"].tolist() == [3, *(t for d in kept for t in (*d, 3))]
    assert store["suffixes"].tolist() == oracle.sorted_positions(store["tokens"].tolist(), 3, SPAN).tolist()


@pytest.mark.parametrize("span", [1, 2, 4, 8])
def test_ranks_compare_so_many_tokens(span):
    tokens = np.random.default_rng(0).integers(0, 2, 300)
    before = lambda i: [tokens[max(j, 0)] for j in range(i - 1, i - 1 - span, -1)]
    rank = ranks(tokens, span)
    keys = [before(i) for i in range(span, 300)]
    for key, own in zip(keys, rank[span:], strict=True):
        assert [a < key for a in keys] == (rank[span:] < own).tolist()


def test_types():
    assert build([[1, 2]], 65535)["tokens"].dtype == np.uint16
    assert build([[1, 2]], 65536)["tokens"].dtype == np.int32
    assert build([[1, 2]], 9)["suffixes"].dtype == np.int32


@pytest.mark.parametrize("wrong", [[[1, 9]], [[1, -1]]])
def test_ids_outside_the_vocabulary(wrong):
    with pytest.raises(ValueError, match="outside the vocabulary of 9"):
        build(wrong, 9)


# ---- folders --------------------------------------------------------------------------------------------------------


def words(*entries):
    return SimpleNamespace(get_vocab=lambda: {entry: i for i, entry in enumerate(entries)})


def target(vocab_size=4, tokenizer=None, name="target"):
    return SimpleNamespace(lm=SimpleNamespace(vocab_size=vocab_size), tokenizer=tokenizer, name=name)


@pytest.fixture
def saved(tmp_path):
    store = build([[0, 1, 2, 0, 1, 3]], 4)
    save_datastore(tmp_path / "store", store, "maker", 4, words("a", "b", "c", "d"))
    return tmp_path / "store", store


def test_a_folder_gives_back_what_was_saved(saved):
    folder, store = saved
    for own in (None, words("a", "b", "c", "d")):
        got = load_datastore(folder, target(tokenizer=own))
        assert got.keys() == store.keys()
        for name, array in store.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array)
    other = build([[3, 3, 2]], 4)
    save_datastore(folder, other, "maker", 4, None)  # replaces it
    np.testing.assert_array_equal(load_datastore(folder, target(tokenizer=words("x")))["tokens"], other["tokens"])
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_another_vocabulary_is_refused(saved):
    folder, _ = saved
    with pytest.raises(models.ModelError, match="vocabulary of 4 tokens, and big has 5; build one for it"):
        load_datastore(folder, target(5, name="big"))
    with pytest.raises(models.ModelError, match="with the tokenizer of 'maker', and target has another"):
        load_datastore(folder, target(tokenizer=words("a", "b", "d", "c")))


def test_damaged_folders_are_refused(saved, tmp_path):
    folder, _ = saved
    arrays = folder / "model.safetensors"
    good = load_file(arrays)

    def refused(said):
        with pytest.raises(models.ModelError, match=said):
            load_datastore(folder, target())

    for name, wrong in (
        ("tokens", good["tokens"] + np.uint16(1)),
        ("tokens", good["tokens"][:-1]),
        ("suffixes", good["suffixes"] + np.int32(90)),
        ("suffixes", good["suffixes"] - np.int32(9)),
        ("suffixes", good["suffixes"].astype(np.float32)),
        ("suffixes", good["suffixes"][:0]),
    ):
        save_file({**good, name: wrong}, arrays)
        refused("build or fetch it again")
    save_file({"tokens": good["tokens"]}, arrays)
    refused("missing or damaged")
    arrays.write_bytes(b"garbage")
    refused("missing or damaged")
    arrays.unlink()
    refused("missing or damaged")
    (folder / "config.json").write_text(json.dumps({"drafter": "medusa"}))
    refused("is not a datastore")
    with pytest.raises(models.ModelError, match="unknown datastore 'no_such'"):
        load_datastore("no_such", target())
    (tmp_path / "file").write_text("")
    with pytest.raises(models.ModelError, match="is a file"):
        save_datastore(tmp_path / "file", good, "maker", 4, None)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    def go(*argv):
        status = cli.main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return go


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "deep" / "a.py").write_text("class Stack:\n    pass\n")
    (folder / "empty.txt").write_text(" \n")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".hidden" / "c.py").write_text("hidden = True\n")
    return folder


def test_files_and_folders_are_read_in_order(corpus):
    texts, skipped = read([str(corpus / "deep" / "a.py"), str(corpus)])
    assert [text.split()[0] for text in texts] == ["class", "def", "class"]
    assert sorted(file.name for file in skipped) == ["empty.txt", "image.png"]


def test_the_command_builds_what_the_target_loads(run, corpus, tmp_path):
    output = tmp_path / "stores" / "mine"
    status, out, err = run("datastore", "build", corpus, "--model", "tiny", "--output", output)
    assert (status, out) == (0, "")
    assert "left out 2 files" in err and "2 documents" in err and f"rest:datastore={output}" in err
    home = models.shipped()["tiny"]
    own = models.tokenizer.load(home)
    store = load_datastore(output, target(1536, own))
    ids = [own(text, add_special_tokens=False)["input_ids"] for text in read([str(corpus)])[0]]
    for name, array in build(ids, 1536).items():
        np.testing.assert_array_equal(store[name], array)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "{corpus}/empty.txt", "--output", "{out}"], "no usable text in"),
        (["build", "{corpus}/nowhere", "--output", "{out}"], "there is no file or folder"),
        (["build", "{corpus}/image.png", "--output", "{out}"], "is not UTF-8 text"),
        (["build", "{corpus}", "--output", "{corpus}/b.py"], "is a file; give a folder"),
        (["build", "{corpus}", "--output", "{out}", "--model", "no_such_model"], "unknown model 'no_such_model'"),
        (["build", "--output", "{out}"], "the following arguments are required: FILE"),
        (["build", "{corpus}"], "the following arguments are required: --output"),
        (["frob", "{corpus}", "--output", "{out}"], "invalid choice: 'frob'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, corpus, tmp_path, words, said):
    fill = lambda word: word.format(corpus=corpus, out=tmp_path / "out")
    status, out, err = run("datastore", *map(fill, words))
    assert (status, out) == (2, "") and err.count("\n") == 1 and said in err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_no_usable_text(run, tmp_path):
    (tmp_path / "corpus").mkdir()
    status, _, err = run("datastore", "build", tmp_path / "corpus", "--output", tmp_path / "out")
    assert status == 2 and err.count("\n") == 1 and "no usable text in" in err


def test_of_a_jobs_records_every_text_is_a_document(tmp_path):
    records = [{"prompt": "a", "text": "one"}, {"text": ""}, {"text": "two"}, {"error": "none"}]
    (tmp_path / "out.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "three"}\n{')
    assert read([str(tmp_path / "out.jsonl")])[0] == ["one", "two"]
    assert read([str(tmp_path)])[0] == ['{"text": "three"}\n{', '{"a": 1}\n', "one", "two"]
