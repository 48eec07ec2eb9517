"""Files of settings: the packaged presets, and strict readers of YAML and of the reference's `.py` files.

YAML 1.1 reads `16:9` as 969, `1e-4` as text and `no` as false, and it drops duplicate keys silently. This reader keeps
every scalar as text for the settings to convert, and refuses duplicate keys, and aliases, which could mean billions of
values. A `.py` file is parsed and never executed.
"""

import ast
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import opensora_cli
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import nearest
from opensora_cli.core.reading import read_text, reading

EXTENDS = "extends"
_MAX_BYTES = 500_000
"""Largest file of settings, which takes a second to read."""
CODE = ...
"""Value of an assignment in a `.py` file that is code and not data."""
PLAIN_VALUES = "such files are parsed, not executed: write the value itself"
"""Hint for code in a `.py` file."""


def presets_folder() -> Path:
    """Return the folder of all presets, in an installed package or a source checkout."""
    package = Path(opensora_cli.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def list_presets(kind: str) -> list[str]:
    """Return the names of the presets of a `kind`: a command such as `generate`, or `hardware`."""
    return sorted(path.stem for path in (presets_folder() / kind).glob("*.yaml"))


def describe_preset(kind: str, name: str) -> str:
    """Return the description of a preset: the first comment of its file, without command lines."""
    lines = preset_path(name, kind).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    words = [line.removeprefix("#").strip() for line in comment]
    return " ".join(word for word in words if not word.startswith("osora "))


def settings_path(name: Path, *kinds: str) -> Path:
    """Return the file `name`, or the preset of that name."""
    return name if name.suffix or name.is_file() else preset_path(str(name), *kinds)


def preset_path(name: str, *kinds: str) -> Path:
    """Return the file of the preset `name` in the first of `kinds` that has it."""
    names = {preset: kind for kind in reversed(kinds) for preset in list_presets(kind)}
    if name not in names:
        close = nearest(name, names)
        hint = f"did you mean {close}?" if close else None
        raise RequestError(f"preset {name!r} is not one of {', '.join(sorted(names))}", hint=hint)
    return presets_folder() / names[name] / f"{name}.yaml"


class _TextLoader(yaml.BaseLoader):
    """Loader that keeps scalars as text, and refuses duplicate keys and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "an alias (*name) stands for a value: write the value", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key, _ in node.value:
            is_word = isinstance(key, yaml.ScalarNode)
            if not is_word or key.value in seen:
                problem = f"{key.value!r} is there twice: keep one" if is_word else "a key must be a word"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep=deep))


def parse_yaml_text(text: str) -> object:
    """Return the value of a piece of YAML with scalars as text.

    Raises yaml.YAMLError if the text is not YAML, or is nested too deeply.
    """
    # The loader is a subclass of the one that builds only text, lists and mappings.
    try:
        return yaml.load(text, Loader=_TextLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def read_settings_file(path: Path, *, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a YAML or `.py` file, merged over those of the files that it extends. Lists are replaced.

    `chain` has the files that extend this one.
    """
    with reading(path):
        here = Path(os.path.realpath(path))
    if here in chain:
        loop = " -> ".join(link.name for link in (*chain[chain.index(here) :], here))
        raise FileProblem(f"{path} extends itself: {loop}", hint="take one of these names out")
    text = read_text(path, max_bytes=_MAX_BYTES, hint="settings are a text file: check its name")
    values, bases = (_read_python if path.suffix == ".py" else _read_yaml)(path, text)
    below: dict[str, Any] = {}
    for base in bases:
        below = _merged(below, read_settings_file(base, chain=(*chain, here)))
    return _merged(below, values)


def _read_yaml(path: Path, text: str) -> tuple[dict[str, Any], list[Path]]:
    """Return the mapping in a YAML file, and the file that it `extends`: beside it, or a packaged `train/NAME`."""
    try:
        values = parse_yaml_text(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise FileProblem(f"{path}{f', line {mark.line + 1},' if mark else ''} is not valid YAML: {problem}") from None
    values = {} if values in (None, "") else values
    if not isinstance(values, dict):
        raise FileProblem(f"{path} must hold `key: value` lines")
    if EXTENDS not in values:
        return values, []
    parent = values.pop(EXTENDS)
    if not isinstance(parent, str) or not parent.strip():
        raise FileProblem(f"{path}: `{EXTENDS}:` must name one file")
    extended, name = path.parent / parent, Path(parent)
    if str(name.parent) == "train" and not name.suffix and not extended.exists():
        extended = preset_path(name.name, "train")
    return values, [extended]


def _read_python(path: Path, text: str) -> tuple[dict[str, Any], list[Path]]:
    """Return the assignments of a file and its bases: literals, `dict(...)` calls and names of numbers or text."""
    values: dict[str, Any] = {}
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileProblem(f"{path} is not Python: {getattr(error, 'msg', None) or 'nested too deeply'}") from None
    for line in tree.body:
        match line:
            case ast.Expr(value=ast.Constant()):
                pass  # A description.
            case ast.Assign(targets=[ast.Name(id=name)], value=node):
                values[name] = _data(node, values)
            case _:
                raise FileProblem(f"{path}, line {line.lineno}: it is not NAME = VALUE", hint=PLAIN_VALUES)
    bases = values.pop("_base_", [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FileProblem(f"{path}: _base_ must be the name of a file, or a list of names")
    return values, [path.parent / name for name in names]


def _data(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression, with `CODE` in place of code."""
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words) if all(word.arg for word in words):
            return {word.arg: _data(word.value, names) for word in words}
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {ast.literal_eval(key): _data(value, names) for key, value in zip(keys, values, strict=True) if key}
        case ast.Name(id=name):
            # Only short values, so that a short file cannot describe a large one.
            value = names.get(name, CODE)
            return value if isinstance(value, str | int | float | None) else CODE
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return CODE


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `above` over `below`, section by section. `_delete_=True` in a `.py` file drops a section below."""
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict):
            under = result.get(key)
            if value.get("_delete_") is True:
                under, value = {}, {name: each for name, each in value.items() if name != "_delete_"}
            value = _merged(under if isinstance(under, dict) else {}, value)
        result[key] = value
    return result


class ConfigFile(NamedTuple):
    """Contents of a file of settings, which is read once."""

    path: Path
    values: Mapping[str, Any]
    """Sections of a YAML file with those that it extends, or assignments of a `.py` file with those of its bases."""

    @property
    def is_for_training(self) -> bool:
        """Whether the file is for training, and not for generation."""
        return "sampling_option" not in self.values if self.path.suffix == ".py" else "target" in self.values


def open_config(name: Path | ConfigFile, *kinds: str) -> ConfigFile:
    """Return a file of settings, or the preset of that name of the first of `kinds` that has it."""
    if isinstance(name, ConfigFile):
        return name
    path = settings_path(name, *kinds)
    return ConfigFile(path, read_settings_file(path))
