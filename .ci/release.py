"""`python .ci/release.py 0.2.0`: a release up to its upload; needs 'specjax[release]' and a clean working tree.

The version is written into pyproject.toml, which holds name and addresses too, and heads what was unreleased in
docs/changes.md. Wheel and sdist are built from the tracked files alone, with these changes, and put into dist/. Only when
`twine check` has no complaint, the changes are committed and the commit is tagged; the last line says how to upload.
"""

import dataclasses
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from specjax.serve.options import option
from specjax.terminal import bad_input, note, run_program, write

ROOT = Path(__file__).resolve().parents[1]
PROJECT, CHANGES = "pyproject.toml", "docs/changes.md"
UNRELEASED = "## Unreleased\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """See the help of each."""

    version: str = option(dataclasses.MISSING, "such as 0.2.0", positional=True)
    dry_run: bool = option(False, "build and check, without a commit and a tag")


def command(options: ReleaseOptions) -> int:
    """Makes the release; returns the exit status."""
    with bad_input():
        texts = prepared(options.version)
        with tempfile.TemporaryDirectory() as folder:
            files = built(Path(folder), texts)
            made = [ROOT / "dist" / file.name for file in files]
            made[0].parent.mkdir(exist_ok=True)
            for file, place in zip(files, made, strict=True):
                shutil.copy(file, place)
        names = " ".join(str(place.relative_to(ROOT)) for place in made)
        note(f"built and checked: {names}")
        if options.dry_run:
            return 0
        for name, text in texts.items():
            (ROOT / name).write_text(text)
        git("commit", "--quiet", "-m", f"Release {options.version}", "--", *texts)
        git("tag", "-a", f"v{options.version}", "-m", f"Release {options.version}")
    note(f"committed, and tagged v{options.version}; to publish it:")
    write(f"git push origin HEAD v{options.version} && python -m twine upload {names}\n")
    return 0


def prepared(version: str) -> dict[str, str]:
    """The files that say the version, as the release has them.

    Raises:
      ValueError: where the version cannot be released, or what lies here is not what is tracked.
    """
    texts = {name: (ROOT / name).read_text() for name in (PROJECT, CHANGES)}
    check_version(version, tomllib.loads(texts[PROJECT])["project"]["version"], git("tag", "--list").split())
    if git("status", "--porcelain"):
        raise ValueError("the working tree has changes that are not committed: commit them, or put them away")
    today = datetime.date.today().isoformat()
    return {PROJECT: with_version(texts[PROJECT], version), CHANGES: with_heading(texts[CHANGES], version, today)}


def check_version(version: str, current: str, tags: Sequence[str]) -> None:
    """Raises ValueError where a version does not follow the current one; the current one itself may be released once."""
    try:
        given = Version(version)
    except InvalidVersion as error:
        raise ValueError(f"{version!r} is no version: give one such as 0.2.0") from error
    if str(given) != version:
        raise ValueError(f"write the version {version!r} as {str(given)!r}")
    if f"v{version}" in tags:
        raise ValueError(f"v{version} is tagged already: give a later version")
    if given < Version(current):
        raise ValueError(f"{version} comes before the current version, {current}")


def with_version(project: str, version: str) -> str:
    """pyproject.toml with another version."""
    return re.sub(r'^version = ".*"$', f'version = "{version}"', project, count=1, flags=re.MULTILINE)


def with_heading(changes: str, version: str, day: str) -> str:
    """docs/changes.md with what is unreleased under the version, and nothing unreleased.

    Raises:
      ValueError: where nothing is.
    """
    before, found, after = changes.partition(UNRELEASED)
    if not found or not after.partition("\n## ")[0].strip():
        raise ValueError(f"{CHANGES} has nothing under {UNRELEASED.strip()!r}: say there what this version changes")
    return f"{before}{UNRELEASED}\n## {version}, {day}\n{after}"


def built(folder: Path, texts: dict[str, str]) -> list[Path]:
    """The sdist of the tracked files with some texts changed, and the wheel from that sdist, both checked.

    Raises:
      ValueError: where a tool is missing, or complains.
    """
    source, out = folder / "source", folder / "dist"
    source.mkdir()
    git("archive", "--output", str(folder / "source.tar"), "HEAD")
    subprocess.run(["tar", "-xf", str(folder / "source.tar"), "-C", str(source)], check=True)
    for name, text in texts.items():
        (source / name).write_text(text)
    tool("build", "--outdir", str(out), str(source))
    files = sorted(out.iterdir(), reverse=True)  # the wheel last: its name has a hyphen more
    tool("twine", "check", "--strict", *map(str, files))
    return files


def tool(name: str, *words: str) -> None:
    """Runs a program of this Python; what it prints is shown where it fails."""
    done = subprocess.run([sys.executable, "-m", name, *words], capture_output=True, text=True)
    if f"No module named {name}" in done.stderr:
        raise ValueError(f"a release needs {name}: pip install 'specjax[release]'")
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise ValueError(f"{name} {words[0]} failed with what is above; nothing was committed")


def git(*words: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {words[0]} failed: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(run_program("python .ci/release.py", "A release, up to its upload.", ReleaseOptions, command, None))
