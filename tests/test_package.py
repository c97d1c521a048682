"""The sdist, and a wheel from it, hold everything; installed from them or from a clone in place, the package is whole."""

import dataclasses
import importlib
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
assert sorted(specjax.models.shipped()) == ["tiny", "tiny-diffusion", "tiny-draft", "tiny-keys"]
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


def test_what_is_shipped_stays_small():
    """Weights of all models and heads, in bytes; those for SmolLM2 apart."""
    files = list((ROOT / "models" / "pretrained").rglob("*.safetensors"))
    sizes = {file.relative_to(ROOT).as_posix(): file.stat().st_size for file in files}
    assert len(sizes) > 10, "it has found them"
    assert sum(sizes.values()) <= 90e6
    assert sum(size for name, size in sizes.items() if "/smollm2-" in name) <= 25e6


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


RIGHT = """
from typing import Any, assert_type

import specjax
from specjax import DecodeState, StepInfo, decoder, diffusion, draft, expand, sampling, search, soft, verify
from specjax.diffusion import DiffusionInfo, DiffusionState
from specjax.models import Model
from specjax.search import SearchState
from specjax.soft import SoftState

specjax.generate, specjax.score, specjax.evaluate, specjax.tasks, specjax.train, specjax.viz, specjax.Engine, specjax.models
model = specjax.load("tiny", dtype="float32")
assert_type(model, Model)
spec = specjax.speculative(model.lm, draft.PromptLookup(length=4), verify.Rejection(), logprobs=True)
assert_type(spec, specjax.Speculative)
unmask = diffusion.diffusion(model.lm, 3, diffusion.Threshold(0.9), block_length=16)
beams = search.BeamSearch(model.lm, search.Beam(3))


def steps(params: Any, ids: Any, keys: Any, thinking: SoftState) -> None:
    sampling_arrays = sampling.SamplingArrays.make(1, temperature=0.7)
    prompts = specjax.Prompts(ids, ids, keys, ids, sampling_arrays)
    state = spec.init(params, prompts, capacity=64)
    assert_type(state, DecodeState)
    assert_type(spec.step(params, state), tuple[DecodeState, StepInfo])
    assert_type(decoder.step(spec, params, state)[0], DecodeState)
    assert_type(specjax.run(spec, params, state, max_steps=4), DecodeState)
    for progress in specjax.stream(spec, params, state):
        assert_type(progress.state, DecodeState)
    canvas = unmask.empty(params, 1, 64)
    assert_type(unmask.step(params, canvas), tuple[DiffusionState, DiffusionInfo])
    assert_type(specjax.run(unmask, params, canvas), DiffusionState)
    assert_type(specjax.run(beams, params, beams.empty(params, 1, 64)), SearchState)
    assert_type(soft.soft_thinking(model.lm).step(params, thinking), tuple[SoftState, StepInfo])


def wrong(params: Any, state: DecodeState, canvas: DiffusionState) -> None:
"""

WRONG = """
specjax.nosuch
specjax.decoder.nosuch
specjax.models.nosuch
specjax.viz.nosuch
specjax.generate(None, "a", temprature=1)
specjax.generate(None, "a", temperature="hot")
specjax.Engine(None, drafterr="none")
specjax.Sampling(top_hh=0.4)
specjax.load(3)
specjax.load("tiny", dtpe="float32")
specjax.speculative(3)
specjax.speculative(model.lm, verifer=verify.Coupled())
specjax.speculative(model.lm, verify.Coupled())
specjax.speculative(model.lm, logprobs="yes")
draft.PromptLookup(length="long")
draft.ModelDrafter(3)
expand.Chain(length="long")
verify.Typical(epsilon="small")
diffusion.Threshold(threshold="high")
diffusion.diffusion(model.lm, 3, policy=verify.Coupled())
diffusion.diffusion(model.lm, 3, block_lenght=16)
search.Beam(num_beams="many")
soft.soft_thinking(model.lm, mixer=verify.Coupled())
state.nosuch
spec.step(params, canvas)
decoder.step(spec, params, state)[0].nosuch
decoder.step(unmask, params, canvas)[0].nosuch
specjax.run(spec, params, canvas)
specjax.run(spec, params, state, max_step=4)
specjax.stream(spec, params, state, step_per_call=4)
sampling.SamplingArrays.make("two")
"""
"""A line a mistake: in each of them both checkers must see one."""


def calls():
    """A program of right calls, and the numbers of the lines that are wrong: those of `WRONG`, and of every method a keyword
    that it has not."""
    methods = [
        f"{package}.{name}(nosuch=1)"
        for package in ("draft", "expand", "verify", "diffusion", "search", "soft")
        for name, kind in sorted(vars(importlib.import_module(f"specjax.{package}")).items())
        if dataclasses.is_dataclass(kind) and "about" in vars(kind)
    ]
    assert len(methods) > 80, "it has found them"
    mistakes = [*WRONG.strip().splitlines(), *methods]
    first = RIGHT.count("\n") + 1
    return RIGHT + "".join(f"    {line}\n" for line in mistakes), dict(enumerate(mistakes, first))


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


@pytest.fixture(scope="module")
def built(tmp_path_factory, tools):
    """A folder with the source that an sdist was made of, and the wheel that was made of that."""
    folder = tmp_path_factory.mktemp("built")
    source = clone(folder / "source")  # a build leaves files beside its source

    def build(what, where):
        done = run(sys.executable, "-c", BUILD, what, str(folder), cwd=where, PYTHONPATH=str(tools))
        assert done.returncode == 0, done.stderr
        return folder / done.stdout.splitlines()[-1]

    sdist = build("build_sdist", source)
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder / "unpacked")], check=True)
    return source, build("build_wheel", folder / "unpacked" / sdist.name.removesuffix(".tar.gz"))


@pytest.mark.slow
def test_an_installed_wheel_says_its_types(tmp_path, tools, built):
    """To pyrefly and to mypy, without jax: what it has of types is long to read, and not asked about."""
    python = str(tmp_path / "environment/bin/python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    install = [*PIP, "--python", python, "install", "--no-deps", "--no-compile", str(built[1])]
    subprocess.run(install, check=True, env={**os.environ, "PYTHONPATH": ""})
    text, wrong = calls()
    (tmp_path / "calls.py").write_text(text)
    pyrefly = str(Path(sys.executable).parent / "pyrefly"), "check", "--preset", "default", "--python-interpreter-path"
    mypy = sys.executable, "-m", "mypy", "--follow-imports", "silent", "--python-executable"
    for words in (pyrefly, mypy):
        said = run(*words, python, "calls.py", cwd=tmp_path, PYTHONPATH=str(tools)).stdout
        found = {int(line) for line in re.findall(r"calls\.py:(\d+)(?::\d+)?(?:: error|$)", said, re.MULTILINE)}
        unseen = [line for number, line in wrong.items() if number not in found]
        assert (sorted(found - wrong.keys()), unseen) == ([], []), f"{words[0]}: {said}"


@pytest.mark.slow
def test_a_wheel_from_the_sdist_holds_everything_and_works_from_another_folder(tmp_path, built):
    (source, wheel), target = built, tmp_path / "site"
    assert not any("experiments" in name or "bench/kernels" in name for name in held(wheel))
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
