"""Files of settings: where the presets are, and YAML read the strict way.

YAML 1.1 reads `16:9` as 969, `1e-4` as text and `no` as false, and drops duplicate keys in silence. Here every scalar
stays text, for the settings to type, and a duplicate key is an error.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import yaml

import opensora_cli
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.reading import read_text, reading
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import nearest

EXTENDS = "extends"
_PRESETS = {
    ModelName.DEMO: ("demo",),
    ModelName.OPEN_SORA_V2: ("256px", "768px"),
    ModelName.OPEN_SORA_V2_DC_AE: ("high_compression",),
    ModelName.FLUX1_DEV: ("flux1_dev",),
}
"""The presets that each model's settings start from: one of each resolution, or one for all."""
_EXTENDED = ("train", "hardware")
"""Presets that a file of one's own may extend by name."""
MAX_SETTINGS_BYTES = 500_000
"""Of a file of settings: those written by hand have a few kB, and some 500 kB are read in a second."""
_MOST_VALUES = 100_000
"""In a piece of YAML, after its aliases are followed."""


def presets_folder() -> Path:
    """Return the folder of all presets: inside an installed package, or beside it in a source checkout."""
    package = Path(opensora_cli.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def list_presets(kind: str) -> list[str]:
    """Return the names of the presets of a `kind`, which is a command such as `generate`."""
    return sorted(path.stem for path in (presets_folder() / kind).glob("*.yaml"))


def describe_preset(kind: str, name: str) -> str:
    """Return what a preset's file says of itself, in one line: the comment that it begins with, without the command."""
    lines = preset_path(name, kind).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    words = [line.removeprefix("#").strip() for line in comment]
    return " ".join(word for word in words if not word.startswith("osora "))


def settings_path(name: Path, *kinds: str) -> Path:
    """Return the file that `name` means: itself, or the preset of that name, of the first of `kinds` that has it.
    Raises RequestError if it looks like the name of a preset, and there is none.
    """
    return name if name.suffix or name.is_file() else preset_path(str(name), *kinds)


def preset_path(name: str, *kinds: str) -> Path:
    """Return the file of a preset, of the first of `kinds` that has it; a RequestError if none has."""
    names = {preset: kind for kind in reversed(kinds) for preset in list_presets(kind)}
    if name not in names:
        close = nearest(name, names)
        raise RequestError(
            f"preset {name!r} is not one of {', '.join(sorted(names))}",
            hint=f"did you mean {close}?" if close else None,
        )
    return presets_folder() / names[name] / f"{name}.yaml"


def generate_preset(model: ModelName, *, resolution: str | None) -> str:
    """Return the name of the preset to start from.

    An unknown resolution gets the model's first preset, whose settings then list the known ones in their error.
    """
    presets = _PRESETS[model]
    return resolution if resolution in presets else presets[0]


class _TextLoader(yaml.BaseLoader):
    """Leaves scalars as text, and refuses duplicate keys and aliases that mean more than anyone wrote."""

    def construct_document(self, node: yaml.Node) -> object:
        _count_values(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _wrong_value("a key must be a word", key_node)
            if key_node.value in seen:
                raise _wrong_value(f"{key_node.value!r} is there twice: keep one", key_node)
            seen.add(key_node.value)
        return dict(super().construct_mapping(node, deep=deep))


def _count_values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return how many values a node means with its aliases followed; `known` has those of nodes met before."""
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise _wrong_value("an alias stands for what it is in", node)
        return count
    known[id(node)] = None
    inside = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
    count = 1 + (sum(_count_values(each, known) for each in inside) if isinstance(node, yaml.CollectionNode) else 0)
    if count > _MOST_VALUES:
        raise _wrong_value(f"it means more than {_MOST_VALUES:,} values", node)
    known[id(node)] = count
    return count


def _wrong_value(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_yaml(path: Path) -> dict[str, object]:
    """Return the mapping in the YAML file at `path`, laid over the file that it `extends`, if any.

    A relative `extends` starts from the folder of the file it is in; `train/NAME` and `hardware/NAME` are the recipe
    and the hardware of that name that come with osora. Lists are replaced, not joined.
    Raises FileProblem if a file is missing, unreadable, not a mapping, not YAML, or extends itself.
    """
    return _read(path, chain=())


def parse_yaml_text(text: str) -> object:
    """Return the value that a piece of YAML means, read as strictly as `read_yaml` reads files.

    Raises:
        yaml.YAMLError: it is not YAML, nested too deeply, or means too many values.
    """
    # The loader is a subclass of the one that builds nothing but text, lists and mappings.
    try:
        return yaml.load(text, Loader=_TextLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def _read(path: Path, *, chain: tuple[Path, ...]) -> dict[str, object]:
    with reading(path):
        here = Path(os.path.realpath(path))
    if here in chain:
        loop = " -> ".join(link.name for link in (*chain[chain.index(here) :], here))
        raise FileProblem(f"{path} extends itself: {loop}", hint=f"take one `{EXTENDS}:` out")
    values = _parse(path)
    parent = values.pop(EXTENDS, None)
    if parent is None:
        return values
    if not isinstance(parent, str) or not parent.strip():
        raise FileProblem(f"{path}: `{EXTENDS}:` must name one file")
    return _merged(_read(_extended(path, Path(parent)), chain=(*chain, here)), values)


def _extended(path: Path, parent: Path) -> Path:
    kind = str(parent.parent)
    if kind in _EXTENDED and not parent.suffix and not (path.parent / parent).exists():
        return preset_path(parent.name, kind)
    return path.parent / parent


def _parse(path: Path) -> dict[str, object]:
    text = read_text(path, max_bytes=MAX_SETTINGS_BYTES, hint="settings are a file of YAML: check its name")
    try:
        values = parse_yaml_text(text)
    except yaml.YAMLError as error:
        raise FileProblem(f"{path}{_place(error)} is not valid YAML: {_problem(error)}") from None
    if values is None or values == "":
        return {}
    if not isinstance(values, dict):
        raise FileProblem(f"{path} must hold `key: value` lines")
    return values


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}," if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]
