"""Settings files of the reference implementation, which are Python: read as data, and never executed.

They assign literals, `dict(...)` calls, sums and products of these, and names that were assigned before; `_base_` names
files that they change, and `_delete_=True` in a mapping drops what the base has there.
"""

import ast
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.reading import read_text, reading
from opensora_cli.settings.files import MAX_SETTINGS_BYTES

_BASE = "_base_"
_DELETE = "_delete_"
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MOST_ITEMS = 100_000
_LARGEST_FACTOR = 2**64
_LARGEST_POWER = 64


def read_python_config(path: Path) -> dict[str, Any]:
    """Return what a file assigns, over what its bases assign.
    Raises FileProblem if a file is missing or unreadable, has a line that is no data, or is its own base.
    """
    return _read(path, chain=())


def _read(path: Path, *, chain: tuple[Path, ...]) -> dict[str, Any]:
    with reading(path):
        here = Path(os.path.realpath(path))
    if here in chain:
        raise FileProblem(f"{path} has itself as a base: {' -> '.join(link.name for link in (*chain, here))}")
    text = read_text(path, max_bytes=MAX_SETTINGS_BYTES)
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileProblem(f"{path} is not Python: {getattr(error, 'msg', None) or 'nested too deeply'}") from None
    values = _Reader(path).read(tree)
    bases = values.pop(_BASE, [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FileProblem(f"{path}: {_BASE} must be the name of a file, or a list of names")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merged(merged, _read(path.parent / name, chain=(*chain, here)))
    return _merged(merged, values)


class _Reader:
    """Works out the assignments of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def read(self, tree: ast.Module) -> dict[str, Any]:
        for line in tree.body:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                continue  # a description
            target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
            if not isinstance(line, ast.Assign) or not isinstance(target, ast.Name):
                raise self._no_data(line)
            try:
                self._values[target.id] = self._value(line.value)
            except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
                raise FileProblem(f"{self._path}, line {line.lineno}: {error}") from None
        return self._values

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in self._values:
                return self._values[name]
            case ast.List(elts=items):
                return [self._value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(item) for item in items)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                pairs = zip(keys, values, strict=True)
                return {self._value(key): self._value(value) for key, value in pairs if key is not None}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                named = {word.arg: self._value(word.value) for word in keywords if word.arg is not None}
                if len(named) == len(keywords):
                    return named
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return _power(self._value(left), self._value(right))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return _combined(_OPERATORS[type(sign)], self._value(left), self._value(right))
            case _:
                pass
        raise self._no_data(node)

    def _no_data(self, node: ast.stmt | ast.expr) -> FileProblem:
        return FileProblem(
            f"{self._path}, line {node.lineno}: {_first_words(ast.unparse(node))} is no data",
            hint="such files are read, not executed: write the value itself",
        )


def _combined(combine: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, list | tuple | str) and isinstance(other, int) and len(one) * other > _MOST_ITEMS:
            raise ValueError(f"a list of {len(one) * other} items is too long")
    if isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) > _LARGEST_FACTOR:
        raise ValueError("a number is too large")
    return combine(left, right)


def _power(base: Any, exponent: Any) -> Any:
    for value in (base, exponent):
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError("** needs numbers")
    if abs(base) > _LARGEST_FACTOR or abs(exponent) > _LARGEST_POWER:
        raise ValueError(f"{base} ** {exponent} is too large")
    return base**exponent


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(value, dict):
            replaces = value.get(_DELETE) is True or not isinstance(below, dict)
            own = {name: item for name, item in value.items() if name != _DELETE}
            merged[key] = _merged({} if replaces or below is None else below, own)
        else:
            merged[key] = value
    return merged


def _first_words(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= 60 else f"{line[:57]}..."
