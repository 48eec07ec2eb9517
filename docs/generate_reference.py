"""Write the reference pages for commands, settings and JSON documents from the code.

    python docs/generate_reference.py

The pages are committed in `docs/reference/`, and a test fails if they differ from the code.
"""

import ast
import enum
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import opensora_cli
from opensora_cli.cli.app import load_commands
from opensora_cli.core.documents import Document
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.vae import ReconstructSettings

FOLDER = Path(__file__).parent / "reference"

COMMAND_OF_SCHEMA = {
    "generate": ("generate", "plan", "batch", "batch-plan"),
    "train": ("train", "train-plan", "train-plot", "new-recipe", "recipes", "data-check"),
    "data": ("data-scan", "data-shard", "data-preview", "data-cache"),
    "ckpt": ("ckpt.convert", "ckpt.download", "ckpt.inspect", "ckpt.merge-lora", "ckpt.verify"),
    "vae": ("vae-reconstruct", "vae-stats"),
    "mem-profile": ("mem-profile",),
    "bench-generate": ("bench-generate",),
    "bench-comm": ("bench-comm",),
    "env-check": ("env-check", "env-profile"),
    "show": ("show",),
    "presets": ("presets",),
    "gallery": ("gallery",),
}
"""Schema names by the command that prints the documents."""

LONG = "---\nlong: generated from the code\n---"
LONG_WITHOUT_SEARCH = "---\nlong: generated from the code\nsearch:\n  exclude: true\n---"

Schema = Mapping[str, Any]


def pages() -> dict[str, str]:
    """Return the Markdown of each generated page, by its path below `docs/reference/`."""
    return {
        "commands.md": commands_page(),
        "settings_generate.md": settings_page(
            GenerateSettings,
            "Settings of `osora generate`",
            "The table has the defaults of the schema. A preset sets its own values: "
            "`osora presets --json` prints all of them.",
        ),
        "settings_train.md": settings_page(
            TrainSettings,
            "Settings of `osora train`",
            "`target` has no default: every recipe in `configs/train/` sets it. `osora data cache` reads the same "
            "settings.",
        ),
        "settings_vae.md": settings_page(
            ReconstructSettings,
            "Settings of `osora vae`",
            "`configs/vae/` has the configurations of the autoencoders. `osora vae stats` has all settings except "
            "`output`.",
        ),
        **documents_pages(),
    }


