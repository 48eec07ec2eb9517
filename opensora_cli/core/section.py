"""Base class of settings and of the sizes of models, and the types of their values."""

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from opensora_cli.core.formatting import is_unicode, parse_bytes

NO_VALUE = frozenset({"", "~", "none", "null"})
"""Texts that mean None in YAML, in the environment and in --set."""

MAX_SIDE = 65_536
"""Largest side of a tile, in pixels."""
MAX_FRAMES = 100_000
"""Largest number of frames of a video, clip or tile."""
_MAX_INT = 2**63 - 1
"""Largest whole number that torch and floats can hold."""

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=10**6)]
FileName = Annotated[str, Field(min_length=1)]
"""Non-empty name of a file or folder."""


def _read_bytes(value: object, info: ValidationInfo) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{info.field_name}={error}") from error


ByteSize = Annotated[PositiveInt, Field(le=_MAX_INT), BeforeValidator(_read_bytes)]
"""Number of bytes, or text with a unit: `4GB` (powers of 1000) or `4GiB` (powers of 1024)."""


def _check_unicode(value: str) -> str:
    if not is_unicode(value):
        raise PydanticKnownError("string_unicode")
    return value


Words = Annotated[str, AfterValidator(_check_unicode)]
"""Text for readers or models. Text that is not valid Unicode is refused because no tokenizer accepts it."""


@dataclass(frozen=True)
class SplitAt:
    """Separator of a list in text, as metadata of a field. The default is a comma."""

    separator: str


def rule_error(rule: str) -> PydanticCustomError:
    """Return the error of a broken rule, which comes after the setting and its value: "must be a size"."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def matching(pattern: str, rule: str) -> AfterValidator:
    """Return a validator for text that matches `pattern` as a whole. `rule` is that of `rule_error`."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, _check_unicode(value)):
            raise rule_error(rule)
        return value

    return AfterValidator(check)


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return a validator for a name of a table, which is read for each value. The error has the form of an enum's."""

    def check(value: str) -> str:
        if value not in (known := [*names()]):
            raise PydanticKnownError("enum", {"expected": ", ".join(map(repr, known))})
        return value

    return AfterValidator(check)


def ending(*endings: str) -> AfterValidator:
    """Return a validator for the ending of a file name."""
    pattern = rf"(?is).*[^/]({'|'.join(map(re.escape, endings))})"
    return matching(pattern, f"must end in {', '.join(endings[:-1])} or {endings[-1]}")


PlotFile = Annotated[str, ending(".png", ".svg", ".pdf")]
"""Chart file. Its ending chooses the format."""


class Applies(NamedTuple):
    """Condition under which settings take part in a run: a row of a table in `applies.py`."""

    keys: str
    """Dotted keys of settings or whole sections, separated by blanks."""
    when: str | Callable[[Any], object]
    """Condition as a function or text; see `find_setting`."""
    why: str = ""
    """The fix, after the reason if `when` is a function, formatted with the settings `s`. Empty: never refused."""
    but: str = ""
    """Names in a section that the row does not cover."""
    typed: bool = False
    """Whether only a typed value is refused. Otherwise every value other than the default is refused."""
    saved: bool = False
    """Whether sidecars always record the settings."""

    @cache  # noqa: B019  # rows are constants
    def covered(self, schema: "type[Section]") -> frozenset[str]:
        """Return the dotted keys of the settings of `schema` that the row is about."""
        places = self.keys.split()
        omitted = [f"{place}.{name}" for place in places for name in self.but.split()]
        return frozenset(key for key in all_keys(schema) if is_inside(key, places) and not is_inside(key, omitted))

    def holds(self, settings: "Section") -> bool:
        """Return whether the settings take part in a run."""
        return find_setting(settings, self.when)[0] if isinstance(self.when, str) else bool(self.when(settings))

    def reason(self, settings: "Section") -> str:
        """Return the end of the sentence "KEY=VALUE has no effect WHY: FIX"."""
        if not isinstance(self.when, str):
            return self.why.format(s=settings)
        key, sign, _ = _parsed(self.when)
        return f"{f'with {find_setting(settings, key)[1]}' if sign else f'without {key}'}: {self.why}"


