"""`specjax bench schema`: its folders, what it counts, and constrained texts beside free ones."""

import json

import pytest
from support.constraints import vocabulary

from specjax import cli
from specjax.bench import schema as suite
from specjax.bench.schema import Instance, Made, Schema

pytest.importorskip("outlines_core")
pytest.importorskip("jsonschema")


def person(name):
    properties = {name: {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}
    return {"type": "object", "properties": properties, "required": [name, "age"], "additionalProperties": False}


PERSON, REFUSED = person("name"), {"type": "object", "properties": {"a": {"not": {"pattern": "a"}}}}
TESTS = [
    {"data": {"name": "Ann", "age": 3}, "valid": True},
    {"data": {"age": 3, "name": "Ann"}, "valid": True},
    {"data": {"name": "Ann", "age": -3}, "valid": False},
]


def folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return path


def test_every_layout_is_read(tmp_path):
    data = folder(tmp_path / "data", {f"{name}/{i}.json": PERSON for name in ("Easy", "Hard") for i in range(3)})
    found = suite.read(data, 2)
    assert [(own.dataset, own.name) for own in found] == [("Easy", "0"), ("Easy", "1"), ("Hard", "0"), ("Hard", "1")]
    assert found[0].content == PERSON and not found[0].instances
    assert [own.dataset for own in suite.read(data / "Hard", 9)] == ["Hard"] * 3
    files = {"Easy---7.json": {"schema": PERSON, "tests": TESTS}, "own.json": {"schema": True, "tests": []}}
    first, second = suite.read(folder(tmp_path / "mask", files), 9)
    assert (first.dataset, first.name, second.dataset) == ("Easy", "Easy---7", "mask")
    assert [one.valid for one in first.instances] == [True, True, False]
    assert first.instances[0].texts == ['{"name": "Ann", "age": 3}', '{"name":"Ann","age":3}']
    cases = [{"description": "one", "schema": False, "tests": TESTS}, {"description": "two", "schema": {}, "tests": []}]
    found = suite.read(folder(tmp_path / "suite", {"items.json": cases}), 9)
    assert [(own.dataset, own.name, own.content) for own in found] == [("items", "one", False), ("items", "two", {})]


def test_what_becomes_of_schemas(monkeypatch):
    """Instances tell whether a constraint takes too much or too little."""
    make = lambda content, instances=(), kind="json", limit=60.0: suite.make(
        Schema("a", "b", content, tuple(Instance(*one) for one in instances)), kind, vocabulary(), limit
    )
    given = [(one["data"], one["valid"]) for one in TESTS]
    good, turned = make(PERSON, given[::2]), make(PERSON, given)
    assert (good.declared, good.true, good.wrong, good.missed, good.why) == (True, True, 0, 0, "") and good.seconds > 0
    assert (turned.true, turned.wrong, turned.missed) == (False, 0, 1)
    assert (make({"type": "integer"}, [(5, False), ("x", False)]).wrong, make({"type": "integer"}).true) == (1, None)
    refused, never = make(REFUSED, given), make(False)
    assert (refused.declared, refused.true, refused.reason, never.reason) == (False, False, "not", "allows no value")
    assert make({"pattern": "a{90000}"}).reason == (
        "with its repetitions written out, the expression has more than N signs"
    )
    assert make({"type": "null"}, limit=1e-9).why == "it took more than 1e-09 seconds"
    with monkeypatch.context() as patched:
        patched.setattr(suite, "compiled", lambda *_: {}["a"])
        assert make({}).why == make({}).reason == "fault, KeyError"
    pytest.importorskip("llguidance")
    grammar, no = make(PERSON, given[::2], "grammar"), make(False, (), "grammar")
    assert (grammar.true, no.declared) == (True, False)
    assert make(True, [({"a": [1]}, True)], "grammar").true and make({"type": "null"}, [(1, False)], "grammar").true


def test_texts_are_validated_and_nothing_is_fetched(monkeypatch):
    def fetched(*_, **__):
        pytest.fail("a schema was fetched")

    monkeypatch.setattr("urllib.request.urlopen", fetched)
    check = lambda content, text: suite.validator(Schema("a", "b", content))(text)
    assert check(PERSON, '{"name": "Ann", "age": 3}') and not check(PERSON, '{"name": "Ann"}')
    assert not check(PERSON, '{"name": "Ann", "age": 3') and not check(PERSON, None)
    assert check({"format": "date"}, '"2024-02-29"') and not check({"format": "date"}, '"2024-02-30"')
    assert not check({"type": 3}, "1") and not check({"$ref": "http://localhost/a.json"}, "1")


def test_measures():
    """Compliance is of the schemas that were not refused, true coverage of those with instances."""
    instances, table = (Instance(1, True),), object()
    made = [
        Made(Schema("a", "one", {}, instances), table, "", 0.1),
        Made(Schema("b", "one", {}, instances), table, "", 0.3, missed=1),
        Made(Schema("c", "one", {}), table, "", 0.2),
        Made(
            Schema("d", "two", {}, instances),
            None,
            "the schema has an unsupported keyword: $ref to 'a'",
            9.0,
        ),
    ]
    found = suite.by_dataset(made, [True, False, True, False])
    assert list(found) == ["one", "two", "overall"]
    assert found["overall"] == {
        "schemas": 4, "declared": 0.75, "empirical": 0.5, "compliance": 0.6667, "true": 0.3333, "wrong": 0, "missed": 1,
    }  # fmt: skip
    assert found["two"]["compliance"] is None and "empirical" not in suite.coverage(made)
    assert suite.quantiles(made) == {"median": 0.2, "p95": 0.3, "most": 0.3} and suite.quantiles(made[3:]) == {}
    assert suite.refused(made) == {"$ref": 1}


@pytest.mark.slow
@pytest.mark.covers("constrain", "constraint", "forced", "prompt_lookup")
def test_the_suite(tmp_path, capsys):
    files = {f"Easy/{name}.json": person(name) for name in ("name", "nick")}
    files |= {"Hard/a.json": {"schema": PERSON, "tests": TESTS}, "Hard/b.json": REFUSED}
    words = ["bench", "schema", "--input", folder(tmp_path, files), "--json", "--max-new-tokens", 24, "--repeats", 1]
    run = lambda *more: (
        cli.main([*map(str, (*words, *more))]),
        json.loads((said := capsys.readouterr()).out),
        said.err,
    )
    status, report, lines = run("--compare", "--batch-size", 3)
    for decoder in ("none", "prompt_lookup+forced"):  # what a run that is stopped has shown
        assert f"specjax: {decoder}, free: " in lines and f"specjax: {decoder}, constrained: " in lines
    assert status == 0 and "4 schemas, constraints json, at most 24 tokens, batch 3" in report["about"]
    overall, hard = report["datasets"]["overall"], report["datasets"]["Hard"]
    assert overall["declared"] == overall["empirical"] == 0.75 and overall["compliance"] == 1.0
    assert (hard["declared"], hard["true"], hard["wrong"], hard["missed"]) == (0.5, 0.0, 0, 1)
    assert report["refused"] == {"not": 1} and 0 < report["compile_seconds"]["median"] < 40
    rows = {(row["decoder"], row["constrained"]): row for row in report["rows"]}
    plain, drafted = rows["none", True], rows["prompt_lookup+forced", True]
    assert len(rows) == 4 and all(row["texts"] == row["identical_texts"] == 3 for row in rows.values())
    assert plain["valid"] == drafted["valid"] == 3 and plain["tokens_per_step"] == 1.0 < drafted["tokens_per_step"]
    assert 0 < plain["forced"] == drafted["forced"] < plain["tokens"] == drafted["tokens"]
    assert plain["over_free"] > 0 < drafted["over_free"] and plain["seconds_per_token"] > 0
    assert rows["none", False]["forced"] is rows["none", False]["over_free"] is None
    pytest.importorskip("llguidance")
    status, report, _ = run("--coverage", "--alone", "llguidance,outlines-core")
    engines = report["alone"]
    assert list(engines) == ["json", "llguidance", "outlines-core"] and engines["json"]["refused"] == {"not": 1}
    assert engines["json"]["wrong"] == 0
    for engine in engines.values():
        assert engine["timed"] >= 3 and 0 < engine["token_seconds"] < 1
        assert engine["declared"] >= 0.75 and engine["compile_seconds"]["median"] > 0
    status, report, _ = run("--kind", "grammar", "--coverage")
    assert status == 0 and report["rows"] == [] and report["datasets"]["Easy"]["declared"] == 1.0
    assert cli.main([*map(str, words[:-5]), "--coverage"]) == 0
    assert "refused: not 1" in capsys.readouterr().out


def test_what_cannot_be_run(tmp_path, capsys):
    broken = folder(tmp_path / "broken", {"a.json": [{"schema": {}, "tests": [{"data": 1}]}]})
    other, text = folder(tmp_path / "other", {"a.json": 3}), folder(tmp_path / "text", {"b.json": 1})
    (text / "a.json").write_text("{")
    good = folder(tmp_path / "good", {"a.json": PERSON})
    (tmp_path / "empty").mkdir()
    for words, message in (
        (["schema"], "bench schema needs a folder of schemas: give --input FOLDER"),
        (["schema", "--input", tmp_path / "none"], "with schemas"),
        (["schema", "--input", tmp_path / "empty"], "has no file .json with a schema"),
        (["schema", "--input", broken], "tests without data and valid ('valid')"),
        (["schema", "--input", other], "a.json is no schema: it should hold an object"),
        (["schema", "--input", text], "a.json is not JSON: Expecting"),
        (["schema", "--input", text, "--peer", "transformers"], "--peer is not for the suite schema"),
        (
            ["schema", "--input", good, "--alone", "xgrammar"],
            "alone names 'xgrammar': choose llguidance or outlines-core",
        ),
        (["schema", "--input", text, "--compile-limit", 0], "--compile-limit must be at least 1"),
        (["spec", "--input", text, "--kind", "json"], "--kind is not for the suite spec"),
        (
            ["schema", "--input", good, "--decode", "gumbel", "--temperature", 1],
            "may write tokens that a constraint forbids",
        ),
        (["schema", "--input", good, "--model", "tiny-diffusion"], "tiny-diffusion is a diffusion model"),
        (["schema", "--input", good, "--max-new-tokens", 5000], "none of 1 schemas can be asked: "),
        (["--compare"], "--compare is not for the suite speed"),
    ):
        assert cli.main(["bench", *map(str, words)]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
