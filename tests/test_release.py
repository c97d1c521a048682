"""A release is one command, up to its upload; one that cannot be made says why and leaves everything as it was."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import specjax

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release.py"


@pytest.fixture(scope="module")
def release():
    """The command, which is in no package."""
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "message"),
    (
        ("two", "'two' is no version"),
        ("0.2", None),
        ("00.3.0", "write the version '00.3.0' as '0.3.0'"),
        ("0.2.0", "v0.2.0 is tagged already"),
        ("0.1.9", "0.1.9 comes before the current version, 0.2.0"),
        ("0.3.0", None),
        ("0.3.0rc1", None),
    ),
)
def test_versions(release, version, message):
    if message is None:
        release.check_version(version, "0.2.0", ["v0.2.0"])
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            release.check_version(version, "0.2.0", ["v0.2.0"])


def test_the_current_version_may_be_released_once(release):
    release.check_version("0.1.0", "0.1.0", [])


def test_what_was_unreleased_gets_the_version(release):
    text = "# Changes\n\n## Unreleased\n\n- a\n\n## 0.1.0, 2026-01-02\n\n- b\n"
    done = release.with_heading(text, "0.2.0", "2026-02-03")
    assert done == (
        "# Changes\n\n## Unreleased\n\n## 0.2.0, 2026-02-03\n\n- a\n\n## 0.1.0, 2026-01-02\n\n- b\n"
    )  # fmt: skip
    with pytest.raises(ValueError, match="has nothing under '## Unreleased'"):
        release.with_heading(done, "0.3.0", "2026-03-04")


def test_the_version_is_written_where_name_and_addresses_are(release):
    text = (ROOT / "pyproject.toml").read_text()
    old, new = (tomllib.loads(x) for x in (text, release.with_version(text, "7.8.9")))
    assert new["project"].pop("version") == "7.8.9" and old["project"].pop("version") != "7.8.9"
    assert old == new


def test_nowhere_else():
    """The package asks what it was installed as."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", specjax.__version__)
    files = (path for part in ("specjax", ".ci") for path in (ROOT / part).glob("*.py"))
    assert not [path for path in files if re.search(rf'"{re.escape(version)}"', path.read_text())]


def in_clone(clone, *words):
    env = {
        **os.environ,
        **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    return subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_release_up_to_its_upload(tmp_path):
    pytest.importorskip("build", reason="needs the extra release")
    pytest.importorskip("twine", reason="needs the extra release")
    clone, command = tmp_path / "clone", (sys.executable, ".ci/release.py")
    assert in_clone(tmp_path, "git", "clone", "-q", str(ROOT), str(clone)).returncode == 0
    (clone / "stray.txt").write_text("x")
    done = in_clone(clone, *command, "9.8.7")
    assert done.returncode == 2 and "not committed" in done.stderr
    (clone / "stray.txt").unlink()

    done = in_clone(clone, *command, "9.8.7")
    assert done.returncode == 0, done.stderr
    wheel, sdist = clone / "dist/specjax-9.8.7-py3-none-any.whl", clone / "dist/specjax-9.8.7.tar.gz"
    assert done.stdout == (
        "git push origin HEAD v9.8.7 && python -m twine upload dist/specjax-9.8.7.tar.gz "
        "dist/specjax-9.8.7-py3-none-any.whl\n"
    )  # fmt: skip
    assert in_clone(clone, "git", "tag", "--points-at", "HEAD").stdout == "v9.8.7\n"
    assert in_clone(clone, "git", "status", "--porcelain").stdout == ""
    assert re.search(r"## Unreleased\n\n## 9\.8\.7, \d{4}-\d\d-\d\d\n\n\S", (clone / "docs/changes.md").read_text())
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("specjax/")}
        assert "Version: 9.8.7\n" in archive.read("specjax-9.8.7.dist-info/METADATA").decode()
    tracked = in_clone(clone, "git", "ls-files", "specjax", "models", "sharding", "kernels").stdout.split()
    links = {"specjax/models", "specjax/sharding", "specjax/kernels"}
    assert held == {"specjax/" + name.removeprefix("specjax/") for name in tracked if name not in links}
    with tarfile.open(sdist) as archive:
        assert "specjax-9.8.7/pyproject.toml" in archive.getnames()

    done = in_clone(clone, *command, "9.8.7")
    assert done.returncode == 2 and "v9.8.7 is tagged already" in done.stderr