def find_setting(settings: "Section", condition: str) -> tuple[bool, str]:
    """Return whether a condition holds, and its setting as `KEY=VALUE`.

    A condition is `KEY` (set, and neither false nor 0), `KEY=VALUE`, `KEY=A|B`, `KEY!=VALUE` or `KEY>NUMBER`. No text
    always holds.
    """
    if not condition:
        return True, ""
    key, sign, value = _parsed(condition)
    found = attrgetter(key)(settings)
    if not sign:
        holds = bool(found)
    elif sign == ">":
        holds = found is not None and found > int(value)
    else:
        holds = (shown(found) in value.split("|")) == (sign == "=")
    return holds, f"{key}={shown(found)}"


@cache
def _parsed(condition: str) -> Sequence[str]:
    """Return the key, the sign and the value of a condition; `KEY` alone has neither sign nor value."""
    return [*re.split("(!=|=|>)", condition, maxsplit=1), "", ""][:3]


def is_inside(key: str, places: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `places` or in one of these sections."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


class Section(BaseModel):
    """Closed, frozen group of settings. An unknown key is an error, and nothing changes after validation.

    Every value may arrive as text because command lines, the environment and YAML files have nothing else. Text becomes
    a list at commas (`8,12,12` or `[8, 12, 12]`). `none`, `null`, `~` and empty text become None where None is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    applies: ClassVar[tuple[Applies, ...]] = ()
    """Table of the settings of a command. Nested sections have no table."""

    def rules(self) -> Iterable[str]:
        """Yield one line for each broken rule between these settings."""
        return ()

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str) or info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        kinds = alternatives(field.annotation)
        if type(None) in kinds and value.strip().lower() in NO_VALUE:
            return None
        if any(get_origin(kind) is tuple for kind in kinds):
            separators = [each.separator for each in field.metadata if isinstance(each, SplitAt)]
            return split_list(value, separator=separators[0] if separators else ",")
        return value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        rows = [row for row in self.applies if row.why and not row.typed and not row.holds(self)]
        given = changed(self) if rows else {}
        problems = [
            f"{key}={shown(value)} has no effect {row.reason(self)}"
            for row in rows
            for key, value in given.items()
            if key in row.covered(type(self))
        ]
        if problems := [*problems, *self.rules()]:
            raise ValueError("\n".join(problems))
        return self

    def replace(self, changes: Mapping[str, object]) -> Self:
        """Return these settings with `changes` by dotted key, such as `{"condition.mode": "i2v_head"}`.

        Raises:
            pydantic.ValidationError: A key is unknown, or the new settings break a rule.
        """
        return type(self).model_validate(nested(changes, into=self.model_dump()))


@cache
def all_keys(schema: type[Section]) -> tuple[str, ...]:
    """Return the dotted keys of all settings."""
    keys: list[str] = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        inside = all_keys(kind) if isinstance(kind, type) and issubclass(kind, Section) else ()
        keys += [f"{name}.{key}" for key in inside] or [name]
    return tuple(keys)


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, object, bool]]:
    """Yield the dotted key of each setting, its value, and whether that is its default."""
    for name, details in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, not details.is_required() and value == details.default


def changed(section: Section) -> dict[str, object]:
    """Return the settings that differ from their defaults, by dotted key."""
    return {key: value for key, value, is_default in leaves(section) if not is_default}


def shown(value: object) -> str:
    """Return a value in the form of the command line."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "shown", value))


def nested(values: Mapping[str, object], *, into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return values with dotted keys as nested sections, merged into `into`."""
    into = {} if into is None else into
    for key, value in values.items():
        *sections, name = key.split(".")
        place = into
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return into


def split_list(text: str, *, separator: str) -> tuple[str, ...]:
    """Return the non-empty parts of `text`, stripped. Square brackets around the text are dropped."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def alternatives(annotation: object) -> tuple[object, ...]:
    """Return the members of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
