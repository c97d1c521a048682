"""What of a picture lies on what."""

import itertools
from typing import Any

ROOM = 1.0
"""Pixels that may be shared."""


def covered(figure: Any) -> list[str]:
    """Legends that lie on axes, labels of ticks that lie on each other, and texts that leave the picture."""
    figure.canvas.draw()
    found, whole = [], figure.bbox
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    for legend, axes in itertools.product(legends, figure.axes):
        if _share(legend.get_window_extent(), axes.get_window_extent()):
            found.append(f"a legend lies on {axes.get_title() or axes.get_xlabel()!r}")
    for axes in figure.axes:
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            shown = [(text.get_text(), text.get_window_extent()) for text in labels if text.get_text()]
            found += [f"{a!r} lies on {b!r}" for (a, x), (b, y) in itertools.pairwise(shown) if _share(x, y)]
        for text in (*axes.texts, *axes.get_yticklabels()):
            box = text.get_window_extent()
            if text.get_text() and (box.x0 < whole.x0 - ROOM or box.x1 > whole.x1 + ROOM):
                found.append(f"{text.get_text()!r} leaves the picture")
    return found


def _share(a: Any, b: Any) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > ROOM and min(a.y1, b.y1) - max(a.y0, b.y0) > ROOM
