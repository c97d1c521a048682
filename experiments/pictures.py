"""Draws the pictures of `specjax bench --plot` and `specjax eval --plot` again, from the JSON that the same runs printed.

python -m experiments.pictures
"""

import json
from pathlib import Path
from typing import Any

from specjax.bench import report as bench
from specjax.bench.run import PeerRow, Report, Row
from specjax.evaluate import report as evaluation
from specjax.evaluate import results as evaluated
from specjax.evaluate.evaluation import Evaluation
from specjax.evaluate.results import Share

HERE = Path(__file__).resolve().parent
PLAIN = "tiny, float32, 20 prompts x up to 128 tokens"
BENCHES = {
    "bench/bench": ("bench/results", f"{PLAIN}, greedy, batch 1, median of 2"),
    "drafters/greedy": ("drafters/greedy", f"{PLAIN}, greedy, batch 1, median of 1"),
    "drafters/sampled": ("drafters/sampled", f"{PLAIN}, temperature 1, seed 0, batch 1, median of 1"),
    "drafters/wide": ("drafters/wide", ""),
}
"""Of every picture the JSON, and the setting where that does not hold it."""
EVALS = {f"{name}/quality": f"{name}/eval" for name in ("cache_types", "diffusion", "few_bits")}


def read(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


def of_bench(name: str, about: str) -> Report:
    """A bench from its JSON."""
    said = read(name)
    rows = [Row(**row | {"acceptance_by_depth": tuple(row["acceptance_by_depth"])}) for row in said["rows"]]
    return Report(rows, [PeerRow(**peer) for peer in said["peers"]], said.get("about", about))


def of_eval(name: str) -> Evaluation:
    """An evaluation from its JSON, as far as its picture goes: accuracies and speeds."""
    said = read(name)
    rows = []
    for row in (said, *said["decoders"]):
        share = Share(*(row[field] for field in ("accuracy", "low", "high", "n")))
        speed = row["tokens_per_second"]
        cost = evaluated.Cost(speed, speed / row["tokens_per_step"], 1.0, 1.0)
        rows.append(evaluated.Row(row["decoder"], {}, share, cost, []))
    return Evaluation(rows, [], said["about"])


def main() -> None:
    """Draws all of them."""
    for name, (source, about) in BENCHES.items():
        bench.plot(of_bench(source, about), str(HERE / f"{name}.png"))
    for name, source in EVALS.items():
        evaluation.plot(of_eval(source), str(HERE / f"{name}.png"))


if __name__ == "__main__":
    main()
