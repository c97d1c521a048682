"""The sdist, and a wheel from it, hold everything; installed from them or from a clone in place, the package is whole."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECK = """
import specjax, sys
assert not specjax.__file__.startswith({root!r}), specjax.__file__
import specjax.kernels.tree_attention, specjax.sharding
assert sorted(specjax.models.shipped()) == ["tiny", "tiny-diffusion", "tiny-draft"]
assert specjax.models.load("tiny-draft").tokenizer is not None
import importlib.util
assert all(importlib.util.find_spec(name) is None or "specjax" not in (importlib.util.find_spec(name).origin or "")
           for name in ("models", "kernels", "sharding"))
"""


BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def test_every_dependency_is_imported_somewhere():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"\w+", name)[0] for name in needed}
    files = (file for part in ("specjax", "models", "kernels", "sharding") for file in (ROOT / part).rglob("*.py"))
    found = {
        name for file in files for name in re.findall(r"^\s*(?:import|from) (\w+)", file.read_text(), re.MULTILINE)
    }
    assert names - found == set(), "an extra, or none"


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]

CALLS = """
import specjax
from specjax.models import load

specjax.generate("tiny", "a")
load(3)
"""


def clone(folder):
    """What an installation needs of the repository, in a new folder."""
    folder.mkdir()
    for part in ("src", "specjax", "models", "kernels", "sharding"):
        shutil.copytree(
            ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for part in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, folder / part)
    return folder


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A folder with what builds the package, and mypy."""
    folder = tmp_path_factory.mktemp("tools")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    subprocess.run([*PIP, "install", "--no-compile", "--target", str(folder), *needed, "mypy"], check=True)
    return folder


def run(*words, cwd, **env):
    return subprocess.run(words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(tmp_path, tools):
    """Python, and what checks types, see a folder `specjax` there, which is no package."""
    source, python = clone(tmp_path / "specjax"), str(tmp_path / "environment/bin/python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).stdout.strip())
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib"))
    first = json.loads((ROOT / "docs/notebooks/quick_start.ipynb").read_text())["cells"][1]["source"]
    setup = run(python, "-c", "".join(first), cwd=tmp_path, PYTHONPATH="", COLAB_RELEASE_TAG="1")
    assert "bring a clone of specjax here" in setup.stderr

    how = "--no-build-isolation", "--no-deps", "--no-compile"
    install = [*PIP, "--python", python, "install", *how, "-e", "./specjax"]
    done = run(*install, cwd=tmp_path, PYTHONPATH=str(tools))
    assert done.returncode == 0, done.stderr
    code = "import specjax; specjax.generate; print(specjax.__file__)"
    assert run(python, "-c", code, cwd=tmp_path, PYTHONPATH="").stdout == f"{source}/src/specjax/__init__.py\n"
    assert run(python, "-m", "specjax", "--help", cwd=tmp_path, PYTHONPATH="").stdout.startswith("usage: specjax")
    setup = run(python, "-c", "".join(first), cwd=tmp_path, PYTHONPATH="", COLAB_RELEASE_TAG="1")
    assert setup.returncode == 0, setup.stderr

    (site / "zz_dependencies.pth").unlink()  # jax's types are long to read, and not asked about
    (tmp_path / "calls.py").write_text(CALLS)
    pyrefly = str(Path(sys.executable).parent / "pyrefly"), "check", "--preset", "default"
    mypy = sys.executable, "-m", "mypy", "--follow-imports", "silent"
    for words in ([*pyrefly, "--python-interpreter-path"], [*mypy, "--python-executable"]):
        said = run(*words, python, "calls.py", cwd=tmp_path, PYTHONPATH=str(tools)).stdout
        assert re.findall(r"calls\.py:(\d+)", said) == ["6"], said


@pytest.mark.slow
def test_a_checkout_without_symbolic_links_builds_nothing(tmp_path, tools):
    source = clone(tmp_path / "specjax")
    (source / "src/specjax").unlink()
    (source / "src/specjax").write_text("../specjax")  # as git writes it where it may not make links
    for hook in ("build_wheel", "build_sdist"):
        done = run(sys.executable, "-c", BUILD, hook, str(tmp_path), cwd=source, PYTHONPATH=str(tools))
        assert done.returncode == 1 and "core.symlinks=true" in done.stderr.splitlines()[-1]
        assert "holds no kernels, models, sharding" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["specjax"]


@pytest.mark.slow
def test_a_wheel_from_the_sdist_holds_everything_and_works_from_another_folder(tmp_path, tools):
    source, target = clone(tmp_path / "source"), tmp_path / "site"  # a build leaves files beside its source

    def build(what, folder):
        done = run(sys.executable, "-c", BUILD, what, str(tmp_path), cwd=folder, PYTHONPATH=str(tools))
        assert done.returncode == 0, done.stderr
        return tmp_path / done.stdout.splitlines()[-1]

    sdist = build("build_sdist", source)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(tmp_path / "unpacked")], check=True)
    wheel = build("build_wheel", tmp_path / "unpacked" / sdist.name.removesuffix(".tar.gz"))
    assert held(wheel) == {path.relative_to(source).as_posix() for path in files(source / "specjax")}
    subprocess.run([*PIP, "install", "--no-compile", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n" + CHECK.format(root=str(ROOT))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def held(wheel):
    """The package's own files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files(folder):
    """Every file under a folder, through links."""
    return [Path(home, name) for home, _, names in os.walk(folder, followlinks=True) for name in names]
