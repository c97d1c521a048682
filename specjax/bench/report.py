"""A bench as a table and as a picture."""

import importlib.util
from pathlib import Path

from specjax.bench.run import Report

MARKERS = ("o-", "s--", "^:")


def table(report: Report) -> None:
    """Prints the table on stdout."""
    from rich.console import Console
    from rich.table import Table

    rows = Table(title=report.about, title_justify="left")
    for name in (
        "decoder",
        "tokens/step",
        "tokens/s",
        "ratio to plain",
        "step ratio",
        "identical text",
        "accepted by depth",
    ):
        rows.add_column(name, justify="left" if name == "decoder" else "right", no_wrap=True)
    for row in report.rows:
        rows.add_row(
            row.decoder,
            f"{row.tokens_per_step:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio_to_plain:.2f}",
            f"{row.step_ratio:.2f}",
            "yes" if row.identical_text else "no",
            " ".join(f"{share:.2f}" for share in row.acceptance_by_depth),
        )
    plain = report.rows[0].tokens_per_second
    for peer in report.peers:
        same = "yes" if peer.identical_text else "no"
        ratio = f"{peer.tokens_per_second / plain:.2f}"
        rows.add_row(f"{peer.peer} {peer.mode}", "", f"{peer.tokens_per_second:.1f}", ratio, "", same, "")
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width to fit
        console.width = 160
    console.print(rows)


def check_plot(path: str) -> None:
    """Raises ValueError where the picture could not be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'specjax[plot]'")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"--plot {path!r}: give a file in a folder that exists")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path!r}: give a name that ends in .png, .svg or .pdf")


def plot(report: Report, path: str) -> None:
    """Writes two panels: speed over plain decoding, and acceptance by depth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    plain = report.rows[0].tokens_per_second
    bars = [(row.decoder, row.ratio_to_plain, f"C{i % 10}") for i, row in enumerate(report.rows)]
    bars += [(f"{peer.peer} {peer.mode}", peer.tokens_per_second / plain, "0.6") for peer in report.peers]
    names, heights, colours = zip(*bars, strict=True)
    drawn = left.bar(range(len(bars)), heights, color=colours)
    left.bar_label(drawn, fmt="%.2f", fontsize=8 if len(bars) > 8 else None)
    left.set_xticks(range(len(bars)), names, rotation=25, ha="right")
    left.axhline(1.0, color="0.3", linewidth=0.8)
    left.margins(y=0.1)
    left.set_ylabel("speed over plain decoding")
    for i, row in enumerate(report.rows):
        share = row.acceptance_by_depth
        if share:
            right.plot(range(1, len(share) + 1), share, MARKERS[i // 10], color=f"C{i % 10}", label=row.decoder)
    right.set_ylim(0, 1)
    right.set_xlabel("accepted draft tokens, or more")
    right.set_ylabel("share of steps")
    if len(right.get_lines()):
        right.legend(fontsize=7 if len(report.rows) > 8 else None, ncols=1 + len(report.rows) // 10)
        right.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(report.about, fontsize=9)
    figure.savefig(path, dpi=120)
