"""Base class of results: pydantic models whose JSON form `--json` prints."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler


class Document(BaseModel):
    """A frozen record whose fields, in order, are its JSON form.

    Fields hold what JSON can express (text, numbers, lists, mappings, other documents, and paths, which become text);
    what a program needs and JSON does not show is a field with `exclude=True`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    SCHEMA: ClassVar[str | None] = None
    """Name and version under the key `schema`. None means a part of another document."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        if cls.SCHEMA is not None:
            described["properties"] = {"schema": {"const": cls.SCHEMA}, **described.get("properties", {})}
        return described

    def to_json(self) -> dict[str, Any]:
        fields = self.model_dump(mode="json", by_alias=True)
        return fields if self.SCHEMA is None else {"schema": self.SCHEMA, **fields}

    def lines(self) -> Sequence[str]:
        """Return the document as lines of text; a part of another document has none."""
        return ()

    def lines_after_notes(self) -> Sequence[str]:
        """Return the lines for a terminal that has shown the notes of the run."""
        return self.lines()

    def raise_for_problems(self) -> None:
        """Raise the error for the problems that the document lists; the base class has none."""
