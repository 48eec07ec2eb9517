"""Sizes, durations and names as messages show them, each in one line."""

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
"""Decimal units and their bytes, largest first."""

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_LARGEST = 2**63 - 1
"""Largest size of a file on any system."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")

_LISTED = 3
_LONGEST = 200
_LONGEST_PATH = 1000
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
_JOINERS = "\u200c\u200d"
"""Format characters that are not harmful: emoji and some languages need them."""


def parse_bytes(text: str) -> int:
    """Return a size in bytes from text such as `4096`, `4GB` or `4GiB`. Raises ValueError for any other text."""
    found = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(found.group(2).upper()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not a size such as 4GB or 4096MiB")
    size = float(found.group(1)) * factor
    if size > _LARGEST:
        raise ValueError(f"{text.strip()[:20]!r}... is larger than any file")
    return round(size)


def format_bytes(count: int) -> str:
    """Return `count` bytes as text: `23.8 GB`."""
    unit = next((unit for unit, size in _UNITS.items() if count >= size), None)
    return f"{count} bytes" if unit is None else f"{count / _UNITS[unit]:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration as text: `2.4 s`, `4 min 05 s`, `1 h 02 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def first_few(names: Sequence[str]) -> str:
    """Return the first names and the number of the others: `a, b, c and 5 more`. Unprintable names are escaped."""
    listed = ", ".join(plain(name) for name in names[:_LISTED])
    rest = len(names) - _LISTED
    return f"{listed} and {rest} more" if rest > 0 else listed


def aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row of a table as a line, with its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plain(name: str) -> str:
    """Return a name for a message: in one line, and shortened if it is long."""
    short = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return short if short.isprintable() else repr(short)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for a message: in one line, and only both ends of a very long path."""
    text = os.fspath(path)
    short = text if len(text) <= _LONGEST_PATH else f"{text[:_LONGEST]}...{text[-_LONGEST:]}"
    return escaped(as_unicode(short))


def escaped(text: str) -> str:
    """Return `text` with characters that break lines or control terminals in backslash form."""
    return "".join(each.encode("unicode_escape").decode() if is_harmful(each) else each for each in text)


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


def without_credentials(text: str) -> str:
    """Return `text` with the user and password in each address hidden: `https://<hidden>@host`."""
    return _CREDENTIALS.sub("<hidden>@", text)


def is_harmful(character: str) -> bool:
    """Return whether a character breaks lines, controls terminals, or changes the direction of text."""
    return unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character not in _JOINERS


def either(choices: Sequence[str]) -> str:
    """Return choices as a phrase: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice most similar to `word`, or None if none is similar."""
    close = get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return close[0] if close else None
