"""Trains the heads for SmolLM2 with `specjax capture` and `specjax train`, as `config.toml` says, and puts them in place.

python -m experiments.smollm2.train FOLDER [HEAD ...]

The texts are those of `texts.jsonl.gz` or, if FOLDER has some, what `experiments.smollm2.data` wrote there. FOLDER gets the
captured features (about 5 kB for each token) and the runs. The same command goes on after a kill. The curves of held-out
acceptance are in `HEAD.jsonl`, beside this file.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "specjax" / "models" / "pretrained" / "heads"
TEXTS = HERE / "texts.jsonl.gz"
"""3,281 conversations in which SmolLM2 asks and answers, 900,438 tokens: what `experiments.smollm2.data` wrote."""
SOURCES = ("answers-1.jsonl", "answers-2.jsonl")
PARTS = ("train", "held-out")


def run(*words: object) -> None:
    """A command of specjax."""
    print("$ specjax", *words, flush=True)
    subprocess.run([sys.executable, "-m", "specjax", *map(str, words)], check=True)


def split(folder: Path, each: int) -> None:
    """Writes `train.jsonl` and `held-out.jsonl`: of every `each` conversations the last one is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for name in SOURCES if (folder / name).exists() for line in (folder / name).read_text().splitlines()]
    lines = lines or gzip.decompress(TEXTS.read_bytes()).decode().splitlines()
    held = lines[each - 1 :: each]
    trained = [line for at, line in enumerate(lines) if at % each != each - 1]
    for part, chosen in zip(PARTS, (trained, held), strict=True):
        (folder / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in chosen))


def flags(options: dict[str, Any]) -> list[Any]:
    """The words of a command's options."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what experiments.smollm2.data wrote; the runs go there too")
    parser.add_argument("heads", nargs="*", metavar="HEAD", help="of the recipe's (default: all)")
    parser.add_argument("--export", type=Path, default=SHIPPED, help="folders of heads")
    parser.add_argument("--config", type=Path, default=HERE / "config.toml")
    options = parser.parse_args()
    folder, config = options.folder, tomllib.loads(options.config.read_text())
    target, shared = ("--target", config["target"]), config["options"]
    split(folder, config["held_out"])
    read = {"batch-size": config["batch-size"], "length": config["length"]}
    for part in PARTS:
        text, features = folder / f"{part}.jsonl", folder / f"features-{part}"
        run("capture", config["capture"], *target, "--data", text, "--output", features, *flags(read))
    for name in options.heads or config["heads"]:
        own = dict(config["heads"][name])
        line, output = own.pop("line", name), folder / name
        more = ["--resume"] if output.exists() else []
        rows = "--features", folder / "features-train", "--held-out", folder / "features-held-out"
        if "draft-config" in own:
            own["draft-config"] = HERE / own["draft-config"]
        run("train", line, *target, "--output", output, *rows, *flags({**shared, **own}), *more)
        place = options.export / f"{config['target']}-{name}"
        place.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(output / file, place / file)
        records = [json.loads(line) for line in (output / "training" / "metrics.jsonl").read_text().splitlines()]
        kept = [record for record in records if any(key.startswith("held_out") for key in record)]
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


if __name__ == "__main__":
    main()
