"""Checks of a picture's file before anything is drawn."""

import importlib.util
from pathlib import Path

NEEDED = "pictures need matplotlib: pip install 'specjax[plot]'"


def check_plot(path: str) -> None:
    """Raises ValueError if the picture could not be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot: {NEEDED}")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"--plot {path!r}: give a file in a folder that exists")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path!r}: give a name that ends in .png, .svg or .pdf")
