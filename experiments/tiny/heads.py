"""Trains heads for a model that answers by `specjax generate` and `specjax train`, as `heads.toml` says.

python -m experiments.tiny.heads --work FOLDER [HEAD ...]
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


def asked(count: int) -> list[dict]:
    """Lines of a job: training questions of level 2 as chat messages."""
    mixture = Mixture(SEED, levels=(2,))
    return [{"id": f"train-{i}", "messages": user_turn(mixture[i].prompt, chat=True)} for i in range(count)]


def answers(work: pathlib.Path, target: str, data: dict) -> pathlib.Path:
    """What the target answers to training questions; made once."""
    output, part, prompts = (work / f"{name}.jsonl" for name in ("answers", "part", "questions"))
    if not output.exists():
        prompts.write_text("".join(json.dumps(line) + "\n" for line in asked(data["questions"])))
        words = ["--batch-size", 32, "--max-new-tokens", data["new_tokens"]]
        run("generate", "--model", target, "--input", prompts, "--output", part, *words)
        part.rename(output)
    return output


def datastore(work: pathlib.Path, target: str, source: pathlib.Path, count: int, place: pathlib.Path) -> None:
    """What the target itself writes: a small datastore does most where the text repeats it."""
    records = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    folder = work / "rest"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, record in enumerate(records):
        (folder / f"{number}.txt").write_text(record["prompt"][-1]["content"] + record["text"])
    shutil.rmtree(place, ignore_errors=True)
    run("datastore", "build", folder, "--model", target, "--output", place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "heads", nargs="*", metavar="HEAD", help="of the recipe's (default: all, and rest, a datastore)"
    )
    parser.add_argument("--work", type=pathlib.Path, required=True, help="data, checkpoints and logs")
    parser.add_argument("--export", type=pathlib.Path, default=SHIPPED, help="folders of heads")
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "heads.toml")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    args.work.mkdir(parents=True, exist_ok=True)
    target = config["target"]
    written = answers(args.work, target, config["data"])
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


if __name__ == "__main__":
    main()
