"""`python docs/drawings.py` draws `layers.png` and `way_of_a_prompt.png` of design.md from the code; needs 'specjax[plot]'."""

import ast
import graphlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import layers as reading

FOLDER = Path(__file__).resolve().parent
COLOURS = {1: "#d9d9d9", 2: "#b8d8ba", 3: "#a9cce3", 4: "#d2b4de", 5: "#f5cba7", 6: "#f7dc6f"}


class Stop(NamedTuple):
    """A station of a prompt's way: what happens there, and the (module, name)s that do it."""

    title: str
    what: str
    places: tuple[tuple[str, str], ...]


WAY = (
    Stop(
        "text",
        "a prompt becomes token ids",
        (("specjax.serve.engine", "Engine.encode"), ("specjax.models.text", "encode_text")),
    ),
    Stop("request", "ids, limits and sampling, checked", (("specjax.serve.request", "Request"),)),
    Stop(
        "rows",
        "a free row takes the next request",
        (("specjax.serve.slots", "Loop"), ("specjax.serve.slots", "Slots.insert")),
    ),
    Stop(
        "prefill",
        "target and drafter read all but the prompt's last token",
        (("specjax.speculative", "Speculative.prefill"), ("specjax.draft.base", "Drafter.prefill")),
    ),
    Stop("loop", "steps until a row ends, without the host", (("specjax.decoder", "run_program"),)),
    Stop(
        "draft",
        "a tree of tokens below the last one",
        (("specjax.draft.base", "Drafter.propose"), ("specjax.expand.base", "Expander")),
    ),
    Stop("target", "one pass over all nodes of the tree", (("specjax.lm", "LM"), ("specjax.models.llama", "LlamaLM"))),
    Stop(
        "verify",
        "which path stays, and what follows it",
        (("specjax.verify.base", "Verifier"), ("specjax.sampling.sampler", "Sampler")),
    ),
    Stop(
        "accept",
        "the path's keys into the cache, its tokens into the text",
        (
            ("specjax.speculative", "Speculative.step"),
            ("specjax.lm", "LM.commit"),
            ("specjax.draft.base", "Drafter.observe"),
        ),
    ),
    Stop("record", "tokens, why the row ended, counters", (("specjax.serve.request", "Record"),)),
    Stop(
        "text",
        "ids become text again, up to a stop string",
        (("specjax.models.text", "new_text"), ("specjax.serve.text", "find_stop")),
    ),
)
STEP = ("draft", "accept")
"""The stations of one step, first and last."""
ROWS = ("rows", "record")
"""The stations of one request in a row."""


def missing(way: Sequence[Stop]) -> list[str]:
    """Which names of a way are not where it says, a line each."""
    modules = reading.modules_of()
    wrong = []
    for module, name in (place for stop in way for place in stop.places):
        if module not in modules:
            wrong.append(f"there is no {module}")
        elif name not in _defined(ast.parse(modules[module].read_text())):
            wrong.append(f"{module} has no {name}")
    return wrong


def _defined(tree: ast.Module) -> set[str]:
    """Classes, functions and `Class.method`s of a module."""
    kinds = ast.ClassDef, ast.FunctionDef
    outer = [node for node in tree.body if isinstance(node, kinds)]
    inner = {f"{a.name}.{b.name}" for a in outer if isinstance(a, ast.ClassDef) for b in a.body if isinstance(b, kinds)}
    return {node.name for node in outer} | inner


