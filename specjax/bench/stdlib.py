"""The Python standard library as a corpus: training files, held-out files, and prompts from held-out functions.

The shipped models are trained on the training files; benchmarks read the held-out ones. Both come from the running
interpreter (`sysconfig`), so nothing is downloaded or copied into the repository. Only the standard library is imported
here.
"""

import ast
import pathlib
import sysconfig
from collections.abc import Iterator

# Never trained on. Paths are relative to the standard library's folder. The list is fixed, so that every Python version
# holds out the same modules. They are ordinary modules with many short functions, spread over subjects, about 5% of all
# bytes.
HELDOUT = (
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "colorsys.py",
    "configparser.py",
    "csv.py",
    "fnmatch.py",
    "fractions.py",
    "getopt.py",
    "gettext.py",
    "graphlib.py",
    "heapq.py",
    "html/parser.py",
    "http/cookies.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "tempfile.py",
    "textwrap.py",
    "urllib/robotparser.py",
    "wsgiref/headers.py",
    "zipapp.py",
)

# Folders left out wherever they appear: third-party code, tests, and folders of generated tables.
_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__")
    + ("lib-dynload", "__phello__", "_bundled", "msilib")
)
# Tables that a program wrote, or that nobody writes by hand.
_SKIPPED_FILES = frozenset(
    ("stringprep.py", "html/entities.py", "token.py", "keyword.py", "this.py", "_opcode_metadata.py")
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

_MIN_PROMPT, _MAX_PROMPT = 200, 500  # characters


def root() -> pathlib.Path:
    """The folder of the running interpreter's standard library."""
    return pathlib.Path(sysconfig.get_path("stdlib"))


def _is_code(name: str) -> bool:
    parts = name.split("/")
    return not (
        any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in parts) or name in _SKIPPED_FILES
    )


def names() -> list[str]:
    """Every module's path relative to `root()`, sorted, without third-party code, tests and generated tables."""
    folder = root()
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return sorted(name for name in found if _is_code(name))


def training_files() -> list[pathlib.Path]:
    """The files that the shipped models are trained on."""
    return [root() / name for name in names() if name not in HELDOUT]


def heldout_files() -> list[pathlib.Path]:
    """The files that shipped models never saw, in the order of `HELDOUT`, without modules that this Python lacks."""
    return [root() / name for name in HELDOUT if (root() / name).is_file()]


def read(path: pathlib.Path) -> str:
    """A file's text in UTF-8, with newlines as `\\n`; bytes that are not UTF-8 become U+FFFD."""
    return path.read_text(encoding="utf-8", errors="replace")


def heldout_functions(limit: int) -> list[str]:
    """Benchmark prompts: `function_openings` of the held-out files.

    Raises:
      ValueError: if `limit` is below 1.
    """
    return function_openings(heldout_files(), limit)


def function_openings(files: list[pathlib.Path], limit: int) -> list[str]:
    """The openings of functions.

    A prompt is the class line of a method, the `def` with its docstring, and the first lines of the body, 200 to 500
    characters in all. It ends at the end of a line, before the newline, and at least two lines of the function follow.
    Prompts are taken from the files in turn and spread over each file; they are the same for a given Python version.

    Args:
      files: Python files.
      limit: how many prompts; fewer if the files hold fewer.

    Raises:
      ValueError: if `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; ask for at least one prompt")
    by_file = [prompts for path in files if (prompts := list(_prompts(read(path))))]
    rounds = -(-limit // max(1, len(by_file)))
    queues = [_spread(prompts, rounds) for prompts in by_file]
    taken = [queue[i] for i in range(rounds) for queue in queues if i < len(queue)]
    if len(taken) < limit:  # short files are used up: take the rest of the long ones, in order
        used = set(taken)
        taken += [prompt for prompts in by_file for prompt in prompts if prompt not in used]
    return taken[:limit]


def _spread(items: list[str], count: int) -> list[str]:
    """`count` evenly spaced items, each from the middle of a stretch."""
    if count >= len(items):
        return items
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def _prompts(source: str) -> Iterator[str]:
    lines = source.split("\n")
    for owner, function in _functions(ast.parse(source)):
        body = function.body
        documented = isinstance(body[0], ast.Expr) and isinstance(getattr(body[0].value, "value", None), str)
        head_end = (body[0].end_lineno if documented else body[0].lineno - 1) or function.lineno
        opening = f"class {owner}:\n" if owner else ""
        last = (function.end_lineno or function.lineno) - 2  # two lines must be left to write
        best = None
        for end in range(max(head_end, function.lineno), last + 1):
            prompt = opening + "\n".join(lines[function.lineno - 1 : end])
            if len(prompt) > _MAX_PROMPT:
                break
            if lines[end - 1].strip() and end > head_end:
                best = prompt
                if len(prompt) >= _MIN_PROMPT:
                    break
        if best is not None and len(best) >= _MIN_PROMPT:
            yield best


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, in source order, each with its class's name or ''."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, inner) for inner in node.body if isinstance(inner, ast.FunctionDef))
