"""Input in several files, in tar files of samples, and in saved datasets."""

import gzip
import io
import json
import tarfile

import pytest

from specjax import cli
from specjax.jobs import jsonl, tarred
from specjax.jobs.batch_api import BatchForm
from specjax.jobs.files import read_lines
from specjax.jobs.options import JobOptions


def read(source, form=None, **more):
    return read_lines(JobOptions(input=str(source), **more), str(source), form)


def pack(path, members):
    with tarfile.open(path, "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def lines(*prompts):
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def save_dataset(folder, tables):
    """As `datasets.Dataset.save_to_disk` does: files in Arrow's format of streams, and what names them in order."""
    pyarrow = pytest.importorskip("pyarrow")
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    folder.mkdir()
    for name, rows in zip(names, tables, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_a_folder_and_a_pattern(tmp_path):
    (tmp_path / "b.jsonl").write_text(lines("c") + "\n{\n" + lines("d"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines("a", "b").encode()))
    pack(tmp_path / "c.tar", [("x.json", b'{"prompt": "e"}')])
    (tmp_path / "notes.md").write_text("none of these")
    found = read(tmp_path)
    assert [line.prompt for line in found] == ["a", "b", "c", None, "d", "e"]
    assert [line.number for line in found] == [1, 2, 3, 5, 6, 7]  # blank lines have numbers too
    assert found[3].where == "b.jsonl, line 3: " and "not valid JSON" in found[3].error
    assert [line.prompt for line in read(tmp_path / "*.jsonl")] == ["c", None, "d"]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.json").write_text(lines("f"))
    assert [line.prompt for line in read(tmp_path / "**" / "*.json")] == ["f"]  # whatever a pattern takes


def test_errors_say_the_file(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(lines("a"))
    (tmp_path / "b.jsonl").write_text(lines("b") + '{"prompt": "x", "temperature": -1}\n')
    assert cli.main(["generate", "--input", str(tmp_path), "--strict", "--model", "tiny"]) == 2
    assert (
        f"{tmp_path}, line 3: b.jsonl, line 2: temperature" in (err := capsys.readouterr()[1]) and err.count("\n") == 1
    )


def test_names_are_told_apart_through_all_files(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        body = {"custom_id": "x", "body": {"prompt": "a"}}
        (tmp_path / name).write_text(json.dumps(body) + "\n")
    first, second = read(tmp_path, BatchForm())
    assert first.error is None and (second.number, second.error) == (2, "line 1 has the same custom_id")


def test_a_saved_dataset(tmp_path):
    rows = [{"prompt": "a", "id": 3, "seed": None}, {"prompt": "b", "id": 4, "seed": 5}]
    folder = save_dataset(tmp_path / "train", [rows, [{"prompt": "c", "id": None, "seed": 1}]])
    found = read(folder)
    assert found[1] == jsonl.Line(2, "b", 4, {"seed": 5}, where="data-00000-of-00002.arrow, line 2: ")
    assert [(line.number, line.prompt) for line in found] == [(1, "a"), (2, "b"), (3, "c")]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match=r"holds the datasets train: name one, such as .*/train"):
        read(tmp_path)


def test_samples_of_a_tar_file(tmp_path):
    members = [
        ("a/1.json", b'{"id": 7, "max_tokens": 4}'),
        ("a/1.png", b"no line"),
        ("a/1.txt", b"the prompt"),
        ("b/1.json", b'{"prompt": "another sample"}'),
        ("2.json", b"["),
        ("3.json", b"[1]"),
        ("4.txt", b"\xff"),
        ("5.png", b"a picture alone"),
        ("a/1.txt", b"a later sample of an earlier one's name"),
    ]
    found = read(pack(tmp_path / "in.tar", members))
    assert found[0] == jsonl.Line(1, "the prompt", 7, {"max_new_tokens": 4})
    assert found[1].prompt == "another sample"
    said = ["not valid JSON", "its .json is not an object", "not valid UTF-8", "its sample has neither .json nor .txt"]
    assert [line.error.split(":")[0] for line in found[2:-1]] == said
    assert found[-1].prompt.startswith("a later sample") and len(found) == 7


def test_records_are_packed_as_samples(tmp_path):
    records = [{"prompt": "a" * 600, "text": "x"}, {"prompt": "b", "text": "y"}]
    (tmp_path / "records").write_text("".join(json.dumps(record) + "\n" for record in records))
    tarred.write(tmp_path / "out.tar", tmp_path / "records")
    with tarfile.open(tmp_path / "out.tar") as file:
        assert [json.load(file.extractfile(member)) for member in file] == records
        assert file.getnames() == ["00000000.json", "00000001.json"]
    assert [line.prompt for line in read(tmp_path / "out.tar")] == ["a" * 600, "b"]


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("empty", lambda path: path.mkdir(), "there is no file with the ending .jsonl"),
        ("*.parquet", lambda path: None, "*.parquet': there is no file"),
        ("split", lambda path: (path.mkdir(), (path / "dataset_dict.json").write_text("{}")), "holds no dataset"),
        ("in.tar", lambda path: path.write_bytes(b"x" * 700), "cannot read the input file"),
        (
            "saved",
            lambda path: (path.mkdir(), (path / "state.json").write_text("[]")),
            "does not describe a saved dataset",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, name, make, said):
    make(tmp_path / name)
    assert cli.main(["generate", "--input", str(tmp_path / name)]) == 2
    assert said in (err := capsys.readouterr()[1]) and err.count("\n") == 1


def test_an_output_among_its_own_input(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(lines("a"))
    assert cli.main(["generate", "--input", str(tmp_path), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "--output must not be among the files of --input" in capsys.readouterr()[1]
    for output, said in (("out.jsonl", "must not be among the files"), ("out.tar.gz", "may be FILE.tar, and not")):
        words = ["--input", str(tmp_path / "*.jsonl"), "--output", str(tmp_path / output)]
        assert cli.main(["generate", *words]) == 2
        assert said in capsys.readouterr()[1]


@pytest.mark.slow
@pytest.mark.covers("shards", "tarred", "jobs")
def test_a_job_over_a_folder_into_a_tar_file(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines("x", "def f(n):"))
    (folder / "b.jsonl").write_text(lines("y"))
    words = ["generate", "--input", str(folder), "--output", str(tmp_path / "out.tar"), "--max-new-tokens", "4"]
    assert cli.main([*words, "--drafter", "none"]) == 0
    with tarfile.open(tmp_path / "out.tar") as file:
        records = [json.load(file.extractfile(member)) for member in file]
    assert [(record["line"], record["prompt"]) for record in records] == [(1, "x"), (2, "def f(n):"), (3, "y")]
