"""Names, which may come from files, in messages of one line."""

from collections.abc import Sequence

_LISTED = 3
_LONGEST = 200


def first_few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are: `a, b, c and 5 more`. What could break a line is escaped."""
    listed = ", ".join(_plain(name) for name in names[:_LISTED])
    rest = len(names) - _LISTED
    return f"{listed} and {rest} more" if rest > 0 else listed


def _plain(name: str) -> str:
    short = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    return short if short.isprintable() else repr(short)
