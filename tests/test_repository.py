"""What GitHub and others read of the repository: the workflow, the citation, the forms of issues."""

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORMS = [file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml"]


def test_the_workflow_runs_what_a_developer_runs():
    """On every push and request, on this project's Python, with the history that says which slow tests are due."""
    workflow = yaml.load((ROOT / ".github/workflows/ci.yml").read_text(), yaml.BaseLoader)
    assert {"push", "pull_request"} <= workflow["on"].keys()
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"} and (ROOT / ".ci/run").stat().st_mode & 0o111
    given = {step["uses"].partition("@")[0]: step["with"] for step in job["steps"] if "uses" in step}
    assert given["actions/checkout"] == {"fetch-depth": "0"}
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert given["actions/setup-python"]["python-version"].split()[-1] == lowest, "the last one is `python3`"


def test_the_citation_is_of_this_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "what the format asks for"
    assert [citation[name] for name in ("title", "abstract", "license")] == [
        project[name] for name in ("name", "description", "license")
    ]
    assert citation["authors"][0]["name"] in (ROOT / "LICENSE").read_text()
    assert "version" not in citation, "that is in pyproject.toml and nowhere else"


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_the_form_of_an_issue_is_one(file):
    form = yaml.safe_load(file.read_text())
    assert form["name"] and form["description"] and form["body"]
    for field in form["body"]:
        assert field["type"] in ("input", "textarea") and field["attributes"]["label"]
    assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_there_are_forms_and_a_way_to_report_in_private():
    assert {file.stem for file in FORMS} == {"bug", "method", "chip"}
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text()
