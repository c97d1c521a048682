"""Latin squares, of which there are many, and sudokus of four by four, which have one solution."""

import functools
import itertools
import re
import string

import numpy as np

from specjax.bench.parallel.base import Question, Task

SYMBOLS = string.ascii_uppercase + string.digits
ORDER, GIVENS = 4, 12
Grid = tuple[tuple[int, ...], ...]


class LatinSquare(Task):
    """Any square in which rows and columns hold each of n symbols once; n is 4 where the line names none."""

    name = "latin_square"
    sizes = range(3, 10)
    usual = (4,)
    shows = True

    def draw(self, rng, size):
        symbols = [SYMBOLS[i] for i in rng.choice(len(SYMBOLS), size, replace=False)]
        rows, columns = rng.permutation(size), rng.permutation(size)
        answer = "\n".join(",".join(symbols[(row + column) % size] for column in columns) for row in rows)
        text = (
            f"Make a square of {size} rows and {size} columns out of the symbols {' '.join(symbols)}, so that every row "
            "and every column holds each of them once. Write one row per line, a comma between symbols, and nothing else."
        )
        return Question(self.name, text, answer, tuple(symbols))

    def factors(self, question, text, tools):
        return {"right": float(self._right(question, text))}

    def strict(self, question, text):
        return self._right(question, text)  # ParallelBench reads both forms alike

    def _right(self, question: Question, text: str) -> bool:
        """As ParallelBench reads it: lines with other cells are skipped, and rows are cut to the shortest."""
        symbols = set(question.given)
        lines = (tuple(cell.strip() for cell in line.split(",")) for line in text.split("\n"))
        rows = [cells for cells in lines if set(cells) == symbols][: len(symbols)]
        columns = zip(*rows, strict=False)
        return len(rows) == len(symbols) and all(set(column) == symbols for column in columns)


class Sudoku(Task):
    """A grid of four by four with twelve givens and one solution."""

    name = "sudoku"
    shows = True

    def draw(self, rng, size):
        grids = every_grid()
        while True:
            solution = grids[rng.integers(len(grids))]
            given = np.full((ORDER, ORDER), False)
            given.flat[rng.choice(ORDER * ORDER, GIVENS, replace=False)] = True
            asked = np.where(given, solution, 0)
            if sum(((np.array(grids) == asked) | ~given).all(axis=(1, 2))) == 1:
                break
        text = (
            "In this grid a 0 stands for a missing digit. Every row, every column and every quarter of two by two shall hold "
            f"1, 2, 3 and 4 once. Write the four lines of the whole grid and nothing else.\n{written(asked)}"
        )
        return Question(self.name, text, written(solution), solution)

    def factors(self, question, text, tools):
        return {"right": float(read_grid(text) == question.given)}

    def strict(self, question, text):
        return read_grid(text, strict=True) == question.given


@functools.cache
def every_grid() -> tuple[Grid, ...]:
    """The 288 solved grids."""
    orders = list(itertools.permutations(range(1, ORDER + 1)))
    fits = lambda rows, row: all(len({*column}) == len(rows) + 1 for column in zip(*rows, row, strict=True))
    grids: list[Grid] = [()]
    for _ in range(ORDER):
        grids = [(*rows, row) for rows in grids for row in orders if fits(rows, row)]
    return tuple(rows for rows in grids if all(len({*quarter}) == ORDER for quarter in _quarters(rows)))


def _quarters(rows: Grid) -> list[list[int]]:
    corners = itertools.product(range(0, ORDER, 2), repeat=2)
    return [[*rows[i][j : j + 2], *rows[i + 1][j : j + 2]] for i, j in corners]


def written(grid: Grid | np.ndarray) -> str:
    """A grid as four lines of digits.

    >>> written(((1, 2), (0, 4)))
    '12\\n04'
    """
    return "\n".join("".join(str(digit) for digit in row) for row in grid)


def read_grid(text: str, strict: bool = False) -> Grid | None:
    """The grid in an answer, as ParallelBench reads it; None if there is none.

    Args:
      text: the model's text.
      strict: whether the text must be the four lines of four digits. Otherwise the digits of every line count, and
        lines with more or fewer than four are left out.

    >>> read_grid("grid 4:\\n1 3 4 2\\n2,4,3,1\\n4123\\n3214")
    ((1, 3, 4, 2), (2, 4, 3, 1), (4, 1, 2, 3), (3, 2, 1, 4))
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if strict:
        right = len(lines) == ORDER and all(len(line) == ORDER and line.isdecimal() for line in lines)
        return tuple(tuple(int(digit) for digit in line) for line in lines) if right else None
    found = (tuple(int(digit) for digit in re.findall(r"\d", line)) for line in lines)
    rows = tuple(row for row in found if len(row) == ORDER)
    return rows if len(rows) == ORDER else None
