"""Evaluates one-line functions by walking their syntax tree: nothing is compiled or executed, and all work is bounded.

Few constructs are allowed: whole numbers, strings, lists, arithmetic without powers and true division, comparisons,
comprehensions over an argument, slices and a few calls. Attributes, default arguments, other statements, lambdas,
assignments and f-strings are refused.
"""

import ast
import operator
import warnings
from collections.abc import Callable
from typing import Any

LONGEST = 400
"""The most characters of a function."""
DEEPEST = 30
"""The most nested nodes."""
BUDGET = 20_000
"""The most nodes visited in one call."""
LARGEST = 10**12
MOST = 2_000
"""The most items of a list, and characters of a string."""

BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
CALLS: dict[str, Callable[..., Any]] = {
    "abs": abs, "len": len, "list": list, "max": max, "min": min, "sorted": sorted, "sum": sum,
}  # fmt: skip
TAKE_GENERATORS = ("list", "max", "min", "sorted", "sum")


class Refused(ValueError):
    """The code uses something that is not allowed, or takes too much work."""


class Function:
    """A function read from text.

    Args:
      source: `def name(a, b): return expression`.

    Raises:
      Refused: on anything else.
    """

    def __init__(self, source: str):
        if len(source) > LONGEST or not source.isascii():
            raise Refused(f"a function has at most {LONGEST} ASCII characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                module = ast.parse(source.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError, Warning) as error:
            raise Refused(f"no Python: {error}") from error
        if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
            raise Refused("write one function")
        made = module.body[0]
        given = made.args
        plain = not (
            given.defaults or given.kw_defaults or given.kwonlyargs or given.posonlyargs or given.vararg or given.kwarg
        )
        bare = not (made.decorator_list or made.returns or any(arg.annotation for arg in given.args))
        if not plain or not bare or getattr(made, "type_params", None):
            raise Refused("a function has plain arguments and nothing else")
        if len(made.body) != 1 or not isinstance(made.body[0], ast.Return) or made.body[0].value is None:
            raise Refused("a function is one return")
        self.arguments = tuple(arg.arg for arg in given.args)
        if any(name in CALLS or "__" in name for name in self.arguments):
            raise Refused("an argument has the name of something else")
        self.body: ast.expr = made.body[0].value
        if isinstance(self.body, ast.GeneratorExp):
            raise Refused("a generator stands in a call")
        _check(self.body, 0, {*self.arguments})

    def __call__(self, *values: Any) -> Any:
        """The function's value.

        Raises:
          Refused: if it takes too much work, or Python would raise an error.
        """
        if len(values) != len(self.arguments):
            raise Refused(f"takes {len(self.arguments)} arguments")
        try:
            return _Walk().value(self.body, dict(zip(self.arguments, values, strict=True)))
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise Refused(str(error)) from error


def _check(node: ast.AST, depth: int, names: set[str]) -> None:
    """Refuses constructs that are not allowed, before anything is evaluated."""
    if depth > DEEPEST:
        raise Refused("too deep")
    inner = names
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        inner = _check_loop(node, names)
    elif isinstance(node, ast.Call):
        _check_call(node)
    elif isinstance(node, ast.Constant):
        whole = isinstance(node.value, int) and abs(node.value) < 10_000
        if not whole and not (isinstance(node.value, str) and len(node.value) < 40 and node.kind is None):
            raise Refused("constants are short strings and small whole numbers")
    elif isinstance(node, ast.Name):
        if node.id not in names or not isinstance(node.ctx, ast.Load):
            raise Refused(f"unknown name {node.id!r}")
    elif not isinstance(node, PLAIN):
        raise Refused(f"{type(node).__name__} is not allowed")
    for child in _children(node):
        if isinstance(child, ast.GeneratorExp) and not isinstance(node, ast.Call):
            raise Refused("a generator stands in a call")
        _check(child, depth + 1, inner)


PLAIN = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.List, ast.And, ast.Or,
    ast.Not, ast.USub, ast.Load, *BINARY, *COMPARE,
)  # fmt: skip


