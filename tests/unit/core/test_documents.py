"""Results as JSON documents."""

from pathlib import Path

from pydantic import Field

from opensora_cli.core.documents import Document


class _File(Document):
    path: Path
    size: int


class _Result(Document):
    SCHEMA = "osora.example/1"

    files: tuple[_File, ...]
    handle: int = Field(exclude=True)


RESULT = _Result(files=(_File(path=Path("a/b"), size=3),), handle=7)


def test_document_names_its_schema_first_and_leaves_out_what_json_does_not_show():
    assert list(RESULT.to_json().items()) == [
        ("schema", "osora.example/1"),
        ("files", [{"path": "a/b", "size": 3}]),
    ]


def test_json_schema_describes_the_same_keys():
    described = _Result.model_json_schema(mode="serialization")
    assert list(described["properties"]) == ["schema", "files"]
    assert described["properties"]["schema"] == {"const": "osora.example/1"}
    assert described["$defs"]["_File"]["properties"]["size"]["type"] == "integer"
