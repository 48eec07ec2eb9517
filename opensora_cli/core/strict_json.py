"""Reading JSON that may be broken or hostile: nothing is guessed, and errors have one line."""

import json
from typing import Any

MAX_JSON_BYTES = 10_000_000
"""No header or index is longer: that of a model with eleven billion parameters has 150 kB."""

_MAX_SEPARATORS = 1_000_000
"""Of values, which may take 100 bytes of memory for each of these: a tensor in a header has some 15."""


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the object that `content` is, as UTF-8 JSON.

    Raises:
        ValueError: it is something else, too large or too deep, or has a key twice or text that is not Unicode.
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
    """Return whether `content` may take more memory as an object than there should be for it."""
    return len(content) > MAX_JSON_BYTES or sum(map(content.count, (b"[", b"{", b",", b":"))) > _MAX_SEPARATORS


def shown(text: str) -> str:
    """Return foreign text as it may appear in a message: quoted, in one line, not too long."""
    return repr(text) if len(text) <= 100 else f"{text[:80]!r}..."


def is_unicode(text: str) -> bool:
    """Return whether `text` can be written as UTF-8: half a surrogate pair, such as an escape may give, can't."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    """Return `text` with what is no Unicode (of a shell argument in another encoding, say) in backslash form."""
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
