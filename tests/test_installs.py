"""The recipes for other installers name what is there: extras, files, dependencies. None of them is built here."""

import re
import tomllib
from pathlib import Path

import jinja2
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MACHINES = (ROOT / "docs" / "machines.md").read_text()


def extras(line):
    """The extras that a command or a default asks for."""
    return [name for found in re.findall(r"EXTRAS=([\w,]+)", line) for name in found.split(",")]


def test_the_image_installs_extras_that_there_are():
    text = (ROOT / "Dockerfile").read_text()
    asked = extras(text) + extras(MACHINES)
    assert len(asked) >= 3 and {"tpu", "cuda12"} <= set(asked) <= set(EXTRAS)
    (entry,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', text, re.MULTILINE)
    assert entry in PROJECT["scripts"]
    (python,) = re.findall(r"^FROM python:3\.(\d+)", text, re.MULTILINE)
    assert int(python) >= int(PROJECT["requires-python"].rpartition(".")[2])


def test_the_image_gets_all_that_an_installation_needs():
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()]
    needed = ["pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]]
    needed += ["src/specjax", "specjax/models", "specjax/kernels", "specjax/sharding", "models", "kernels", "sharding"]
    assert all((ROOT / name).exists() for name in needed)
    assert not [name for name in needed for part in Path(name).parts if part in ignored]
    assert {"tests", "docs", ".git"} <= set(ignored)  # and little else


def rendered():
    """The recipe, as conda-build reads it."""
    folder = lambda from_recipe_dir: ROOT / "conda" if from_recipe_dir else ROOT
    load = lambda name, from_recipe_dir=False: tomllib.loads((folder(from_recipe_dir) / name).read_text())
    text = (ROOT / "conda" / "meta.yaml").read_text()
    return yaml.safe_load(jinja2.Template(text).render(load_file_data=load, PYTHON="python"))


def test_the_conda_recipe_has_the_projects_dependencies():
    recipe = rendered()
    plain = lambda names: {re.sub(r"\s", "", name) for name in names}
    run = recipe["requirements"]["run"]
    assert plain(run) == plain([f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]) and len(run) > 10
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert plain(built) <= plain(recipe["requirements"]["host"])
    assert recipe["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    assert recipe["build"]["noarch"] == "python" and recipe["build"]["entry_points"] == ["specjax = specjax.cli:main"]
    assert (ROOT / recipe["about"]["license_file"]).is_file() and recipe["about"]["license"] == PROJECT["license"]


@pytest.mark.parametrize("extra", sorted(set(re.findall(r"specjax\[([\w,]+)\]|\.\[([\w,]+)\]", MACHINES))))
def test_the_page_of_machines_names_extras_that_there_are(extra):
    assert set("".join(extra).split(",")) <= set(EXTRAS)
