"""An evaluation as tables and as a picture."""

from collections.abc import Iterator, Sequence
from typing import Any

from specjax.evaluate.evaluation import Evaluation
from specjax.evaluate.results import Comparison, Row, Share
from specjax.evaluate.statistics import Estimate, Paired
from specjax.evaluate.trust import BINS, Trust


def tables(found: Evaluation) -> None:
    """Prints accuracy by family, and speed and differences by decoder."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 200
    console.print(found.about, soft_wrap=True)
    console.print(_accuracies(found))
    console.print(_decoders(found))
    if found.trust:
        console.print(_trust(found.trust))


def _accuracies(found: Evaluation) -> Any:
    from rich.table import Table

    table = Table(title="right answers (95%, Wilson)", title_justify="left")
    table.add_column("family")
    table.add_column("questions", justify="right")
    for row in found.rows:
        table.add_column(row.decoder, justify="right")
    for name, share in found.rows[0].families.items():
        table.add_row(name, str(share.n), *(_percent(row.families[name]) for row in found.rows))
    table.add_section()
    table.add_row("all", str(found.rows[0].overall.n), *(_percent(row.overall) for row in found.rows))
    return table


def _decoders(found: Evaluation) -> Any:
    from rich.table import Table

    first, fits = found.rows[0], {comparison.decoder: comparison for comparison in found.comparisons}
    title = f"against {found.comparisons[0].baseline}, question by question" if fits else ""
    table = Table(title=title, title_justify="left")
    several = any(
        answer.steps > answer.tokens for row in found.rows for answer in row.answers
    )  # an answer is one of these
    names = ["decoder", "tokens/step", *(["steps/answer"] if several else []), "tokens/s", "speed ratio"]
    names += ["points (95%, Bonett-Price)", "p (exact)", "same text", "verdict"] if fits else []
    for name in names:
        table.add_column(name, justify="left" if name in ("decoder", "verdict") else "right")
    for row in found.rows:
        speed = row.tokens_per_second / first.tokens_per_second
        steps = [f"{row.steps_per_answer:.1f}"] if several else []
        cells = [row.decoder, f"{row.tokens_per_step:.2f}", *steps, f"{row.tokens_per_second:.1f}", f"{speed:.2f}"]
        table.add_row(*cells, *(_difference(fits.get(row.decoder)) if fits else []))
    return table


def _percent(share: Share) -> str:
    return f"{100 * share.accuracy:.1f}% ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _difference(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["", "", "", ""]
    own = comparison.overall
    return [
        _points(own),
        f"{own.p_value:.3g}",
        f"{comparison.same_text}/{comparison.answers}",
        comparison.verdict,
    ]


def _trust(rows: Sequence[Trust]) -> Any:
    """A column for every decoder, since there are more measures than decoders."""
    from rich.table import Table

    table = Table(title=f"trust, against {rows[0].decoder} (95%)", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row.decoder, justify="right")
    for name, cells in trust_lines(rows):
        table.add_row(name, *cells)
    return table


def trust_lines(rows: Sequence[Trust]) -> Iterator[tuple[str, list[str]]]:
    """Every measure of trust in words, with a cell for every decoder; the first has no comparison."""
    against = lambda show: [show(row.against) if row.against else "" for row in rows]
    yield "right", [_percent(row.right) for row in rows]
    yield "points", against(lambda own: _points(own.points))
    yield "right that became wrong, wrong that became right", against(lambda own: f"{own.lost}, {own.gained}")
    yield "texts that change", against(lambda own: _percent(own.changed))
    yield "divergence, nats per token", against(lambda own: _estimate(own.divergence, ""))
    yield "mean probability of an answer", [f"{100 * row.confidence:.1f}%" for row in rows]
    yield f"calibration error, {BINS} bins, points", [f"{100 * row.calibration_error:.1f}" for row in rows]
    yield "its change, points", against(lambda own: _estimate(own.calibration_change, "+", 100))
    for name, share in rows[0].groups.items():
        yield f"right, {name} ({share.n} questions)", [_percent(row.groups[name]) for row in rows]
        yield f"points, {name}", against(lambda own, name=name: _points(own.groups[name]))
    yield "parameters, MB", [f"{row.parameter_bytes / 1e6:.2f}" for row in rows]
    yield f"cache of {rows[0].slots} tokens, MB", [f"{row.cache_bytes / 1e6:.2f}" for row in rows]


def _points(own: Paired) -> str:
    return f"{100 * own.difference:+.1f} ({100 * own.low:+.1f} to {100 * own.high:+.1f})"


def _estimate(own: Estimate, sign: str, scale: float = 1) -> str:
    form = f"{sign}.1f" if scale > 1 else f"{sign}.2g"
    return f"{scale * own.value:{form}} ({scale * own.low:{form}} to {scale * own.high:{form}})"


def remarks(found: Evaluation) -> list[str]:
    """Remarks beside the figures: AUROC, and answers that were cut short or failed."""
    said = []
    for row in found.rows:
        if (own := row.auroc) is not None:
            said.append(
                f"{row.decoder}: wrong answers have a higher negative log-likelihood than right ones with AUROC {own.area:.3f} "
                f"(95% {own.low:.3f} to {own.high:.3f}; {own.positive} wrong, {own.negative} right)"
            )
        if (form := row.compliance) is not None:
            said.append(
                f"{row.decoder}: {_percent(form)} of {form.n} answers have the form that was asked for (95%, Wilson)"
            )
        cut, failed = row.count("length"), row.count("error")
        if cut:
            said.append(
                f"{row.decoder}: {cut} of {len(row.answers)} answers were cut at --max-new-tokens or the model's length"
            )
        if failed:
            said.append(f"{row.decoder}: {failed} answers failed, since logits were not finite; they count as wrong")
    return said


def plot(found: Evaluation, path: str) -> None:
    """Writes the picture of an evaluation."""
    picture(found).savefig(path, dpi=120)


def picture(found: Evaluation) -> Any:
    """Plots accuracy over tokens per second, one point per decoder, with 95% intervals of the accuracy."""
    from specjax.viz.picture import Picture

    figure = Picture(8, 5 + 0.18 * len(found.rows))
    axes = figure.subplots()
    for index, row in enumerate(found.rows):
        _point(axes, row, f"C{index % 10}")
    axes.set_xlim(0, 1.1 * max(row.tokens_per_second for row in found.rows))
    axes.set_xlabel("tokens per second")
    axes.set_ylabel("right answers, %")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center")
    figure.suptitle(found.about, fontsize=9)
    return figure


def _point(axes: Any, row: Row, color: str) -> None:
    share = row.overall
    below, above = share.accuracy - share.low, share.high - share.accuracy
    axes.errorbar(
        row.tokens_per_second,
        100 * share.accuracy,
        yerr=[[100 * below], [100 * above]],
        fmt="o",
        capsize=4,
        color=color,
        label=f"{row.decoder}: {row.tokens_per_step:.2f} tokens per step",
    )
