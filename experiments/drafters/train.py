"""Trains the shipped heads with `specjax train`, as `config.toml` says, and puts them in place.

python experiments/drafters/train.py --work FOLDER [HEAD ...]
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tomllib

from specjax.serve.text import user_turn
from specjax.tasks import Mixture

HERE = pathlib.Path(__file__).resolve().parent
SHIPPED = HERE.parent.parent / "specjax" / "models" / "pretrained" / "heads"
SEED = 5


def run(*words: object) -> None:
    print("$ specjax", *words[:4], "...", flush=True)
    subprocess.run([sys.executable, "-m", "specjax", *map(str, words)], check=True)


def answered(work: pathlib.Path, count: int) -> pathlib.Path:
    """Training questions of level 2 as chat messages, and their answers."""
    mixture, output = Mixture(SEED, levels=(2,)), work / "answers.jsonl"
    with output.open("w") as lines:
        for i in range(count):
            question = mixture[i]
            asked = user_turn(question.prompt, chat=True)
            lines.write(json.dumps({"prompt": asked, "completion": f" {question.answers[0]}"}) + "\n")
    return output


def datastore(work: pathlib.Path, target: str, source: pathlib.Path, count: int, place: pathlib.Path) -> None:
    """Questions and answers: a small datastore does most where the text repeats it."""
    records = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    folder = work / "rest"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, record in enumerate(records):
        (folder / f"{number}.txt").write_text(record["prompt"][-1]["content"] + record["completion"])
    shutil.rmtree(place, ignore_errors=True)
    run("datastore", "build", folder, "--model", target, "--output", place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "heads", nargs="*", metavar="HEAD", help="of the recipe's (default: all, and rest, a datastore)"
    )
    parser.add_argument("--work", type=pathlib.Path, required=True, help="data, checkpoints and logs")
    parser.add_argument("--export", type=pathlib.Path, default=SHIPPED, help="folders of heads")
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "config.toml")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    args.work.mkdir(parents=True, exist_ok=True)
    target = config["target"]
    written = answered(args.work, config["data"]["questions"])
    for name in args.heads or ["rest", *config["heads"]]:
        place = args.export / f"{target}-{name}"
        if name == "rest":
            datastore(args.work, target, written, config["rest"]["answers"], place)
            continue
        own = dict(config["heads"][name])
        line = own.pop("line", name)
        options = {**config["options"], **own}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        output = args.work / name
        resume = ["--resume"] if output.exists() else []
        run("train", line, "--target", target, "--output", output, *words, *resume, "--data", written)
        place.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(output / file, place / file)
        shutil.copy(output / "training" / "metrics.jsonl", args.config.parent / f"{name}.jsonl")


if __name__ == "__main__":
    main()
