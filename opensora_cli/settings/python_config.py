"""Parser of the reference implementation's settings files, which are Python. They are parsed, and never executed.

A file assigns literals, `dict(...)` calls, arithmetic on these, and names that were assigned before. `_base_` names
files that it changes, and `_delete_=True` in a mapping drops what the base has there.
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

# No %: on text it formats, into as many characters as the text asks for.
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_MOST_VALUES = 1_000_000
_DEEPEST = 20
_LARGEST_INTEGER = 2**64
_LARGEST_POWER = 64


def read_python_config(path: Path, *, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return what a file assigns, over what its bases assign; `chain` are the files that name it as a base.

    Raises FileProblem if a file is missing or unreadable, has a line that is not data, or is its own base.
    """
    with reading(path):
        here = Path(os.path.realpath(path))
    if here in chain:
        raise FileProblem(f"{path} has itself as a base: {' -> '.join(link.name for link in (*chain, here))}")
    try:
        tree = ast.parse(read_text(path, max_bytes=MAX_SETTINGS_BYTES), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileProblem(f"{path} is not Python: {getattr(error, 'msg', None) or 'nested too deeply'}") from None
    values = _Reader(path).read(tree)
    bases = values.pop("_base_", [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FileProblem(f"{path}: _base_ must be the name of a file, or a list of names")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merged(merged, read_python_config(path.parent / name, chain=(*chain, here)))
    return _merged(merged, values)


class _Reader:
    """Evaluates the assignments of one file, which may describe so many values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._left = _MOST_VALUES

    def read(self, tree: ast.Module) -> dict[str, Any]:
        for line in tree.body:
            match line:
                case ast.Expr(value=ast.Constant()):  # a description
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=node):
                    try:
                        self._values[name] = self._counted(self._value(node))
                    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
                        raise FileProblem(f"{self._path}, line {line.lineno}: {error}") from None
                case _:
                    raise self._no_data(line)
        return self._values

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in self._values:
                return self._counted(self._values[name])
            case ast.List(elts=items):
                return [self._value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(item) for item in items)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                pairs = zip(keys, values, strict=True)
                return {self._value(key): self._value(value) for key, value in pairs if key is not None}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words) if all(word.arg for word in words):
                return {word.arg: self._value(word.value) for word in words}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return self._combined(type(sign), self._value(left), self._value(right))
        raise self._no_data(node)

    def _combined(self, sign: type[ast.operator], left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, list | tuple | str) and isinstance(other, int) and len(one) * other > self._left:
                raise ValueError(f"a list of {len(one) * other} items is too long")
            if isinstance(one, int) and abs(one) > _LARGEST_INTEGER:
                raise ValueError("a number is too large")
        if sign is ast.Pow and abs(right) > _LARGEST_POWER:
            raise ValueError(f"{left} ** {right} is too large")
        return self._counted(_OPERATORS[sign](left, right))

    def _counted(self, value: Any, depth: int = 0) -> Any:
        """Return a value, whose parts count as values of the file: names that stand for each other grow fast."""
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0 or depth > _DEEPEST:
            raise ValueError("the values are too many, or nested too deeply")
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            self._counted(part, depth + 1)
        return value

    def _no_data(self, node: ast.stmt | ast.expr) -> FileProblem:
        line = ast.unparse(node).splitlines()[0]
        shown = line if len(line) <= 60 else f"{line[:57]}..."
        return FileProblem(
            f"{self._path}, line {node.lineno}: {shown} is not data",
            hint="such files are parsed, not executed: write the value itself",
        )


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict):
            own = {name: item for name, item in value.items() if name != "_delete_"}
            below = merged.get(key)
            keeps = isinstance(below, dict) and value.get("_delete_") is not True
            merged[key] = _merged(below if keeps and below is not None else {}, own)
        else:
            merged[key] = value
    return merged
