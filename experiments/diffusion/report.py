"""The table of `README.md` from `results.json`, and the pictures of speed against quality and of training.

python experiments/diffusion/report.py
"""

import json
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent


def table(rows: list[dict]) -> None:
    print(
        "| unmask | cache | tokens a pass | tokens/s | ratio | bits per byte | exact match | difference, 95% interval |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = (f"{100 * x:+.1f}" for x in row["infill_difference"])
        print(
            f"| `{row['unmask']}` | `{row['cache']}` | {row['tokens_per_pass']:.2f} | {row['tokens_per_second']:.0f} | "
            f"{row['ratio']:.2f} | {row['bits_per_byte']:.2f} | {100 * row['infill_exact_match']:.1f}% | {low} to {high} |"
        )


def picture(rows: list[dict]) -> None:
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    base = rows[0]["infill_exact_match"]
    for i, row in enumerate(rows):
        name, style = f"{row['unmask']} / {row['cache']}", {"color": f"C{i % 10}", "marker": "os^"[i // 10]}
        low, high = (100 * (base + x) for x in row["infill_difference"])
        match = 100 * row["infill_exact_match"]
        left.errorbar(row["ratio"], match, yerr=[[match - low], [high - match]], capsize=3, label=name, **style)
        right.plot(row["tokens_per_pass"], row["bits_per_byte"], linestyle="", **style)
    left.axhline(100 * base - 1, color="0.4", linewidth=0.8, linestyle=":")
    left.axvline(4, color="0.4", linewidth=0.8, linestyle=":")
    left.set_xlabel("speed over one token a pass without a cache")
    left.set_ylabel("lines filled in exactly, %")
    right.set_xlabel("tokens a forward pass")
    right.set_ylabel("bits per byte under the autoregressive model")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.savefig(HERE / "quality.png", dpi=120)


def curve() -> None:
    records = [json.loads(line) for line in (HERE / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    tokens = [record["tokens"] / 1e6 for record in records]
    axes.plot(
        tokens, [record["heldout_half_masked"] for record in records], label="held out, half of every window masked"
    )
    trained = [(at, record["loss"]) for at, record in zip(tokens, records, strict=True) if record["loss"] is not None]
    axes.plot(*zip(*trained, strict=True), label="training batches, as the recipe masks them")
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("nats a masked token")
    axes.legend()
    figure.savefig(HERE / "training.png", dpi=120)


if __name__ == "__main__":
    rows = json.loads((HERE / "results.json").read_text())["rows"]
    table(rows)
    picture(rows)
    curve()
