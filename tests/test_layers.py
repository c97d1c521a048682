"""Imports run down the layers of docs/design.md only, without circles; and the checker sees every kind of import."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def load(name):
    """A module of the folder docs, which is no package."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


layers = load("layers")
TABLE = layers.layers_of((DOCS / "design.md").read_text())
MODULES = layers.modules_of()


@pytest.mark.slow
def test_imports_run_down_and_form_no_circle():
    arrows = layers.arrows_of({name: path.read_text() for name, path in MODULES.items()}, MODULES)
    assert len(arrows) > 300  # it has read something
    assert layers.faults(arrows, MODULES, TABLE) == []


CIRCLES: list[list[str]] = []
"""Those there still are."""


@pytest.mark.slow
def test_no_modules_import_each_other():
    """Nor for types alone: whoever reads one of a circle must read them all."""
    arrows = layers.arrows_of({name: path.read_text() for name, path in MODULES.items()}, MODULES)
    assert [circle for circle in layers.circles(arrows) if circle not in CIRCLES] == []


def test_a_circle_of_modules_is_seen():
    apart = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specjax.{} import base\n"
    sources = {
        "specjax.draft.base": apart.format("verify"), "specjax.verify.base": "def f():\n    import specjax.expand.base",
        "specjax.expand.base": "from ..draft.base import Drafter", "specjax.tree": "import specjax.verify.base",
    }  # fmt: skip
    found = layers.circles(layers.arrows_of(sources, MODULES))
    assert found == [["specjax.draft.base", "specjax.expand.base", "specjax.verify.base"]]


def planted(**sources):
    """What is wrong with some modules' imports, had they no others; dots in names are written `__`."""
    named = {f"specjax.{name.replace('__', '.')}": text for name, text in sources.items()}
    return layers.faults(layers.arrows_of(named, MODULES), MODULES, TABLE)


UP = {
    "plain": "import specjax.serve.engine",
    "from": "from specjax.serve.engine import Engine",
    "module": "from specjax.serve import engine",
    "in a function": "def f():\n    from specjax.serve import engine\n",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specjax.serve.engine import Engine\n",
    "relative": "from ..serve.engine import Engine",
    "relative module": "from .. import serve",
    "by name": 'import importlib\nimportlib.import_module("specjax.serve.engine")',
    "by name, renamed": 'from importlib import import_module as load\nload("specjax.serve.engine")',
    "by name, relative": 'from importlib import import_module\nimport_module("..serve.engine", __package__)',
    "by a name in parts": 'import importlib\nimportlib.import_module(f"specjax.serve.{name}")',
    "by a name in a table": 'import importlib\nWHERE = {"a": "specjax.serve.engine:Engine"}\nimportlib.import_module(WHERE[a])',
    "by the old way": '__import__("specjax.serve.engine")',
}


@pytest.mark.parametrize("source", UP.values(), ids=UP.keys())
def test_an_arrow_up_is_seen(source):
    (fault,) = planted(draft__model=source)
    assert fault.startswith("specjax.draft.model:") and "imports specjax.serve" in fault and "above" in fault
    assert planted(serve__text=source.replace("..serve", "")) == []  # the same layer


def test_relative_imports_begin_at_the_package():
    """An `__init__` is its own package, a module is in its parent."""
    modules = {"specjax.draft": DOCS / "__init__.py", "specjax.draft.base": DOCS / "base.py"}
    found = lambda name: [
        module for module, _ in layers.imports_of("from . import base\nfrom .base import x", name, modules)
    ]
    assert found("specjax.draft") == found("specjax.draft.base") == ["specjax.draft.base"] * 2


def test_circles_and_what_no_one_knows_are_seen():
    (circle,) = planted(draft__base="import specjax.verify.base", verify__base="from ..draft import base")
    assert "circle" in circle and "specjax.draft <- specjax.verify" in circle + " <- specjax.verify"
    (hidden,) = planted(draft__base="import importlib\nimportlib.import_module(name)")
    assert hidden == "specjax.draft.base:2 imports by a name that is not written there"
    stray = {**MODULES, "specjax.stray": DOCS / "layers.py"}
    assert layers.faults({}, stray, TABLE) == ["specjax.stray belongs to no layer"]
    assert layers.faults({}, MODULES, {**TABLE, "specjax.gone": 1}) == ["specjax.gone is in the table and nowhere else"]


def test_the_longest_part_counts():
    table = {"specjax": 6, "specjax.diffusion": 3, "specjax.diffusion.unmask": 2}
    part = lambda name: layers.part_of(name, table)
    assert part("specjax.diffusion.unmask.base") == "specjax.diffusion.unmask" and part("specjax") == "specjax"
    assert part("specjax.diffusion.unmasked") == "specjax.diffusion" and part("specjax.engine") is None


def test_a_drawing_leaves_out_what_follows_from_other_arrows_and_runs_down():
    drawings = load("drawings")
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"d"}}
    assert drawings.shortest(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"d"}}
    floor = drawings.floors(graph, {"a": 3, "b": 2, "c": 2, "d": 1, "e": 2})
    assert floor == {"d": 0, "c": 1, "e": 1, "b": 2, "a": 3}
    widths = dict.fromkeys(graph, 1.0)
    x, chains = drawings.placed(drawings.shortest(graph), floor, widths)
    assert abs(x["c",] - x["e",]) > 1.0 and len(chains) == 4  # boxes of one floor do not touch


def test_the_way_of_a_prompt_names_what_is_there():
    drawings = load("drawings")
    assert drawings.missing(drawings.WAY) == []
    gone = drawings.Stop("text", "nothing", (("specjax.serve.text", "frobnicate"),))
    assert drawings.missing((gone,)) == ["specjax.serve.text has no frobnicate"]
