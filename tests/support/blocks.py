"""The commands and the Python that the pages show, block by block: what each is about, and why one is not run."""

import dataclasses
import functools
import re
from pathlib import Path

from support.methods import FAMILIES, METHODS

from specjax.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
KINDS = {"": "commands", "sh": "commands", "bash": "commands", "python": "python"}
"""What a fence with this word holds; one without a word holds commands."""
OTHERS = ("text", "json", "yaml", "{toctree}")
"""Words of fences that hold something else."""
FENCE = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST, SECOND = "--process-id 0", "--process-id 1"
"""What a command for one of two terminals says."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
      page: its path.
      number: of the page's blocks of commands and Python, from 1.
      kind: `commands` or `python`.
      text: what a reader copies.
      beside: what the page has run in another terminal at the same time.
      not_run: what it needs that a test does not have, as a comment above it says.
    """

    page: str
    number: int
    kind: str
    text: str
    beside: str | None = None
    not_run: str | None = None

    @property
    def name(self) -> str:
        """The test's id."""
        return f"{Path(self.page).stem}-{self.number}"

    @property
    def about(self) -> set[str]:
        """Names of its page, its commands, programs and methods; see `support.turns`."""
        return names_of(self.text) | {Path(self.page).stem.lower()}


def names_of(text: str) -> set[str]:
    """Names of the commands, programs, methods and families in a text.

    >>> sorted(names_of("specjax train eagle3 --data src"))
    ['eagle3', 'options', 'train']
    """
    words = {part.lower() for word in re.findall(r"[\w.-]+", text) for part in word.split(".") if word != "None"}
    own = [name for name in COMMANDS if f"specjax {name} " in f"{text} ".replace("\n", " ")]
    modules = {word for name in own for word in (name, *COMMANDS[name][1].__module__.split("."))}
    programs = {module.split(".")[-1] for module in re.findall(r"python -m ([\w.]+)", text)}
    names = (words & (METHODS | FAMILIES)) | modules | programs
    return {name.replace("-", "_").replace(" ", "_") for name in names} - {"specjax", "jobs"}


def fences(page: str) -> list[tuple[str, str, str]]:
    """Why it is not run, its word, and its text, of every fence of a page."""
    return FENCE.findall((ROOT / page).read_text())


@functools.cache
def blocks() -> tuple[Block, ...]:
    """All blocks of all pages. One that is for a second terminal stands beside the one before it."""
    found: list[Block] = []
    for page in PAGES:
        held = [(why, KINDS[word], text) for why, word, text in fences(page) if word in KINDS]
        for number, (why, kind, text) in enumerate(held, start=1):
            if SECOND in text:
                found[-1] = dataclasses.replace(found[-1], beside=text)
            else:
                found.append(Block(page, number, kind, text, not_run=why or None))
    return tuple(found)


def named(name: str) -> Block:
    """The block with this id."""
    return next(block for block in blocks() if block.name == name)