def shortest(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from others (transitive reduction)."""
    below: dict[str, set[str]] = {}
    for part in graphlib.TopologicalSorter(graph).static_order():
        below[part] = set().union(*({other} | below[other] for other in graph[part]))
    return {part: {x for x in to if not any(x in below[y] for y in to)} for part, to in graph.items()}


def floors(graph: Mapping[str, set[str]], layers: Mapping[str, int]) -> dict[str, int]:
    """How high each part lies: above all that it imports, and a layer's lowest above the highest of the layer below."""
    found: dict[str, int] = {}
    base = 0
    for layer in sorted(set(layers.values())):
        for part in graphlib.TopologicalSorter(graph).static_order():
            if layers[part] == layer:
                found[part] = max([base, *(found[x] + 1 for x in graph[part] if layers[x] == layer)])
        base = 1 + max(found.values())
    return found


def _bends(arrows, floor):
    """Arrows as chains of places, one a floor, and for every floor the places there: (part,) or (above, below, floor)."""
    rows: dict[int, list[Any]] = {}
    for part, height in floor.items():
        rows.setdefault(height, []).append((part,))
    chains = []
    for above, to in arrows.items():
        for below in sorted(to):
            between = [(above, below, height) for height in range(floor[above] - 1, floor[below], -1)]
            for place in between:
                rows[place[2]].append(place)
            chains.append([(above,), *between, (below,)])
    return chains, rows


def placed(
    arrows: Mapping[str, set[str]], floor: Mapping[str, int], widths: Mapping[str, float], sweeps: int = 60
) -> tuple[dict[Any, float], list[Any]]:
    """Where the places of each floor lie from left to right, near to what they are joined to (Sugiyama's method).

    Args:
      arrows: what each part imports.
      floor: how high each lies.
      widths: how wide its box is.
      sweeps: over all floors, up and down in turn.

    Returns:
      From place to x, and the arrows as chains of places.
    """
    chains, rows = _bends(arrows, floor)
    joined: dict[Any, list[Any]] = {place: [] for row in rows.values() for place in row}
    for chain in chains:
        for a, b in zip(chain, chain[1:], strict=False):
            joined[a].append(b)
            joined[b].append(a)
    room = lambda place: widths[place[0]] + 0.45 if len(place) == 1 else 0.45
    x: dict[Any, float] = {}
    for row in rows.values():
        x.update((place, float(i) - len(row) / 2) for i, place in enumerate(row))
    for sweep in range(sweeps):
        for height in sorted(rows, reverse=bool(sweep % 2)):
            wish = lambda place: (
                sum(x[other] for other in joined[place]) / len(joined[place]) if joined[place] else x[place]
            )
            row = sorted(rows[height], key=wish)
            wishes = [wish(place) for place in row]
            x.update(zip(row, _apart(wishes, [room(place) for place in row]), strict=True))
    return x, chains


def _apart(wishes: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Places in order, as near to their wishes as their widths let them: neighbours that would overlap move as one."""
    groups: list[list[float]] = []  # [sum of wished starts, count, width]
    members: list[int] = []
    for wish, room in zip(wishes, rooms, strict=True):
        groups.append([wish - room / 2, 1.0, room])
        members.append(1)
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] + groups[-2][2] > groups[-1][0] / groups[-1][1]:
            total, count, width = groups.pop()
            groups[-1][0] += total - count * groups[-1][2]
            groups[-1][1] += count
            groups[-1][2] += width
            last = members.pop()
            members[-1] += last
    out, rest = [], iter(rooms)
    for (total, count, _), size in zip(groups, members, strict=True):
        at = total / count
        for _ in range(size):
            room = next(rest)
            out.append(at + room / 2)
            at += room
    return out


def _label(part: str) -> str:
    return part.removeprefix(f"{reading.PACKAGE}.")


def _counted(part: str, count: int) -> str:
    """A part's label: its name, and how many modules it has where that is not one."""
    return f"{_label(part)} {count}" if count > 1 else _label(part)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def _box(axes, x, y, width, height, colour, text, **style) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=colour, edgecolor="#333333", linewidth=0.9, zorder=3,
    )  # fmt: skip
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", zorder=4, **{"fontsize": 10, "family": "monospace", **style})


def draw_layers(file: Path) -> None:
    """The parts in their layers, and the arrows between them that do not follow from others."""
    text = (FOLDER / "design.md").read_text()
    table, names, modules = reading.layers_of(text), reading.layer_names(text), reading.modules_of()
    sources = {name: path.read_text() for name, path in modules.items()}
    graph = reading.parts_graph(reading.arrows_of(sources, modules), table)
    floor = floors(graph, table)
    labels = {part: _counted(part, sum(reading.part_of(name, table) == part for name in modules)) for part in floor}
    widths = {part: 0.2 + 0.1 * len(label) for part, label in labels.items()}
    x, chains = placed(shortest(graph), floor, widths)
    gap = lambda height: 0.95 * height
    left, right = min(x.values()) - 2.4, max(x.values()) + 1.0
    top = gap(max(floor.values())) + 0.5
    figure, axes = _figure(0.72 * (right - left), 0.72 * (top + 0.5))
    axes.set_xlim(left, right)
    axes.set_ylim(-0.5, top)
    for layer, name in names.items():
        own = [gap(floor[part]) for part in table if table[part] == layer]
        axes.axhspan(min(own) - 0.44, max(own) + 0.44, color=COLOURS[layer], alpha=0.25, linewidth=0, zorder=0)
        axes.text(left + 0.15, (min(own) + max(own)) / 2, f"{layer} {name}", va="center", fontsize=11, weight="bold")
    for chain in chains:
        _arrow(
            axes,
            [(x[place], gap(place[2] if len(place) == 3 else floor[place[0]])) for place in chain],
            table[chain[0][0]],
        )
    for part, height in floor.items():
        _box(axes, x[(part,)], gap(height), widths[part], 0.42, COLOURS[table[part]], labels[part], fontsize=9)
    figure.savefig(file)


def _arrow(axes, points, layer) -> None:
    """A smooth line through the points, from box to box."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Line

    (x0, y0), *_, (x1, y1) = points
    points = [(x0, y0 - 0.21), *points[1:-1], (x1, y1 + 0.22)]
    vertices, codes = [points[0]], [Line.MOVETO]
    for (ax, ay), (bx, by) in zip(points, points[1:], strict=False):
        middle = (ay + by) / 2
        vertices += [(ax, middle), (bx, middle), (bx, by)]
        codes += [Line.CURVE4] * 3
    dark = {1: "#777777", 2: "#3d7a41", 3: "#2471a3", 4: "#7d3c98", 5: "#ca6f1e", 6: "#9a7d0a"}[layer]
    axes.add_patch(
        FancyArrowPatch(
            path=Line(vertices, codes), arrowstyle="-|>", mutation_scale=9, color=dark, linewidth=1.1, zorder=2
        )
    )


def draw_way(file: Path) -> None:
    """The stations of a prompt from top to bottom, with what does the work beside each."""
    wrong = missing(WAY)
    if wrong:
        raise SystemExit(f"the way of a prompt in {Path(__file__).name} is out of date: " + "; ".join(wrong))
    table = reading.layers_of((FOLDER / "design.md").read_text())
    figure, axes = _figure(9.6, 0.86 * len(WAY) + 0.4)
    axes.set_xlim(0, 9.6)
    axes.set_ylim(-0.86 * len(WAY) + 0.2, 0.6)
    at = [-0.86 * i for i in range(len(WAY))]
    for y, stop, after in zip(at, WAY, [*at[1:], None], strict=True):
        layer = table[reading.part_of(stop.places[0][0], table) or ""]
        _box(axes, 3.85, y, 5.1, 0.56, COLOURS[layer], "")
        axes.text(1.5, y, stop.title, va="center", fontsize=11, weight="bold", zorder=4)
        axes.text(2.45, y, stop.what, va="center", fontsize=8.6, zorder=4)
        places = [f"{_label(module)}.{name}" for module, name in stop.places]
        axes.text(6.6, y, "\n".join(places), va="center", fontsize=8.6, family="monospace", linespacing=1.25)
        if after is not None:
            axes.annotate(
                "", (3.85, after + 0.29), (3.85, y - 0.28), arrowprops={"arrowstyle": "-|>", "color": "#333333"}
            )
    titles = [stop.title for stop in WAY]
    for (first, last), x, words in ((STEP, 1.0, "one step, on the device"), (ROWS, 0.45, "one request in a row")):
        high, low = at[titles.index(first)], at[titles.index(last)]
        axes.plot([1.25, x, x, 1.25], [low, low, high, high], color="#777777", linewidth=1.1)
        axes.annotate("", (1.3, high), (x, high), arrowprops={"arrowstyle": "-|>", "color": "#777777"})
        axes.text(
            x - 0.06, (high + low) / 2, words, rotation=90, ha="right", va="center", fontsize=8.6, color="#555555"
        )
    figure.savefig(file)


if __name__ == "__main__":
    draw_layers(FOLDER / "layers.png")
    draw_way(FOLDER / "way_of_a_prompt.png")
