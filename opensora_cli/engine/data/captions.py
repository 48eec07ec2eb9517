"""Captions in files beside pictures and videos: `clip.txt` or `clip.json` for `clip.mp4`."""

import json
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem

_KEYS = ("text", "caption", "prompt")


def read_caption(path: Path) -> str:
    """Return the caption of a picture or video, in one line; empty if it has none.

    A text file wins. A JSON file holds a text, or an object with one under `text`, `caption` or `prompt`.

    Raises:
        FileProblem: it has one that cannot be read.
    """
    text = _content(path.with_suffix(".txt"))
    if text is None:
        sidecar = path.with_suffix(".json")
        content = _content(sidecar)
        text = "" if content is None else _from_json(content, sidecar)
    return " ".join(text.split())


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not text in UTF-8") from error
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from error


def _from_json(content: str, path: Path) -> str:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise FileProblem(f"{path} is not JSON: {error}") from error
    found = value if isinstance(value, str) else None
    if isinstance(value, dict):
        found = next((value[key] for key in _KEYS if isinstance(value.get(key), str)), None)
    if found is None:
        raise FileProblem(f"{path} has no text under {', '.join(_KEYS[:-1])} or {_KEYS[-1]}")
    return found
