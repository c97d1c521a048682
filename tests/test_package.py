"""The sdist, and a wheel from it, hold everything: installed on its own, the package finds its parts and shipped models."""

import os
import shutil
import subprocess
import sys
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


@pytest.mark.slow
def test_a_wheel_from_the_sdist_holds_everything_and_works_from_another_folder(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source, tools, target = tmp_path / "source", tmp_path / "tools", tmp_path / "site"
    source.mkdir()  # a build leaves files beside its source
    for part in ("specjax", "models", "kernels", "sharding"):
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    subprocess.run([*pip, "install", "--no-compile", "--target", str(tools), *needed], check=True)

    def build(what, folder):
        command = [sys.executable, "-c", BUILD, what, str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": str(tools)}
        done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
        return tmp_path / done.stdout.splitlines()[-1]

    sdist = build("build_sdist", source)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(tmp_path / "unpacked")], check=True)
    wheel = build("build_wheel", tmp_path / "unpacked" / sdist.name.removesuffix(".tar.gz"))
    assert held(wheel) == {path.relative_to(source).as_posix() for path in files(source / "specjax")}
    subprocess.run([*pip, "install", "--no-compile", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n" + CHECK.format(root=str(ROOT))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def held(wheel):
    """The package's own files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files(folder):
    """Every file under a folder, through links."""
    return [Path(home, name) for home, _, names in os.walk(folder, followlinks=True) for name in names]
