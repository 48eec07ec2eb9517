"""Names and texts, which may come from files, in messages of one line."""

import unicodedata
from collections.abc import Sequence

_LISTED = 3
_LONGEST = 200
_JOINERS = "\u200c\u200d"
"""They format text, as what could harm does, but emoji and whole languages need them."""


def first_few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are: `a, b, c and 5 more`. What could break a line is escaped."""
    listed = ", ".join(plain(name) for name in names[:_LISTED])
    rest = len(names) - _LISTED
    return f"{listed} and {rest} more" if rest > 0 else listed


def plain(name: str) -> str:
    """Return a name as it may appear in a message: in one line, and not too long."""
    short = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return short if short.isprintable() else repr(short)


def escaped(text: str) -> str:
    """Return `text` with all that breaks lines or steers terminals in backslash form: text of any language stays."""
    return text if text.isprintable() else "".join(map(_escaped_character, text))


def _escaped_character(character: str) -> str:
    is_harmful = unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character not in _JOINERS
    return character.encode("unicode_escape").decode() if is_harmful else character
