"""Pictures. Each function draws on the given axes, or on a new figure, and returns the matplotlib figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.viz import data
from specjax.viz.picture import Picture, axes_on

MARKERS = ("o-", "s--", "^:")
KEPT, OTHER = "#2e7d32", "#9e9e9e"
SHADES = ("#a9cce3", "#f5cba7", "#b8d8ba", "#d2b4de", "#f7dc6f", "#e6b0aa", "#aed6c9", "#d5d8dc")


def token_tree(step: Any, row: int = 0, tokenizer: Any = None, axes: Any = None) -> Any:
    """Draws a step's token tree from left to right, one column per depth.

    The accepted path is green; the target's own token is dashed.

    Args:
      step: a `specjax.StepInfo`, or a `specjax.Tree`.
      row: a row of the batch.
      tokenizer: turns ids into words; None: the ids are shown.
      axes: to draw on; None: those of a new figure.

    Raises:
      ValueError: if there is no such row.
    """
    nodes = data.nodes_of(step, row, tokenizer)
    height = heights(nodes)
    deepest = max(node.depth for node in nodes)
    figure, axes = axes_on(axes, 1.2 * (deepest + 1) + 0.3, 0.34 * (1 + max(height.values())) + 0.3)
    at = {node.id: (node.depth, -height[node.id]) for node in nodes}
    for node in nodes:
        bold = node.kept or node.follows
        colour = KEPT if bold else OTHER
        if node.parent >= 0:
            (x0, y0), (x1, y1) = at[node.parent], at[node.id]
            axes.plot([x0, x1], [y0, y1], color=colour, linewidth=1.8 if bold else 0.8, zorder=1 + bold)
        box = {"boxstyle": "round,pad=0.25", "facecolor": "#e8f5e9" if node.kept else "white", "edgecolor": colour}
        box["linestyle"] = "--" if node.follows else "-"
        axes.text(
            *at[node.id], cut(node.word), bbox=box, ha="center", va="center", fontsize=8, family="monospace", zorder=4,
            parse_math=False,
        )  # fmt: skip
    axes.set_xlim(-0.5, deepest + 0.5)
    axes.set_ylim(-max(height.values()) - 0.6, 0.6)
    axes.set_axis_off()
    return figure


def heights(nodes: Sequence[data.Node]) -> dict[int, float]:
    """The height of each node: leaves are stacked, and a parent is in the middle of its children."""
    below: dict[int, list[int]] = {node.id: [] for node in nodes}
    for node in nodes[1:]:
        below[node.parent].append(node.id)
    leaves, found = 0, {}
    stack = [(nodes[0].id, False)]
    while stack:
        node, seen = stack.pop()
        own = below[node]
        if seen:
            found[node] = (found[own[0]] + found[own[-1]]) / 2
        elif own:
            stack += [(node, True), *((child, False) for child in reversed(own))]
        else:
            found[node] = float(leaves)
            leaves += 1
    return found


def cut(word: str, room: int = 12) -> str:
    """A word cut to at most this number of characters."""
    return word if len(word) <= room else f"{word[: room - 2]}.."


def acceptance(what: Any, axes: Any = None) -> Any:
    """Draws one line per decoder: the share of steps that accepted at least 1, 2, ... draft tokens.

    Args:
      what: a report of `specjax bench` or its JSON; or a dict from names to records of `specjax.generate`, a decoder's
        state, or shares.
      axes: to draw on; None: those of a new figure.
    """
    figure, axes = axes_on(axes, 8, 4)
    found = data.acceptances(what)
    for i, (name, share) in enumerate(found.items()):
        if share:  # the others keep their colours of `speedup`
            axes.plot(
                range(1, len(share) + 1), share, MARKERS[i // 10 % 3], color=f"C{i % 10}", label=name, markersize=4
            )
    axes.set_ylim(0, 1)
    axes.set_xlabel("accepted draft tokens, or more")
    axes.set_ylabel("share of steps")
    if any(found.values()):
        axes.legend(fontsize=7 if len(found) > 8 else 8, loc="upper left", bbox_to_anchor=(1.01, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def speedup(report: Any, axes: Any = None) -> Any:
    """Draws one bar per decoder, fastest on top: its speed relative to plain decoding. Peers are grey.

    Args:
      report: a report of `specjax bench`, or its JSON.
      axes: to draw on; None: those of a new figure.
    """
    bars = data.speeds(report)
    figure, axes = axes_on(axes, 7, 1.2 + 0.27 * len(bars))
    colours = ["0.6" if bar.peer else f"C{i % 10}" for i, bar in enumerate(bars)]
    order = sorted(range(len(bars)), key=lambda i: bars[i].ratio)
    drawn = axes.barh(range(len(bars)), [bars[i].ratio for i in order], color=[colours[i] for i in order])
    axes.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    axes.set_yticks(range(len(bars)), [bars[i].name for i in order], fontsize=8)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.margins(x=0.1, y=0.02)
    axes.set_xlabel("speed over plain decoding")
    return figure


def unmask_order(what: Any, words: Sequence[str] | None = None, columns: int = 16, axes: Any = None) -> Any:
    """Draws a heat map of the step that wrote each position: one line per decoder or, with words, one decoder's text.

    Decoders differ in their number of passes, so each uses the whole colour scale.

    Args:
      what: rows of `specjax bench order`, their JSON, or a dict from names to orders
        (`specjax.bench.order.unmask_order`).
      words: the word at each position, for a single decoder.
      columns: positions per line, if there are words.
      axes: to draw on; None: those of a new figure.

    Raises:
      ValueError: on words for several decoders, or a number of words other than the number of positions.
    """
    found = data.orders(what)
    rows = list(found.values())
    if words is None:
        size = 11.0, 1.2 + 0.32 * len(rows)
    else:
        data.check_words(found, words)
        rows = [rows[0][begin : begin + columns] for begin in range(0, len(words), columns)]
        size = 1.0 + 0.75 * columns, 0.9 + 0.32 * len(rows)
    figure, axes = axes_on(axes, *size)
    values = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for line, row in zip(values, rows, strict=True):
        line[: len(row)] = row
    last = values.max(axis=1, keepdims=True) if words is None else values.max()
    shown = np.ma.masked_equal(values, 0) / np.maximum(last, 1)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
    for i, word in enumerate(words or ()):
        dark = 0 < values[i // columns, i % columns] < 0.6 * values.max()
        axes.text(
            i % columns, i // columns, cut(word, 9), ha="center", va="center", fontsize=7, family="monospace",
            color="white" if dark else "black", parse_math=False,
        )  # fmt: skip
    if words is None:
        axes.set_yticks(range(len(rows)), found, fontsize=8)
        axes.set_xlabel("position after the prompt; in brackets: passes")
    else:
        axes.set_xticks([])
        axes.set_yticks(range(len(rows)), [str(columns * i) for i in range(len(rows))], fontsize=8)
        axes.set_title(next(iter(found)), fontsize=9)
    figure.colorbar(image, ax=axes, label="step, of its last", pad=0.01)
    return figure


def step_times(what: Mapping[str, Any], axes: Any = None) -> Any:
    """Draws one bar per name: the seconds of its parts.

    Args:
      what: a dict from names to seconds by part, or to an engine's `timing`.
      axes: to draw on; None: those of a new figure.
    """
    found = data.times(what)
    figure, axes = axes_on(axes, 7, 1.2 + 0.42 * len(found))
    unit, scale = data.unit_of(sum(parts.values()) for parts in found.values())
    begin = dict.fromkeys(found, 0.0)
    whole = sorted(found.values(), key=len, reverse=True)  # the order of the name with the most parts
    for i, part in enumerate(dict.fromkeys(part for parts in whole for part in parts)):
        widths = [scale * parts.get(part, 0.0) for parts in found.values()]
        axes.barh(range(len(found)), widths, left=list(begin.values()), color=f"C{i % 10}", label=part, height=0.7)
        begin = {name: start + width for (name, start), width in zip(begin.items(), widths, strict=True)}
    axes.set_yticks(range(len(found)), found)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(fontsize=8, loc="best")
    return figure


def cache_layout(decoder: Any, state: Any, axes: Any = None) -> Any:
    """Draws one array of a decoder's cache, coloured and numbered by the devices that hold each part.

    Lines are rows and columns are slots. A row's heads are stacked; a black line covers the slots in use.

    Args:
      decoder: the decoder of the state.
      state: of arrays, or of `ShapeDtypeStruct` with shardings.
      axes: to draw on; None: those of a new figure.

    Raises:
      ValueError: if the state has no cache.
    """
    found = data.layout(decoder, state)
    rows, heads, slots = found.sizes
    bands = len({tile.spans[1] for tile in found.tiles})
    figure, axes = axes_on(axes, 7, min(1.2 + max(0.4, 0.2 * bands) * rows, 9.0))
    for i, tile in enumerate(found.tiles):
        (first, end), (low, high), (left, right) = tile.spans
        whole = high - low == heads
        places = [(first, end)] if whole else [(row + low / heads, row + high / heads) for row in range(first, end)]
        for top, bottom in places:
            middle, colour = (top + bottom) / 2, SHADES[i % len(SHADES)]
            axes.barh(middle, right - left, bottom - top, left=left, color=colour, edgecolor="white")
        axes.text((left + right) / 2, sum(places[0]) / 2, data.devices_of(tile), ha="center", va="center", fontsize=8)
    axes.hlines(range(1, rows), 0, slots, color="0.4", linewidth=0.8)
    for row, length in enumerate(found.lengths or ()):
        axes.plot([0, length], [row + 0.5] * 2, color="black", linewidth=1.2)
    axes.set_xlim(0, slots)
    axes.set_ylim(rows, 0)
    axes.set_yticks([row + 0.5 for row in range(rows)], [str(row) for row in range(rows)], fontsize=8)
    axes.set_xlabel("slot")
    axes.set_ylabel("row" if heads == 1 else f"row, {heads} heads each")
    axes.set_title(data.size_of(found), fontsize=9)
    return figure


def training(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws loss and acceptance over the steps of a training run, each step and a running mean.

    If held-out text was read, its loss and its acceptance at each depth are drawn too; a line marks the best reading.

    Args:
      records: the lines of the run's `metrics.jsonl`.
    """
    names = [name for name in ("loss", "acceptance") if name in records[0]]
    figure = Picture(5.5 * len(names), 4)
    steps = [record["step"] for record in records]
    told = [record for record in records if "held_out_loss" in record]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        values = [record[name] for record in records]
        axes.plot(steps, values, color="C0", alpha=0.3)
        axes.plot(steps, running_mean(values, max(1, len(values) // 50)), color="C0", label="training")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        if told:
            _held_out(axes, told, f"held_out_{name}")
    return figure


def _held_out(axes: Any, told: Sequence[Mapping[str, Any]], name: str) -> None:
    """Draws the held-out readings under a name, and under that name with a depth."""
    steps = [record["step"] for record in told]
    found = [key for key in told[0] if key == name or key.removeprefix(f"{name}_").isdecimal()]
    for number, key in enumerate(found, start=1):
        label = "held out" if len(found) == 1 else f"held out, depth {number}"
        axes.plot(steps, [record[key] for record in told], color=f"C{number}", marker=".", label=label)
    best = max(told, key=lambda record: record["held_out_merit"])
    axes.axvline(best["step"], color="grey", linestyle=":", label="best")
    axes.legend()


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values, or of all values if there are fewer.

    >>> running_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    last = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [math.fsum(part) / len(part) for part in last]
