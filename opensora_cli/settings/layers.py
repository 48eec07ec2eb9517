"""Layers of settings from files, the environment and the command line, and errors that name the source of a value.

A layer maps dotted keys to values and their sources. Keys are checked while a layer is read so that an error can name
its source.

YAML 1.1 reads `16:9` as 969, `1e-4` as text and `no` as false, and it drops duplicate keys silently. This reader keeps
every scalar as text for the settings to convert, and refuses duplicate keys, and aliases, which could mean billions of
values.
"""

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

import opensora_cli
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import as_unicode, is_unicode, nearest, plain
from opensora_cli.core.reading import read_text, reading
from opensora_cli.core.section import Section, all_keys, nested


@dataclass(frozen=True)
class Given:
    """Value from the user, usually text, and its source: `--steps`, `OSORA_SAMPLING__SEED` or `my.yaml`."""

    value: object
    source: str


Layer = Mapping[str, Given]
S = TypeVar("S", bound=Section)

ENVIRONMENT_PREFIX = "OSORA_"
SERVER_VARIABLES = ("OSORA_REFINE_URL", "OSORA_REFINE_KEY", "OSORA_REFINE_MODEL")
"""Variables of the language model server. They are not settings, which are saved: the key must stay secret."""
_SCHEMAS = ("generate:GenerateSettings", "train:TrainSettings", "tools:ReconstructSettings")
"""Settings that commands read from the environment."""
_WEIGHTS = "runtime.weights"
EXTENDS = "extends"
_MAX_BYTES = 500_000
"""Largest file of settings, which takes a second to read."""


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
    if path.suffix == ".py":
        from opensora_cli.settings.reference import read_python

        values, bases = read_python(path, text)
    else:
        values, bases = _read_yaml(path, text)
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


def read_sections(
    schema: type[Section], values: Mapping[str, object], *, source: str, prefix: str = ""
) -> dict[str, Given]:
    """Return nested sections, as read from YAML or JSON, as a layer."""
    layer: dict[str, Given] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if not any(known.startswith(f"{key}.") for known in all_keys(schema)):
            check_key(schema, key, source=source)
            layer[key] = Given(value, source)
        elif isinstance(value, Mapping):
            layer |= read_sections(schema, value, source=source, prefix=f"{key}.")
        elif value not in (None, ""):
            raise RequestError(f"{key}={value} (from {source}) is a section", hint="put its keys below it")
    return layer


