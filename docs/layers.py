"""Who imports whom: every import of every module, and whether it keeps to the layers that the table in design.md names.

A part is what the table has a line for, a module or a package; a module belongs to the longest part that its name begins with.
Imports count wherever they stand: at a file's top, in a function, for type checkers alone, relative, or by name
(`import_module("...")`, and where the name comes from elsewhere in the file, every text there that is one).
"""

import ast
import graphlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "specjax"


class Import(NamedTuple):
    """A module that another one imports, and where; `module` is None where the name is not written down."""

    module: str | None
    line: int


def modules_of(folder: Path = ROOT / PACKAGE) -> dict[str, Path]:
    """Every module of the package by name; folders that are links are followed."""
    found = {}
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in sorted(files):
            if file.endswith(".py"):
                parts = (folder.name, *Path(place, file).relative_to(folder).with_suffix("").parts)
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Path(place, file)
    return found


def imports_of(source: str, name: str, modules: Mapping[str, Path]) -> Iterator[Import]:
    """The package's own modules that a module imports, line by line.

    Args:
      source: its text.
      name: of the module.
      modules: every module of the package.
    """
    package = name if name in modules and modules[name].name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(source)
    calls = {"import_module", "__import__"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "importlib"
        for alias in node.names
        if alias.name == "import_module" and alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names: list[str | None] = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in calls and node.args:
            written = _written(node.args[0])
            names = _names_in(tree) if written is None else [_absolute(written, package)]
        else:
            continue
        for found in names:
            if found is None:
                yield Import(None, node.lineno)
            elif found.split(".")[0] == PACKAGE:
                yield Import(_known(found, modules), node.lineno)


def _absolute(name: str, package: str) -> str:
    """A name that may begin with dots, seen from a package."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    above = package.split(".")[: len(package.split(".")) - dots + 1]
    return ".".join([*above, *filter(None, [name[dots:]])])


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _written(argument: ast.expr) -> str | None:
    """A name given as text; of text with parts that are filled in, the packages before the first of them."""
    if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
        return str(argument.values[0].value).rpartition(".")[0] or None
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def _names_in(tree: ast.Module) -> list[str | None]:
    """What a module may mean by a name that it keeps elsewhere: its texts such as "specjax.draft:Medusa"."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text.partition(":")[0] for text in texts if re.fullmatch(PACKAGE + r"(\.\w+)+(:\w+)?", text)] or [None]


def _known(name: str, modules: Mapping[str, Path]) -> str:
    """The module that a dotted name leads to: what comes after it is found inside."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def layers_of(text: str) -> dict[str, int]:
    """From part to layer, 1 the lowest, as the table in design.md has them: `| 1 contracts | `lm` | what it is |`.

    A line that says no layer belongs to the one above it.
    """
    found: dict[str, int] = {}
    layer = 0
    for line in text.splitlines():
        cells = re.match(r"\| *(?:(\d) \w+)? *\| *((?:`[\w.]+`(?:, )?)+) *\|", line)
        if cells:
            layer = int(cells[1] or layer)
            found.update((f"{PACKAGE}.{part}", layer) for part in re.findall(r"`([\w.]+)`", cells[2]))
    own = found.pop(f"{PACKAGE}.{PACKAGE}", None)
    return found if own is None else {**found, PACKAGE: own}


def layer_names(text: str) -> dict[int, str]:
    """What the table calls the layers."""
    return {int(number): name for number, name in re.findall(r"^\| (\d) (\w+) \|", text, re.MULTILINE)}


def part_of(module: str, layers: Mapping[str, int]) -> str | None:
    """The part that a module belongs to; the package itself is its own `__init__` alone."""
    if module == PACKAGE:
        return PACKAGE if PACKAGE in layers else None
    fits = [part for part in layers if part != PACKAGE and f"{module}.".startswith(f"{part}.")]
    return max(fits, key=len, default=None)


def arrows_of(sources: Mapping[str, str], modules: Mapping[str, Path]) -> dict[tuple[str, str], int]:
    """(importing module, imported one) and the first line that says so; "?" where a name is not written down."""
    arrows: dict[tuple[str, str], int] = {}
    for name, source in sources.items():
        for module, line in imports_of(source, name, modules):
            arrows.setdefault((name, module or "?"), line)
    return arrows


def parts_graph(arrows: Mapping[tuple[str, str], int], layers: Mapping[str, int]) -> dict[str, set[str]]:
    """What every part imports of the others."""
    graph: dict[str, set[str]] = {part: set() for part in layers}
    for source, target in arrows:
        above, below = part_of(source, layers), part_of(target, layers)
        if above and below and above != below:
            graph[above].add(below)
    return graph


_METHOD = re.compile(PACKAGE + r"\.(?:draft|diffusion\.unmask)\.\w+(?=\.|$)")
"""The folder, or file, of a method that may be trained."""


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Modules that import each other, at whatever distance and for whatever reason: a list for each circle.

    A trained method's folder counts as one: its door asks for its training and its file formats when they are needed, and they
    are about its class.
    """
    graph: dict[str, set[str]] = {}
    for source, target in arrows:
        room = _METHOD.match(source)
        if room and f"{target}.".startswith(f"{room[0]}."):
            continue
        graph.setdefault(source, set()).update({target} - {source})
    reach = {name: _reached(name, graph) for name in graph}
    found = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return [list(circle) for circle in sorted(found) if circle]


def _reached(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Every module that one imports, and what those import."""
    seen: set[str] = set()
    ahead = [*graph[name]]
    while ahead:
        if (module := ahead.pop()) not in seen:
            seen.add(module)
            ahead += graph.get(module, ())
    return seen


def faults(arrows: Mapping[tuple[str, str], int], modules: Mapping[str, Path], layers: Mapping[str, int]) -> list[str]:
    """What breaks the layers, a line each: modules and parts that miss each other, arrows up, and circles."""
    wrong = [f"{name} belongs to no layer" for name in modules if part_of(name, layers) is None]
    wrong += [f"{part} is in the table and nowhere else" for part in layers if part not in modules]
    for (source, target), line in arrows.items():
        above, below = part_of(source, layers), part_of(target, layers)
        if target == "?":
            wrong.append(f"{source}:{line} imports by a name that is not written there")
        elif above and below and layers[above] < layers[below]:
            wrong.append(f"{source}:{line} imports {target}, which lies in a layer above it")
    try:
        graphlib.TopologicalSorter(parts_graph(arrows, layers)).prepare()
    except graphlib.CycleError as error:
        wrong.append("a circle of imports: " + " <- ".join(error.args[1]))
    return wrong
