"""A bench as a table and as a picture."""

from specjax.bench.run import WINDOW, Report

DEPTHS = 8
"""The most depths of acceptance in the table: a diffusion model has as many as its block has positions."""


def table(report: Report) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    rows = Table(title=report.about, title_justify="left")
    rows.add_column("decoder", overflow="fold")
    bound = any(row.mbsu is not None for row in report.rows)
    if_bound = lambda cell: [cell] if bound else []
    names = ("tokens/\nstep", *if_bound("MBSU"), "tokens/s", "ratio\nto plain", "step\nratio", "identical\ntext")
    for name in names:
        rows.add_column(name, justify="right", no_wrap=True)  # on a narrow terminal, the other columns wrap
    rows.add_column("accepted\nby depth", justify="right")
    for row in report.rows:
        shares = row.acceptance_by_depth
        rows.add_row(
            row.decoder,
            f"{row.tokens_per_step:.2f}",
            *if_bound("" if row.mbsu is None else f"{row.mbsu:.2f}"),
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio_to_plain:.2f}",
            f"{row.step_ratio:.2f}",
            "yes" if row.identical_text else "no",
            " ".join([f"{share:.2f}" for share in shares[:DEPTHS]] + ["..."] * (len(shares) > DEPTHS)),
        )
    plain = report.rows[0].tokens_per_second
    for peer in report.peers:
        same = {True: "yes", False: "no", None: ""}[peer.identical_text]
        ratio = f"{peer.tokens_per_second / plain:.2f}"
        cells = f"{peer.tokens_per_second:.1f}", ratio, "", same, ""
        rows.add_row(f"{peer.peer} {peer.mode}", "", *if_bound(""), *cells)
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 1000
    console.print(rows)
    share = report.rows[0].type_token_ratio
    console.print(f"of the last {WINDOW} tokens of {report.rows[0].decoder}'s texts, {share:.0%} are different ones")


def plot(report: Report, path: str) -> None:
    """Writes two panels: speed over plain decoding, and acceptance by depth."""
    from specjax.viz import figures
    from specjax.viz.picture import Picture

    figure = Picture(15, max(4.5, 1.2 + 0.27 * len([*report.rows, *report.peers])))
    left, right = figure.subplots(1, 2)
    figures.speedup(report, left)
    figures.acceptance(report, right)
    figure.suptitle(report.about, fontsize=9)
    figure.savefig(path, dpi=120)