def read_environment(schema: type[Section], environment: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings in the environment as a layer.

    `OSORA_SAMPLING__SEED=1` sets `sampling.seed`, and `OSORA_WEIGHTS` is short for `OSORA_RUNTIME__WEIGHTS`. Empty
    variables count as unset. Variables for other commands are ignored.
    """
    variables, layer = _variables(schema), {}
    for name, value in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or not value:
            continue
        if name in variables:
            layer[variables[name]] = Given(value, name)
        elif name not in _all_variables():
            # Other programs may use the prefix. A name without __ that resembles no setting is ignored.
            close = nearest(name, [*variables, *SERVER_VARIABLES], cutoff=0.6 if "__" in name else 0.85)
            if close or "__" in name:
                hint = f"did you mean {close}?" if close else "unset it"
                raise RequestError(f"{name} in the environment is not a setting", hint=hint)
    return layer


def _variables(schema: type[Section]) -> dict[str, str]:
    variables = {f"{ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}": key for key in all_keys(schema)}
    return variables | ({"OSORA_WEIGHTS": _WEIGHTS} if _WEIGHTS in variables.values() else {})


@cache
def _all_variables() -> frozenset[str]:
    """Return the environment variables of all commands, whose modules are imported for this."""
    schemas = [resolve_name(f"opensora_cli.settings.{schema}") for schema in _SCHEMAS]
    return frozenset(SERVER_VARIABLES).union(*map(_variables, schemas))


def collect_overrides(
    schema: type[Section], flags: Layer, assignments: Iterable[str] | Mapping[str, object]
) -> dict[str, Given]:
    """Return named flags and assignments, from `--set` or by key, as one layer. The last assignment of a key wins."""
    overrides = dict(flags)
    source, pairs = "set", assignments
    if not isinstance(pairs, Mapping):
        source, pairs = "--set", dict(map(_assignment, pairs))
    for key, value in pairs.items():
        check_key(schema, key, source=source)
        flag = flags.get(key)
        if flag and str(flag.value) != str(value):
            message = f"{source} {key}={value} contradicts {flag.source}, which is {flag.value}"
            raise RequestError(message, hint="drop one of them")
        overrides[key] = Given(value, source)
    return overrides


def _assignment(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RequestError(f"--set {text} must be section.key=value", hint="as in --set sampling.flow_shift=3")
    return key.strip(), value


def validate(schema: type[S], given: Layer, *, below: Layer | None = None) -> S:
    """Return the settings from `given` over the preset `below`. Errors do not name the preset as a source."""
    values = {key: at.value for key, at in {**(below or {}), **given}.items()}
    try:
        return schema.model_validate(nested(values))
    except ValidationError as error:
        raise RequestError("\n".join(explain(error, given))) from error
    except UnicodeEncodeError as error:
        # pydantic cannot report such text.
        wrong = ", ".join(key for key, at in given.items() if not is_unicode(str(at.value)))
        raise RequestError(f"{wrong or 'a setting'} must be valid Unicode text") from error


def check_key(schema: type[Section], key: str, *, source: str) -> None:
    """Raise RequestError, with the nearest key, unless `key` is the dotted key of a setting."""
    keys = all_keys(schema)
    if key in keys:
        return
    if inside := [known for known in keys if known.startswith(f"{key}.")]:
        raise RequestError(f"{key} (from {source}) is a section", hint=f"set one of its keys: {', '.join(inside)}")
    close = nearest_key(key, keys if "." in key else [*schema.model_fields, *keys])
    siblings = [known for known in keys if "." in known and known.partition(".")[0] == key.partition(".")[0]]
    raise RequestError(
        f"{key} (from {source}) is not a setting",
        hint=f"did you mean {close}?" if close else f"there are {', '.join(siblings or schema.model_fields)}",
    )


_LONGEST = 200
_SHORTENED = 0.85
"""Similarity of a name that lacks words of another one. A single wrong letter counts as more similar."""
_LEADING_KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*(?=[= ])")
_PLAIN = re.compile(r"[^\s'\"]+")
_RULES = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "must be a whole number"),
    "greater_than": "must be over {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be under {lt}",
    "less_than_equal": "must be at most {le}",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode text",
}
"""Rules by the kind of error. Other errors have pydantic's own words."""
_OF_KEYS = {
    "extra_forbidden": "is not a setting",
    "missing": "must be given",
    "model_type": "is a section: set one of its keys",
}
"""Rules whose messages show no value."""


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known key most similar to `key`, or None if none is similar.

    The name counts more than the section, and missing words are allowed: `num_steps` finds
    `sampling.num_inference_steps`.
    """
    name = key.rpartition(".")[2]

    def likeness(candidate: str) -> tuple[float, float]:
        other = candidate.rpartition(".")[2]
        shortened = set(name.split("_")) <= set(other.split("_"))
        names = max(_SHORTENED if shortened else 0.0, SequenceMatcher(None, name, other).ratio())
        return names, SequenceMatcher(None, key, candidate).ratio()

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.6 else None


def explain(error: ValidationError, given: Mapping[str, Given] | None = None) -> list[str]:
    """Return one line for each broken rule, with the source of the value where `given` has its key."""
    given, lines = given or {}, []
    for line in (line for details in error.errors(include_url=False) for line in _lines(details)):
        key = match.group() if (match := _LEADING_KEY.match(line)) else ""
        # An item of a list has the source of the list.
        while key and key not in given:
            key = key.rpartition(".")[0]
        lines.append(f"{line} (from {given[key].source})" if key else line)
    return lines


def _lines(details: Any) -> list[str]:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        # Validators of this package write whole lines.
        return str(context["error"]).splitlines()
    if kind == "too_short" and isinstance(details["input"], list | tuple) and details["input"]:
        # Wrong items are not counted, and have lines of their own.
        return []
    key = ".".join(part for part in details["loc"] if isinstance(part, str) and part != "[key]")
    if kind in _OF_KEYS:
        return [f"{key} {_OF_KEYS[kind]}"]
    if kind == "enum":
        choices = re.findall(r"'([^']*)'", context["expected"])
        close = nearest(str(details["input"]), choices)
        rule = f"must be one of {', '.join(choices)}" + (f": did you mean {close}?" if close else "")
    elif kind in _RULES:
        bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
        rule = _RULES[kind].format_map(bounds)
    else:
        rule = re.sub(r"^\w+ should(.*?)( after validation.*)?$", r"must\1", details["msg"])
    return [f"{key}={_shown(details['input'])} {rule}"]


def _shown(value: object) -> str:
    text = as_unicode(value if isinstance(value, str) else str(value))
    if len(text) > _LONGEST:
        return plain(text)
    return text if _PLAIN.fullmatch(text) else repr(value)
