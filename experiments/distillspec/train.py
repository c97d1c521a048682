"""Trains a draft on text, then distils it in each of the ways of `config.toml`: `python -m experiments.distillspec.train`.

They stand in `out/distillspec/NAME`; a run that was stopped goes on.
"""

import subprocess
import sys
from pathlib import Path

from experiments import claims
from experiments.draft_size.train import WORK, trained
from experiments.drafters.train import answered

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    config = claims.config_of(FOLDER)
    work = WORK.parent / FOLDER.name
    for name, own in config["drafts"].items():
        trained(name, own, work)
    data = answered(work, config["questions"])
    shared = config["train"] | {"draft": work / config["train"]["draft"], "target": config["options"]["model"]}
    for name in sys.argv[1:] or config["distilled"]:
        own = dict(config["distilled"][name])
        output = work / name
        words = [word for key, value in (shared | own).items() if key != "line" for word in (f"--{key}", str(value))]
        resume = ["--resume"] if output.exists() else []
        command = [sys.executable, "-m", "specjax", "train", own.get("line", "distill"), "--output", str(output)]
        subprocess.run([*command, *words, *resume, "--data", str(data)], check=True)


if __name__ == "__main__":
    main()
