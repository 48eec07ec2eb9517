"""Layers of settings for any command, and errors that name the setting, its value, the rule, the fix and the source.

A layer maps dotted keys to values and their sources. Keys are checked while a layer is read so that an error can name
its source.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pkgutil import resolve_name
from typing import Any, TypeVar

from pydantic import ValidationError

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import as_unicode, is_unicode, nearest, plain
from opensora_cli.core.section import Section, all_keys, is_inside, nested


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
_SCHEMAS = ("generate:GenerateSettings", "train:TrainSettings", "vae:ReconstructSettings")
"""Settings that commands read from the environment."""
_WEIGHTS = "runtime.weights"


def read_sections(
    schema: type[Section], values: Mapping[str, object], *, source: str, is_saved: bool = False, prefix: str = ""
) -> dict[str, Given]:
    """Return nested sections, as read from YAML or JSON, as a layer.

    In a file that an earlier version saved (`is_saved`), settings that were removed since are ignored.
    """
    layer: dict[str, Given] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if is_saved and key in _REMOVED.split():
            continue
        if not any(known.startswith(f"{key}.") for known in all_keys(schema)):
            check_key(schema, key, source=source)
            layer[key] = Given(value, source)
        elif isinstance(value, Mapping):
            layer |= read_sections(schema, value, source=source, is_saved=is_saved, prefix=f"{key}.")
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
        lines = [
            f"{key}={plain(as_unicode(str(at.value)))} must be valid Unicode text (from {at.source})"
            for key, at in given.items()
            if not is_unicode(str(at.value))
        ]
        raise RequestError("\n".join(lines) or "some text is not valid Unicode") from error


_REMOVED = """
sampling.batch_size parallel.node_rank parallel.rdzv_endpoint parallel.watch parallel.watch_limit_s
precision.fp8_linears precision.initial_loss_scale precision.loss_scale_window watching.exact_timers
memory.activation_buffer memory.activation_offload memory.offload_above
data.scenes train_mmdit.thing_weight train_vae.picture_steps train_vae.picture_batch_size train_vae.whitening_clips
train_vae.whole_steps text.batch_size text.t5_width text.t5_layers text.t5_heads text.clip_width text.clip_layers
text.clip_heads watching.profile_steps checkpoints.keep_best
optimizer.initial_learning_rate optimizer.final_learning_rate
"""
"""Settings and sections of earlier versions."""


def check_key(schema: type[Section], key: str, *, source: str) -> None:
    """Raise RequestError, with the nearest key, unless `key` is the dotted key of a setting."""
    keys = all_keys(schema)
    if key in keys:
        return
    if inside := [known for known in keys if known.startswith(f"{key}.")]:
        raise RequestError(f"{key} (from {source}) is a section", hint=f"set one of its keys: {', '.join(inside)}")
    if is_inside(key, _REMOVED.split()):
        hint = "drop it; see what replaces it under Removed in CHANGELOG.md"
        raise RequestError(f"{key} (from {source}) was removed", hint=hint)
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
