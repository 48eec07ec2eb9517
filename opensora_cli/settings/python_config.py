"""Parser of the reference implementation's settings files, which are Python. They are parsed, and never executed.

A file assigns literals, `dict(...)` calls, arithmetic on numbers, and names of short values that were assigned before.
`_base_` names files that it changes, and `_delete_=True` in a mapping drops what the base has there.
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

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_MAX_INTEGER = 2**64
_MAX_POWER = 64
_MAX_LENGTH = 100
"""Longest list that is used by name or repeated, so that a short file cannot describe a large value."""


def read_python_config(path: Path, *, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the assignments of a file, merged over those of its bases. `chain` has the files that name it as a base.

    Raises:
        FileProblem: A file is missing or unreadable, has a line that is not data, or is its own base.
    """
    with reading(path):
        here = Path(os.path.realpath(path))
    if here in chain:
        raise FileProblem(f"{path} has itself as a base: {' -> '.join(link.name for link in (*chain, here))}")
    values: dict[str, Any] = {}
    try:
        tree = ast.parse(read_text(path, max_bytes=MAX_SETTINGS_BYTES), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileProblem(f"{path} is not Python: {getattr(error, 'msg', None) or 'nested too deeply'}") from None
    for line in tree.body:
        match line:
            case ast.Expr(value=ast.Constant()):  # a description
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=node):
                try:
                    values[name] = _value(node, values)
                    continue
                except (ArithmeticError, TypeError, ValueError) as error:
                    problem = str(error)
            case _:
                problem = "it is not data"
        shown = ast.unparse(line).splitlines()[0]
        raise FileProblem(
            f"{path}, line {line.lineno}: {shown if len(shown) <= 60 else f'{shown[:57]}...'}: {problem}",
            hint="such files are parsed, not executed: write the value itself",
        )
    bases = values.pop("_base_", [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FileProblem(f"{path}: _base_ must be the name of a file, or a list of names")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merged(merged, read_python_config(path.parent / name, chain=(*chain, here)))
    return _merged(merged, values)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression. Raises ValueError, TypeError or ArithmeticError if it is not data."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in names:
            return _short(names[name])
        case ast.List(elts=items):
            return [_value(item, names) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, names) for item in items)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {_value(key, names): _value(value, names) for key, value in pairs if key is not None}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words) if all(word.arg for word in words):
            return {word.arg: _value(word.value, names) for word in words}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _combined(type(sign), _value(left, names), _value(right, names))
    raise ValueError("it is not data")


def _combined(sign: type[ast.operator], left: Any, right: Any) -> Any:
    if isinstance(left, str) or isinstance(right, str):
        raise TypeError("text is not a number")
    if isinstance(left, list | tuple) and sign is ast.Mult and not 0 <= right <= _MAX_LENGTH:
        raise ValueError(f"a list is repeated {right} times")
    if sign is ast.Pow and abs(right) > _MAX_POWER:
        raise ValueError("a number is too large")
    value = _OPERATORS[sign](_short(left), _short(right))
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise ValueError("a number is too large")
    return value


def _short(value: Any) -> Any:
    """Return a scalar, or a short list or mapping of scalars. Raises ValueError for all other values."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if len(parts) > _MAX_LENGTH or any(isinstance(part, list | tuple | dict) for part in parts):
        raise ValueError("only numbers, text and short lists of these can be used by name")
    return value


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict):
            below = {} if value.get("_delete_") is True else merged.get(key)
            own = {name: item for name, item in value.items() if name != "_delete_"}
            value = _merged(below if isinstance(below, dict) else {}, own)
        merged[key] = value
    return merged
