"""A training run as a picture."""

import json
from pathlib import Path


def plot(metrics: Path, picture: str) -> None:
    """Draws loss and acceptance over the steps of a `metrics.jsonl`, each step and a running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    names = [name for name in ("loss", "acceptance") if name in records[0]]
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    FigureCanvasAgg(figure)
    steps = [record["step"] for record in records]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        values = [record[name] for record in records]
        axes.plot(steps, values, color="C0", alpha=0.3)
        axes.plot(steps, running_mean(values, max(1, len(values) // 50)), color="C0")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
    figure.savefig(picture, dpi=120)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values, or of as many as there are.

    >>> running_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    last = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in last]
