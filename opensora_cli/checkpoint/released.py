"""The published models, as the names and shapes of their tensors."""

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A published checkpoint.

    Args:
        name: what options call it.
        title: what it is.
        file: what its file is called.
        shapes: of its tensors, in the file's order.
    """

    name: str
    title: str
    file: str
    shapes: Mapping[str, tuple[int, ...]]


def released_names() -> list[str]:
    """Return the names of all published models."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def read_released(name: str) -> Released:
    """Return a published model.

    Raises:
        RequestError: there is none of that name.
    """
    names = released_names()
    if name not in names:
        raise RequestError(f"preset={name!r} is not one of {', '.join(names)}")
    table = json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))
    shapes = {key: tuple(shape) for key, shape in table["tensors"].items()}
    return Released(name=name, title=table["title"], file=table["file"], shapes=shapes)


def _folder() -> Path:
    return Path(str(importlib.resources.files("opensora_cli") / "assets" / "released"))
