"""Trains the drafts of `config.toml` by the recipe of `tiny-draft`: `python -m experiments.draft_size.train`.

Each goes on from its checkpoint; one whose run has ended is left as it is. They stand in `out/draft_size/NAME`.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from experiments import claims
from experiments.pretrain.train import HERE as RECIPE
from experiments.pretrain.train import SHIPPED

FOLDER = Path(__file__).resolve().parent
WORK = FOLDER.parent.parent / "out" / FOLDER.name


def recipe_of(own: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `tiny-draft` with a draft's own settings."""
    draft = tomllib.loads((RECIPE / "config.toml").read_text())["draft"]
    return draft | own | {"model": draft["model"] | own.get("model", {}), "every": own["pools"]}


def trained(name: str, own: dict[str, Any], work: Path = WORK) -> None:
    """A folder `work/NAME` with a draft for `tiny`."""
    work.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SHIPPED / "tiny", work / "tiny", dirs_exist_ok=True)  # the teacher
    shutil.copy(SHIPPED / "tiny" / "tokenizer.json", work / "tokenizer.json")
    config = work / f"{name}.toml"
    text = (RECIPE / "config.toml").read_text().partition("[draft]")[0]
    config.write_text(text + "\n".join(_lines("draft", recipe_of(own) | {"name": name})))
    words = ["--work", work / f"{name}.run", "--export", work, "--config", config]
    (work / f"{name}.run").mkdir(exist_ok=True)
    shutil.copy(work / "tokenizer.json", work / f"{name}.run")
    command = [sys.executable, "-m", "experiments.pretrain.train", "draft", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=RECIPE.parent.parent)


def _lines(section: str, settings: dict[str, Any]) -> list[str]:
    """TOML of a section and the section inside it."""
    plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    lines = [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in plain.items())]
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += ["", *_lines(f"{section}.{key}", value)]
    return lines


def main(folder: Path = FOLDER) -> None:
    """Trains all that a folder's config names, or those on the command line."""
    drafts = claims.config_of(folder)["drafts"]
    for name in sys.argv[1:] or drafts:
        trained(name, drafts[name], WORK.parent / folder.name)


if __name__ == "__main__":
    main()
