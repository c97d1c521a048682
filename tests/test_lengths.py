"""No function is too long to be read at once."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 80
"""Fewer lines than that, the signature and the docstring among them."""
LONGER = {"specjax/train/loop.py:fit": 94}
"""Those that are longer, and how long they are: no new ones come in, and none of them grows."""


def lengths(source):
    """How many lines every function of a module has, by name; those of Pallas kernels, `_kernel`, are not looked at."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: node.end_lineno - node.lineno + 1 for node in nodes if node.name != "_kernel"}


@pytest.mark.slow
def test_functions_are_short():
    folders = ("specjax", "models", "kernels", "sharding", "experiments", "docs", "tests", ".ci")
    files = [*itertools.chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders)]
    assert len(files) > 600, "it has found them"
    found = {}
    for file in files:
        own = lengths(file.read_text())
        found |= {f"{file.relative_to(ROOT).as_posix()}:{name}": lines for name, lines in own.items() if lines >= MOST}
    longer = {name: lines for name, lines in found.items() if lines > LONGER.get(name, 0)}
    assert longer == {}, "split these"
    assert LONGER.keys() - found.keys() == set(), "these are short now: take them out of LONGER"


def test_the_lines_of_a_function_are_counted():
    """With its signature, inside a class too."""
    own = "class A:\n    def f(self):\n        x = 1\n\n        return x\n"
    others = "def _kernel():\n    return 1\n\nasync def g(\n    x,\n):\n    return x\n"
    assert lengths(own + others) == {"f": 4, "g": 4}
