"""What all sections of settings have in common."""

import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticKnownError

from opensora_cli.core.formatting import parse_bytes
from opensora_cli.core.strict_json import is_unicode

# The ways to write "no value" in a place where only text can stand: YAML, the environment and --set.
NO_VALUE = frozenset({"", "~", "none", "null"})

MAX_SIDE = 65_536
"""Pixels of a tile, along each side."""
MAX_FRAMES = 100_000
"""Frames of a video, a clip or a tile: an hour at 24 a second is 86,400."""

_LARGEST = 2**63 - 1
"""Of whole numbers: Python's go on, but its floats and torch's numbers do not."""


def _read_bytes(value: object, info: ValidationInfo) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{info.field_name}={error}") from error


ByteSize = Annotated[PositiveInt, Field(le=_LARGEST), BeforeValidator(_read_bytes)]
"""Bytes; as text also with a unit: `4GB` (powers of 1000), `4GiB` (powers of 1024)."""


def _check_unicode(value: str) -> str:
    if not is_unicode(value):
        raise PydanticKnownError("string_unicode")
    return value


Words = Annotated[str, AfterValidator(_check_unicode)]
"""Text that is no name of a file: a shell argument in another encoding is refused, since no tokenizer takes it."""


PLOT_ENDINGS = (".png", ".svg", ".pdf")


def _check_plot_ending(value: str, info: ValidationInfo) -> str:
    if PurePath(value).suffix.lower() not in PLOT_ENDINGS:
        raise ValueError(f"{info.field_name}={value} must end in .png, .svg or .pdf")
    return value


PlotFile = Annotated[str, AfterValidator(_check_plot_ending)]
"""A file for a chart, whose ending is its format."""


class Section(BaseModel):
    """A closed, frozen group of settings: an unknown key is an error, and nothing changes after validation.

    Every value may arrive as text, since command lines, the environment and our YAML know nothing else. Text becomes
    a list at commas (`8,12,12` or `[8, 12, 12]`), and nothing at `none`, `null`, `~` or an empty text where the
    setting may be unset.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str) or info.field_name is None:
            return value
        kinds = alternatives(cls.model_fields[info.field_name].annotation)
        if type(None) in kinds and value.strip().lower() in NO_VALUE:
            return None
        if any(get_origin(kind) is tuple for kind in kinds):
            return split_list(value, separator=",")
        return value

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise PydanticKnownError("int_parsing_size")
        return value

    def replace(self, changes: Mapping[str, object]) -> Self:
        """Return these settings with `changes`, validated again as a whole: `{"condition.mode": "i2v_head"}`.

        Raises pydantic.ValidationError if a key is unknown, or the new settings break a rule.
        """
        return type(self).model_validate(nested(changes, into=self.model_dump()))


def nested(values: Mapping[str, object], *, into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return values that are given by dotted keys as nested sections, those of `into` if it is given."""
    into = {} if into is None else into
    for key, value in values.items():
        *sections, name = key.split(".")
        place = into
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return into


def split_list(text: str, *, separator: str) -> tuple[str, ...]:
    """Return the non-empty parts of `text`, without blanks around them; square brackets around it all are dropped."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def alternatives(annotation: object) -> tuple[object, ...]:
    """Return the members of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