def commands_page() -> str:
    """Return the page of all commands with their arguments and options."""
    root = load_commands()
    parts = [LONG, "# Commands", "`osora COMMAND --help-all` prints the same text."]
    for name, command in _commands(root, "osora"):
        parts.append(f"## `{name}`")
        parts.extend(_help_paragraphs(command.help or ""))
        panels: dict[str, list[tuple[str, ...]]] = {}
        command.describe()
        for parameter in command.params:
            if not parameter.hidden and "--help" not in parameter.opts:
                panel = getattr(parameter, "rich_help_panel", None) or "Arguments and options"
                panels.setdefault(panel, []).append(_parameter_row(parameter))
        for panel, rows in panels.items():
            parts.append(_table((panel, "value", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for below, each in command.commands.items():
        yield from _commands(each, f"{name} {below}")


def _help_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text, with its examples as one block of code."""
    about, _, examples = text.partition("Examples:")
    yield from (" ".join(paragraph.split()) for paragraph in about.split("\n\n") if paragraph.strip())
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    if lines:
        yield "\n".join(["```bash", *lines, "```"])


def _parameter_row(parameter: Any) -> tuple[str, ...]:
    is_option = parameter.param_type_name == "option"
    name = (
        ", ".join(f"`{option}`" for option in parameter.opts)
        if is_option
        else f"`{parameter.metavar or parameter.name.upper()}`"
    )
    value = ""
    if is_option and not parameter.is_flag:
        kind = parameter.type_descriptor.annotation
        choices = isinstance(kind, type) and issubclass(kind, enum.Enum)
        value = parameter.metavar or (" ".join(f"`{each.value}`" for each in kind) if choices else kind.__name__)
    return name, value, (parameter.help or "") + (" Required." if parameter.required else "")


def settings_page(settings: type[BaseModel], title: str, about: str) -> str:
    """Return the page of one command's settings, a table for each section."""
    schema = settings.model_json_schema(mode="validation")
    parts = [LONG, f"# {title}", about]
    parts.extend(_sections(schema, schema.get("$defs", {}), key=""))
    return "\n\n".join(parts) + "\n"


def _sections(section: Schema, named: Schema, *, key: str) -> Iterator[str]:
    rows, below = [], []
    for name, field in section["properties"].items():
        target = _resolve(field, named)
        if "properties" in target and target.get("type") == "object":
            below.append((f"{key}{name}", target))
        else:
            rows.append((f"`{key}{name}`", _kind(field, named), _default(field), field.get("description", "")))
    if key:
        yield f"## `{key[:-1]}`"
        yield section.get("description", "")
    if rows:
        yield _table(("key", "type", "default", "meaning"), rows)
    for name, target in below:
        yield from _sections(target, named, key=f"{name}.")


def documents_pages() -> dict[str, str]:
    """Return the overview of the JSON documents and a page for each command that prints some."""
    documents = _documents()
    notes = {document.__name__: _notes(document) for document in documents}
    if len(notes) < len(documents):
        raise ValueError("two documents have one name, and their notes would be mixed")
    by_name = {str(each.SCHEMA).split("/")[0].removeprefix("osora."): each for each in documents if each.SCHEMA}
    of_commands = {name: command for command, names in COMMAND_OF_SCHEMA.items() for name in names}
    if by_name.keys() != of_commands.keys():
        raise ValueError(f"COMMAND_OF_SCHEMA differs from the schemas in {by_name.keys() ^ of_commands.keys()}")
    settings = _settings_sections()
    found = {}
    rows = []
    for command, names in COMMAND_OF_SCHEMA.items():
        parts = [LONG_WITHOUT_SEARCH, f"# JSON of `osora {command}`"]
        for name in names:
            parts.extend(_document_section(by_name[name], notes, settings))
        found[f"json/{command}.md"] = "\n\n".join(parts) + "\n"
        rows.append(
            (f"[`osora {command}`](json/{command}.md)", ", ".join(f"`{by_name[name].SCHEMA}`" for name in names))
        )
    found["json_documents.md"] = (
        "# JSON documents\n\n`--json` prints one document to stdout. Its key `schema` has the name and the version, "
        "such as `osora.plan/7`. The version rises when a key is removed or changes its meaning.\n\n"
        f"{_table(('command', 'documents'), rows)}\n"
    )
    return found


def _document_section(document: type[Document], notes: Mapping[str, Schema], settings: frozenset[str]) -> Iterator[str]:
    """Yield the paragraphs and tables of one document. Sections of settings are on pages of their own."""
    schema = document.model_json_schema(mode="serialization")
    named = schema.pop("$defs", {})
    yield f"## `{document.SCHEMA}`"
    yield _first_paragraph(document.__doc__)
    yield _keys_table(schema, named, notes[document.__name__])
    for name, part in named.items():
        if "properties" in part and name not in settings:
            yield f"**`{name}`** {_first_paragraph(part.get('description'))}"
            yield _keys_table(part, named, notes.get(name, {}))
    yield f"JSON schema: `{document.__module__}.{document.__name__}.model_json_schema()`."


def _settings_sections() -> frozenset[str]:
    """Return the names of all classes that the pages of settings describe."""
    classes = (GenerateSettings, TrainSettings, ReconstructSettings)
    return frozenset(
        name
        for each in classes
        for name in (each.__name__, *each.model_json_schema(mode="serialization").get("$defs", {}))
    )


def _documents() -> list[type[Document]]:
    """Return every document and every part of one."""
    for module in pkgutil.walk_packages(opensora_cli.__path__, "opensora_cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    waiting, found = list(Document.__subclasses__()), []
    while waiting:
        each = waiting.pop()
        waiting.extend(each.__subclasses__())
        if each.__module__.startswith("opensora_cli."):
            found.append(each)
    return found


def _notes(document: type[Document]) -> dict[str, str]:
    """Return what stands as text under the fields of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(document))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, note in itertools.pairwise(definition.body):
        match field, note:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _keys_table(schema: Schema, named: Schema, notes: Mapping[str, str]) -> str:
    rows = [
        (f"`{name}`", _kind(field, named), notes.get(name) or field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]
    return _table(("key", "type", "meaning"), rows)


def _kind(field: Schema, named: Schema) -> str:
    """Return the type of a field in words."""
    field = {**field, **({} if "$ref" not in field else _resolve(field, named))}
    if "properties" in field:
        return f"`{field['title']}`"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(each, named) for each in field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    match field.get("type"):
        case "array" if "prefixItems" in field:
            return f"[{', '.join(_kind(each, named) for each in field['prefixItems'])}]"
        case "array":
            return f"list of {_kind(field.get('items', {}), named)}"
        case "object":
            values = field.get("additionalProperties")
            return f"mapping to {_kind(values, named)}" if isinstance(values, dict) and values else "mapping"
        case "null":
            return "none"
        case "integer" | "number" as kind:
            return f"{kind}{_range(field)}"
        case "string":
            return "text"
        case None:
            return "any"
        case kind:
            return str(kind)


def _range(field: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ",".join(f" {sign} {field[key]:,}" for key, sign in signs.items() if key in field)


def _default(field: Schema) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if value is None or value == "":
        return "none" if value is None else "empty"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _resolve(field: Schema, named: Schema) -> Schema:
    reference = field.get("$ref")
    return named[reference.rpartition("/")[2]] if reference else field


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    # A bar outside of code would end the cell, and <...> would be HTML.
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write the pages whose text has changed, and remove pages that the code no longer makes."""
    wanted = pages()
    for name, text in wanted.items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)
    for path in (FOLDER / "json").glob("*.md"):
        if f"json/{path.name}" not in wanted:
            path.unlink()
            print(f"{path} removed")


if __name__ == "__main__":
    main()
