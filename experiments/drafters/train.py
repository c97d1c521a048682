"""Trains the shipped heads with `specjax generate` and `specjax train`, as `config.toml` says, and puts them in place.

python experiments/drafters/train.py --work FOLDER [HEAD ...]
"""

import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tomllib

from specjax.bench import stdlib

HERE = pathlib.Path(__file__).resolve().parent
SHIPPED = HERE.parent.parent / "models" / "pretrained" / "heads"


def run(*words: object) -> None:
    print("$ specjax", *words[:4], "...", flush=True)
    subprocess.run([sys.executable, "-m", "specjax", *map(str, words)], check=True)


def completions(work: pathlib.Path, data: dict) -> pathlib.Path:
    """What the target writes after training prompts; made once."""
    output = work / "completions.jsonl"
    if not output.exists():
        prompts = work / "prompts.jsonl"
        openings = stdlib.function_openings(stdlib.training_files(), data["prompts"])
        lines = [json.dumps({"id": f"train-{i}", "prompt": prompt}) for i, prompt in enumerate(openings)]
        prompts.write_text("\n".join(lines) + "\n")
        run(
            "generate",
            "--input",
            prompts,
            "--output",
            work / "part.jsonl",
            "--max-new-tokens",
            data["new_tokens"],
            "--ignore-eos",
        )
        (work / "part.jsonl").rename(output)
    return output


def texts(data: dict) -> list[pathlib.Path]:
    """Some of the training files, always the same for one Python version."""
    files = stdlib.training_files()
    random.Random(0).shuffle(files)
    chosen, total = [], 0
    for path in files:
        size = len(stdlib.read(path))
        if 2000 < size < 60000 and total < data["characters"]:
            chosen.append(path)
            total += size
    return chosen


def datastore(work: pathlib.Path, source: pathlib.Path, count: int) -> None:
    """What the target itself writes: a small datastore does most where the text repeats it."""
    records = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    folder = work / "rest"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, record in enumerate(records):
        (folder / f"{number}.txt").write_text(record["prompt"] + record["text"])
    run("datastore", "build", folder, "--output", SHIPPED / "pycode-rest")


def main() -> None:
    config = tomllib.loads((HERE / "config.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    names = ["rest", *config["heads"]]
    parser.add_argument("heads", nargs="*", metavar="HEAD", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for data and checkpoints")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    written = completions(args.work, config["data"])
    data = [written, *texts(config["data"])]
    for name in args.heads or names:
        if name == "rest":
            datastore(args.work, written, config["rest"]["completions"])
            continue
        own = dict(config["heads"][name])
        line = own.pop("line", name)
        options = {**config["options"], **own}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        output = args.work / name
        resume = ["--resume"] if output.exists() else []
        run("train", line, "--output", output, *words, *resume, "--data", *data)
        place = SHIPPED / f"pycode-{name}"
        place.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(output / file, place / file)
        shutil.copy(output / "training" / "metrics.jsonl", HERE / f"{name}.jsonl")


if __name__ == "__main__":
    main()
