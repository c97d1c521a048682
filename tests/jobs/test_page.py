"""The page of a job and its file of measures."""

import json
import sys
from html.parser import HTMLParser

import pytest

from specjax import cli
from specjax.jobs import meter, page
from specjax.jobs.page import Course, Measure, shown, watched
from specjax.serve.slots import Turn


class Cells(HTMLParser):
    """The rows of a page's table, its curves, and whether it asks for itself again."""

    def __init__(self, text):
        super().__init__()
        self.words, self.curves, self.again, self.open = [], [], False, []
        self.feed(text)
        self.rows = dict(zip(self.words[::2], self.words[1::2], strict=True))

    def handle_starttag(self, tag, attrs):
        own = dict(attrs)
        self.open.append(tag)
        self.again |= own.get("http-equiv") == "refresh"
        if tag == "polyline":
            self.curves.append([tuple(map(float, pair.split(","))) for pair in own["points"].split()])

    def handle_endtag(self, tag):
        self.open.append("")

    def handle_data(self, data):
        if self.open and self.open[-1] in ("th", "td"):
            self.words.append(data)


def course(ended=False, every=1.0):
    measures = [Measure(every * i, 10 + 2 * i, 1, 100 * i, 25 * i) for i in range(31)]
    return Course(100, measures, ended)


def test_what_is_left_is_told_by_the_last_measures():
    own = course()
    assert (own.per_second, own.per_step, own.left) == (100.0, 4.0, 15.0)
    late = Course(100, [*own.measures, Measure(130.0, 70, 1, 3000, 750)])
    assert late.left == pytest.approx(30 / (28 / 114)) and late.line()["seconds_left"] == 122.1  # 16 measures
    assert Course(4, [Measure(0.0, 0, 0, 0, 0)]).left is None
    assert Course(4, [Measure(0.0, 4, 0, 0, 0)]).left == 0.0
    assert Course(4, [Measure(0.0, 0, 0, 0, 0), Measure(0.0, 1, 0, 5, 5)]).per_second == 0.0


def test_a_page_says_how_far_the_job_is():
    text = shown(course(), "<in> to out")
    cells = Cells(text)
    assert cells.rows == {
        "records": "70 of 100 (70.0%)",
        "with an error": "1",
        "new tokens": "3,000",
        "tokens per second, lately": "100",
        "tokens per target pass": "4.00",
        "this run has taken": "30 s",
        "left": "15 s",
    }
    assert cells.again and "&lt;in&gt; to out" in text and "<in>" not in text
    records, speeds = cells.curves
    assert records[0][0] == 0 and records[-1] == (1000.0, 5.0) and {y for _, y in speeds} == {5.0}
    ended = Cells(shown(course(ended=True), "x"))
    assert not ended.again and "left" not in ended.rows
    assert "<p>stopped</p>" in shown(course(ended=True), "x")
    assert not Cells(shown(Course(0, [Measure(0.0, 0, 0, 0, 0)], True), "x")).curves


def test_measures_are_kept_now_and_then_and_at_the_end(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(page.time, "monotonic", lambda: now[0])
    shown, lines = tmp_path / "job.html", tmp_path / "job.jsonl"
    with watched(str(shown), str(lines), "x", 10, 2, 0) as watch:
        for _ in range(8):
            now[0] += 0.75
            watch(Turn([], 4, 2, 0), 1, 0)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [own["records"] for own in found] == [3, 6, 9, 10]
    assert [own["ended"] for own in found] == [False, False, False, True]
    assert found[-1]["tokens"] == 32 and found[-1]["tokens_per_step"] == 2.0 and found[-1]["seconds"] == 6.0
    assert Cells(shown.read_text()).rows["records"] == "10 of 10 (100.0%)" and "<p>ended</p>" in shown.read_text()


def test_a_long_job_keeps_few_measures_and_the_newest():
    own = Course(10**6, [Measure(0.0, 0, 0, 0, 0)])
    for i in range(1, 5000):
        own.add(Measure(2.0 * i, i, 0, 8 * i, i))
    assert len(own.measures) <= 2 * page.POINTS and own.measures[0].seconds == 0 and own.now.records == 4999
    assert own.per_second == 4.0 and own.measures[-1 - page.RECENT].records == 4999 - page.RECENT


def test_a_line_that_a_kill_has_torn_is_ended(tmp_path):
    file = tmp_path / "job.jsonl"
    file.write_text('{"a": 1}\n{"a"')
    page._append(str(file), '{"b": 2}')
    page._append(str(file), '{"b": 3}')
    assert file.read_text() == '{"a": 1}\n{"a"\n{"b": 2}\n{"b": 3}\n'


def test_other_files_of_the_job_are_not_written_over(tmp_path, capsys):
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "x"}\n')
    for words, said in (
        (["--page", str(file)], "--page must not be the --input file"),
        (["--metrics", str(output)], "--metrics must not be the --output file"),
        (["--metrics", f"{output}.job.json"], "--metrics must not be the job's manifest"),
        (["--page", f"{tmp_path}/a", "--metrics", f"{tmp_path}/a"], "--metrics must not be the --page file"),
        (["--page", "/dev/null"], "--page '/dev/null' is no file"),
    ):
        assert cli.main(["generate", "--input", str(file), "--output", str(output), *words]) == 2
        assert said in (err := capsys.readouterr()[1]) and err.count("\n") == 1
    words = ["--input", f"{tmp_path}/*.jsonl", "--output", f"{tmp_path}/out", "--metrics", f"{tmp_path}/m.jsonl"]
    assert cli.main(["generate", *words]) == 2
    assert "--metrics must not be among the files of --input" in capsys.readouterr()[1]
    assert file.read_text() == '{"prompt": "x"}\n'


