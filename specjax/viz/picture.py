"""The canvas of pictures: a matplotlib figure that belongs to no window and that notebooks show as it is."""

import io
from typing import Any

from specjax.viz.files import NEEDED

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(NEEDED) from error


class Picture(Figure):
    """A figure that pyplot does not manage, so that a notebook shows it only once, as a cell's value."""

    def __init__(self, width: float, height: float):
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def axes_on(axes: Any, width: float, height: float) -> tuple[Any, Any]:
    """The given axes and their figure, or those of a new picture of this size in inches."""
    axes = Picture(width, height).subplots() if axes is None else axes
    return axes.figure, axes
