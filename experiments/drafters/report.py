"""The tables of `README.md` from what `specjax bench --json` printed, and the picture of training from the metrics.

python experiments/drafters/report.py
"""

import functools
import json
import pathlib
import re

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
CLAIMS = {
    "medusa": "2.2 times plain",
    "hydra": "1.31 times Medusa",
    "mlp_speculator": "2 to 3 times plain",
    "lstm_speculator": "not at hand",
    "clover": "up to 2.46 times plain, 1.57 times Medusa",
    "clover2": "9.3% over EAGLE",
    "chimera": "2.7 times plain",
    "hidden_transfer": "more accepted tokens than Medusa",
    "ppd": "up to 2.49 times plain",
    "kangaroo": "up to 1.68 times plain",
    "dovetail": "2.77 times the target alone on a CPU, with 3 GB of a GPU",
    "dovetail_1": "not at hand",
    "falcon": "2.91 to 3.51 times plain",
    "eagle1": "about 3 times plain",
    "hass": "8% to 20% over EAGLE-2",
    "fspad": "0.28 to 0.48 tokens per step over EAGLE-2",
    "griffin": "8% longer accepted texts than EAGLE-2 and others, 7% faster; 1.3 times EAGLE-2 in its page",
    "gumiho": "faster than EAGLE-2 and Hydra; no one number",
    "eagle3": "up to 6.5 times plain, 1.4 times EAGLE-2",
    "mtp": "1.8 times plain, with one drafted token",
    "peagle": "1.10 to 1.36 times EAGLE-3",
    "dflash": "over 6 times plain, up to 2.5 times EAGLE-3",
    "dflash2": "not at hand",
    "domino": "up to 5.49 times plain",
    "dspark": "16% to 31% longer accepted texts than DFlash and EAGLE-3",
    "jetspec": "9.64 times plain on MATH-500, 4.58 on MT-Bench",
}
"""What papers and pages of heads say, with their own models, trees, training and hardware."""
MARKED = re.compile(r"<!-- measured: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(name: str) -> str:
    rows = json.loads((HERE / f"{name}.json").read_text())["rows"]
    assert all(row["identical_text"] for row in rows)
    lines = [
        "| drafter | tokens per step | tokens/s | ratio to plain | step ratio | accepted at least 1, 2, 3 ... |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        depth = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
        speed = f"{row['tokens_per_second']:.0f} | {row['ratio_to_plain']:.2f} | {row['step_ratio']:.2f}"
        lines.append(f"| `{row['decoder']}` | {row['tokens_per_step']:.2f} | {speed} | {depth} |")
    return "\n".join(lines)


def trees() -> str:
    """Of every drafter with its small tree and the one of its paper: how much longer the second's step may be to pay."""
    rows = {row["decoder"]: row for row in json.loads((HERE / "trees.json").read_text())["rows"]}
    assert all(row["identical_text"] for row in rows.values())
    lines = [
        "| drafter | tokens per step | with the paper's tree | it pays where its step takes less than | measured here |",
        "|---|---|---|---|---|",
    ]
    for line, paper in rows.items():
        if small := rows.get(line.partition(":")[0]) if ":" in line else None:
            gain = paper["tokens_per_step"] / small["tokens_per_step"]
            longer = paper["step_ratio"] / small["step_ratio"]
            tokens = f"{small['tokens_per_step']:.2f} | {paper['tokens_per_step']:.2f}"
            lines.append(f"| `{line}` | {tokens} | {gain:.2f} steps with the small one | {longer:.2f} |")
    return "\n".join(lines)


def before() -> str:
    """Of every head what it accepted as it was trained earlier (`before.json`), and what it accepts now."""
    earlier = json.loads((HERE / "before.json").read_text())
    lines = [
        "| head | sampling | tokens per step | accepted before | tokens per step now | accepted now |",
        "|---|---|---|---|---|---|",
    ]
    for sampling, rows in earlier.items():
        now = {row["decoder"]: row for row in json.loads((HERE / f"{sampling}.json").read_text())["rows"]}
        for row in rows:
            told = [
                f"{r['tokens_per_step']:.2f} | {' '.join(f'{share:.2f}' for share in r['acceptance_by_depth'])}"
                for r in (row, now[row["decoder"]])
            ]
            lines.append(f"| `{row['decoder']}` | {sampling} | {' | '.join(told)} |")
    return "\n".join(lines)


def beside(name: str) -> str:
    """What was measured beside other work: no speeds."""
    greedy, sampled = (json.loads((HERE / f"{name}_{how}.json").read_text())["rows"] for how in ("greedy", "sampled"))
    assert all(row["identical_text"] for row in (*greedy, *sampled))
    accepted = "accepted at least 1, 2, 3 ..."
    lines = [
        f"| drafter | tokens per step, greedy | {accepted} | at temperature 1 | {accepted} |",
        "|---|---|---|---|---|",
    ]
    for rows in zip(greedy, sampled, strict=True):
        assert rows[0]["decoder"] == rows[1]["decoder"]
        told = [
            f"{row['tokens_per_step']:.2f} | {' '.join(f'{share:.2f}' for share in row['acceptance_by_depth'])}"
            for row in rows
        ]
        lines.append(f"| `{rows[0]['decoder']}` | {' | '.join(told)} |")
    return "\n".join(lines)


def equal() -> str:
    """Every head after the same seconds of training, by tokens per step of greedy text, and what its paper says."""
    greedy, sampled = (
        {row["decoder"]: row for row in json.loads((HERE / f"equal_{how}.json").read_text())["rows"]}
        for how in ("greedy", "sampled")
    )
    heads = {row["head"]: row for row in json.loads((HERE / "equal.json").read_text())}
    assert all(row["identical_text"] for rows in (greedy, sampled) for row in rows.values())
    accepted = "accepted at least 1, 2, 3 ..."
    lines = [
        f"| head | updates | seconds | MB | tokens per step, greedy | {accepted} "
        f"| at temperature 1 | {accepted} | its paper claims |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(heads, key=lambda name: -greedy[name]["tokens_per_step"]):
        told = [
            f"{row['tokens_per_step']:.2f} | {' '.join(f'{share:.2f}' for share in row['acceptance_by_depth'])}"
            for row in (greedy[name], sampled[name])
        ]
        size = f"{heads[name]['updates']} | {heads[name]['seconds']:.0f} | {heads[name]['bytes'] / 1e6:.1f}"
        lines.append(f"| `{heads[name]['line']}` | {size} | {' | '.join(told)} | {CLAIMS[name]} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the tables of its reports."""
    own = {"trees": trees, "before": before, "equal": equal} | {
        name: functools.partial(beside, name) for name in ("later", "newer")
    }
    made = lambda name: own[name]() if name in own else table(name)
    new = lambda found: f"<!-- measured: {found[1]} -->\n\n{made(found[1])}\n\n<!-- end -->"
    return MARKED.sub(new, page)


def curves() -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for file in sorted(HERE.glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        size = max(len(records) // 20, 1)  # means over a twentieth of the run
        means = [
            sum(r["acceptance"] for r in records[i : i + size]) / size for i in range(0, len(records) - size + 1, size)
        ]
        axes.plot([records[i * size + size - 1]["tokens"] / 1e3 for i in range(len(means))], means, label=file.stem)
    axes.set_xlabel("thousand tokens trained on")
    axes.set_ylabel("chance that the first draft token is accepted")
    axes.legend()
    figure.savefig(HERE / "training.png", dpi=120)


if __name__ == "__main__":
    page = HERE / "README.md"
    page.write_text(written(page.read_text()))
    curves()
