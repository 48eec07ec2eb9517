"""The published models, as the names and shapes of their tensors."""

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.listing import first_few

Shape = tuple[int, ...]


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
    shapes: Mapping[str, Shape]


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


def differences(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """Return what is wrong with tensors that should have the names and shapes `expected`, each kind in one line."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    wrong = [
        f"{key}: {list(shape)}, not {list(expected[key])}"
        for key, shape in found.items()
        if key in expected and shape != expected[key]
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    return [f"{len(names)} {kind}: {first_few(names)}" for kind, names in kinds if names]


def _folder() -> Path:
    return Path(str(importlib.resources.files("opensora_cli") / "assets" / "released"))
