"""Strict reader for JSON that may be broken or malicious. Errors have one line."""

import json
from typing import Any

MAX_JSON_BYTES = 10_000_000
"""Largest size of a header or index; a model with eleven billion parameters has 150 kB."""

_MAX_SEPARATORS = 1_000_000
"""Largest number of separators. Values take up to 100 bytes of memory each; a tensor in a header has about 15."""


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the object in `content`, which is UTF-8 JSON.

    Raises:
        ValueError: It is no object, too large or too deep, or has a duplicate key or text that is not Unicode.
    """
    if is_too_large(content):
        raise ValueError("JSON with more values than any model needs")
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_checked_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError("JSON that is no object")
    return document


def is_too_large(content: bytes) -> bool:
    """Return whether `content` may take too much memory as an object."""
    return len(content) > MAX_JSON_BYTES or sum(map(content.count, (b"[", b"{", b",", b":"))) > _MAX_SEPARATORS


def shown(text: str) -> str:
    """Return untrusted text for a message: quoted, in one line, and shortened if it is long."""
    return repr(text) if len(text) <= 100 else f"{text[:80]!r}..."


def is_unicode(text: str) -> bool:
    """Return whether `text` can be written as UTF-8; a lone surrogate, for example from an escape, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    """Return `text` with lone surrogates (for example from a shell argument in another encoding) in backslash form."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is there twice")
        for text in (key, value):
            if isinstance(text, str) and not is_unicode(text):
                raise ValueError(f"{shown(text)} has half a character")
        found[key] = value
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
