"""The pictures as text for a terminal. Each function returns a string and takes the arguments of its drawing
namesake."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.viz import data

KEPT, OTHER, FOLLOWS = "\u25cf", "\u25cb", "\u25b6"
HEIGHTS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
FULL = "\u2588"
GIVEN = "\u00b7"


def token_tree(step: Any, row: int = 0, tokenizer: Any = None) -> str:
    """A step's token tree, one line per node.

    Filled dots are the accepted path; the arrow is the target's own token after it."""
    nodes = data.nodes_of(step, row, tokenizer)
    below: dict[int, list[data.Node]] = {node.id: [] for node in nodes}
    for node in nodes[1:]:
        below[node.parent].append(node)
    lines = []
    stack = [(nodes[0], "", "")]
    while stack:
        node, first, rest = stack.pop()
        mark = FOLLOWS if node.follows else KEPT if node.kept else OTHER
        lines.append(f"{first}{mark} {node.word}")
        own = below[node.id]
        for child in reversed(own):
            last = child is own[-1]
            stack.append(
                (child, rest + ("\u2514\u2500" if last else "\u251c\u2500"), rest + ("  " if last else "\u2502 "))
            )
    return "\n".join(lines)


def acceptance(what: Any) -> str:
    """One line per decoder: the shares of steps that accepted at least 1, 2, ... draft tokens, as heights and as
    numbers."""
    found = {name: shares for name, shares in data.acceptances(what).items() if shares}
    shown = {name: "".join(HEIGHTS[min(int(8 * share), 7)] for share in shares) for name, shares in found.items()}
    room = max(map(len, shown.values()), default=0)
    numbers = {name: " ".join(f"{share:.2f}" for share in shares) for name, shares in found.items()}
    return _lines({name: f"{shown[name]:{room}}  {numbers[name]}" for name in found})


def speedup(report: Any, width: int = 40) -> str:
    """One bar per decoder: its speed relative to plain decoding."""
    bars = data.speeds(report)
    most = max(bar.ratio for bar in bars)
    return _lines({bar.name: f"{_bar(bar.ratio / most, width)} {bar.ratio:.2f}" for bar in bars})


def unmask_order(what: Any, words: Sequence[str] | None = None) -> str:
    """One line per decoder: the step that wrote each position, as a height. With words: one decoder's text after every
    step.

    Raises:
      ValueError: on words for several decoders, or a number of words other than the number of positions.
    """
    found = data.orders(what)
    most = max(int(order.max(initial=1)) for order in found.values())
    if words is None:
        height = lambda step: GIVEN if step == 0 else HEIGHTS[8 * (step - 1) // most]
        return _lines({name: "".join(map(height, order.tolist())) for name, order in found.items()})
    data.check_words(found, words)
    (order,) = found.values()
    known = lambda now: "".join(
        word if step <= now else GIVEN * len(word) for word, step in zip(words, order, strict=True)
    )
    return _lines({str(now): known(now) for now in range(1, most + 1)})


def step_times(what: Mapping[str, Any], width: int = 40) -> str:
    """One bar per part, below the name of the whole."""
    found = data.times(what)
    unit, scale = data.unit_of(sum(parts.values()) for parts in found.values())
    most = max((seconds for parts in found.values() for seconds in parts.values()), default=0.0) or 1.0
    blocks = []
    for name, parts in found.items():
        head = f"{name}: {scale * sum(parts.values()):.4g} {unit}"
        shown = {f"  {part}": f"{_bar(seconds / most, width)} {scale * seconds:.4g}" for part, seconds in parts.items()}
        blocks.append(f"{head}\n{_lines(shown)}")
    return "\n".join(blocks)


def cache_layout(decoder: Any, state: Any) -> str:
    """One line per part of a decoder's cache: the devices that hold it, and its rows, heads and slots.

    Raises:
      ValueError: if the state has no cache.
    """
    found = data.layout(decoder, state)
    span = lambda first, end: str(first) if end - first == 1 else f"{first}-{end - 1}"
    table = [("devices", *data.SIDES)]
    table += [(data.devices_of(tile), *(span(*ends) for ends in tile.spans)) for tile in found.tiles]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([data.size_of(found), *lines])


def _lines(shown: Mapping[str, str]) -> str:
    room = max(map(len, shown), default=0)
    return "\n".join(f"{name:{room}}  {text}".rstrip() for name, text in shown.items())


def _bar(share: float, width: int) -> str:
    """A bar over a share of the width, to an eighth of a character."""
    eighths = round(8 * width * share)
    return (FULL * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()
