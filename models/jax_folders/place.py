"""Where another library's Orbax checkpoint is in a folder."""

from pathlib import Path

ITEMS = ("", "items", "default")
"""A step's folder has the checkpoint in one of these."""
FILES = ("_METADATA", "manifest.ocdbt")
"""A checkpoint has one of these files at least."""


def located(folder: Path) -> Path | None:
    """The checkpoint of a folder, which may be inside in `items` or `default`; None if it has none, or weights too."""
    if any(folder.glob("*.safetensors*")) or (folder / "params").is_dir():
        return None
    homes = (folder / one for one in ITEMS)
    return next((home for home in homes if any((home / file).is_file() for file in FILES)), None)