def test_a_file_that_cannot_be_written_ends_no_job(tmp_path, capsys):
    folder = tmp_path / "gone"
    with watched(str(folder / "job.html"), str(tmp_path / "job.jsonl"), "x", 10, 0, 0) as watch:
        for _ in range(3):
            page.EVERY_SECONDS, before = 0.0, page.EVERY_SECONDS
            watch(Turn([], 1, 1, 0), 1, 0)
            page.EVERY_SECONDS = before
    assert len((tmp_path / "job.jsonl").read_text().splitlines()) == 4  # the other one goes on
    assert capsys.readouterr()[1].count("the job goes on without it") == 1
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "x"}\n')
    for words in (["--page", f"{folder}/job.html"], ["--metrics", str(tmp_path)]):
        assert cli.main(["generate", "--input", str(file), *words]) == 2
        assert words[0] in (err := capsys.readouterr()[1]) and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.covers("page", "jobs")
def test_a_job_keeps_both(tmp_path, capsys):
    file, shown, lines = tmp_path / "in.jsonl", tmp_path / "job.html", tmp_path / "job.jsonl"
    file.write_text('{"prompt": "def f(n):"}\n{\n{"prompt": "x"}\n')
    words = ["generate", "--input", str(file), "--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "8"]
    assert cli.main([*words, "--page", str(shown), "--metrics", str(lines), "--drafter", "none"]) == 1
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    last = json.loads(lines.read_text().splitlines()[-1])
    assert (last["records"], last["failed"], last["total"], last["ended"]) == (3, 1, 3, True)
    assert last["tokens"] == sum(record["new_tokens"] for record in records)
    assert Cells(shown.read_text()).rows["records"] == "3 of 3 (100.0%)"


def test_measures_go_to_open_telemetry(tmp_path, monkeypatch, capsys):
    """Without it, and without a provider, a job ends before any work; with one, the meter has the numbers of the lines."""
    words = ["generate", "--input", str(tmp_path / "in.jsonl"), "--metrics", "otel"]
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "opentelemetry", None)
        assert cli.main(words) == 2
        assert "--metrics otel needs OpenTelemetry: pip install 'specjax[otel]'" in capsys.readouterr()[1]
    metrics = pytest.importorskip(
        "opentelemetry.metrics", reason="OpenTelemetry is not installed: pip install 'specjax[otel]'"
    )
    sdk = pytest.importorskip(
        "opentelemetry.sdk.metrics", reason="OpenTelemetry is not installed: pip install 'specjax[otel]'"
    )
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    assert cli.main(words) == 2
    said = capsys.readouterr()[1]
    assert "--metrics otel has nowhere to send to" in said and said.count("\n") == 1
    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    sent: list[bool] = []
    monkeypatch.setattr(provider, "force_flush", lambda: sent.append(True))
    meter.check()
    now = [0.0]
    monkeypatch.setattr(page.time, "monotonic", lambda: now[0])
    with watched(None, "otel", "in to out", 10, 2, 0) as watch:
        for _ in range(2):
            now[0] += 2.5
            watch(Turn([], 4, 2, 0), 3, 1)
    assert sent == [True], "a process of several hosts leaves without the provider's own end"
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    points = {own.name.removeprefix("specjax.job."): own.data.data_points for own in scope.metrics}
    assert scope.scope.name == "specjax" and all(
        dict(own.attributes) == {"job": "in to out"} for (own,) in points.values()
    )
    found = {name: own.value for name, (own,) in points.items()}
    assert {name: found[name] for name in ("tokens", "steps", "records", "failed", "total", "ended")} == {
        "tokens": 8, "steps": 4, "records": 8, "failed": 1, "total": 10, "ended": 1,
    }  # fmt: skip
    assert found["tokens_per_step"] == 2.0 and set(found) == {*meter.GAUGES, *meter.COUNTERS}
    assert set(found) == set(course().line()) - {"time"}
