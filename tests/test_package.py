"""The wheel holds everything: installed on its own, the package and its shipped models are found from another folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECK = """
import specjax, sys
assert not specjax.__file__.startswith({root!r}), specjax.__file__
import specjax.kernels.tree_attention, specjax.sharding
assert sorted(specjax.models.shipped()) == ["pycode", "pycode-diffusion", "pycode-draft"]
assert specjax.models.load("pycode-draft").tokenizer is not None
import importlib.util
assert all(importlib.util.find_spec(name) is None or "specjax" not in (importlib.util.find_spec(name).origin or "")
           for name in ("models", "kernels", "sharding"))
"""


@pytest.mark.slow
def test_the_wheel_works_from_another_folder(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"  # a build leaves files beside its source
    source.mkdir()
    for part in ("specjax", "models", "kernels", "sharding"):
        shutil.copytree(ROOT / part, source / part, symlinks=True)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    wheel = next(tmp_path.glob("specjax-*.whl"))
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n" + CHECK.format(root=str(ROOT))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