def _children(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call):
        return list(node.args)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return [node.elt, *node.generators[0].ifs]
    return list(ast.iter_child_nodes(node))


def _check_loop(node: ast.ListComp | ast.GeneratorExp, names: set[str]) -> set[str]:
    loop = node.generators[0]
    if len(node.generators) != 1 or loop.is_async or not isinstance(loop.target, ast.Name):
        raise Refused("a comprehension goes over one iterable with one variable")
    if not isinstance(loop.iter, ast.Name):
        raise Refused("a comprehension goes over an argument")
    if loop.target.id in CALLS or loop.target.id in names or "__" in loop.target.id:
        raise Refused("a comprehension's variable has a name of its own")
    _check(loop.iter, 0, names)
    return names | {loop.target.id}


def _check_call(node: ast.Call) -> None:
    if not isinstance(node.func, ast.Name) or node.func.id not in CALLS:
        raise Refused("only " + ", ".join(CALLS) + " are called")
    for keyword in node.keywords:
        constant = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
        if node.func.id != "sorted" or keyword.arg != "reverse" or not constant or len(node.keywords) > 1:
            raise Refused("the only keyword is sorted's reverse")
    if any(isinstance(arg, ast.GeneratorExp) for arg in node.args):
        if node.func.id not in TAKE_GENERATORS or len(node.args) > 1:
            raise Refused(f"{node.func.id} takes no generator")


class _Walk:
    """One call, which counts the nodes that it visits."""

    def __init__(self):
        self.left = BUDGET

    def value(self, node: Any, names: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Refused("too much work")
        return _bounded(getattr(self, f"_{type(node).__name__.lower()}")(node, names))

    def _constant(self, node, names):
        return node.value

    def _name(self, node, names):
        return names[node.id]

    def _list(self, node, names):
        return [self.value(item, names) for item in node.elts]

    def _binop(self, node, names):
        a, b = self.value(node.left, names), self.value(node.right, names)
        numbers = isinstance(a, int) and isinstance(b, int)
        if not numbers and not (isinstance(node.op, ast.Add) and type(a) is type(b)):
            raise Refused("no arithmetic between these")
        return BINARY[type(node.op)](a, b)

    def _unaryop(self, node, names):
        inner = self.value(node.operand, names)
        return not inner if isinstance(node.op, ast.Not) else -inner

    def _boolop(self, node, names):
        inner = None
        for part in node.values:
            inner = self.value(part, names)
            if bool(inner) is isinstance(node.op, ast.Or):
                break
        return inner

    def _compare(self, node, names):
        a = self.value(node.left, names)
        for op, part in zip(node.ops, node.comparators, strict=True):
            b = self.value(part, names)
            if not COMPARE[type(op)](a, b):
                return False
            a = b
        return True

    def _ifexp(self, node, names):
        return self.value(node.body if self.value(node.test, names) else node.orelse, names)

    def _subscript(self, node, names):
        inner = self.value(node.value, names)
        if isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            return inner[slice(*(None if end is None else self.value(end, names) for end in ends))]
        return inner[self.value(node.slice, names)]

    def _listcomp(self, node, names):
        loop, found = node.generators[0], []
        for item in self.value(loop.iter, names):
            inside = {**names, loop.target.id: item}
            if all(self.value(test, inside) for test in loop.ifs):
                found.append(self.value(node.elt, inside))
        return found

    _generatorexp = _listcomp

    def _call(self, node, names):
        values = [self.value(arg, names) for arg in node.args]
        keywords = {word.arg: word.value.value for word in node.keywords}
        self.left -= sum(len(value) for value in values if isinstance(value, (list, str)))
        return CALLS[node.func.id](*values, **keywords)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > LARGEST or isinstance(value, (list, str)) and len(value) > MOST:
        raise Refused("too large")
    return value
