"""Rules between pairs of settings: one needs the other, or they do not go together.

A condition is `KEY` (set, and neither false nor 0), `KEY=VALUE`, `KEY!=VALUE` or `KEY>NUMBER`.
"""

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from opensora_cli.core.section import Section, shown

_CONDITION = re.compile(r"(?P<key>[\w.]+)((?P<sign>!=|=|>)(?P<value>.+))?")


class Pair(NamedTuple):
    """Rule between two conditions."""

    first: str
    second: str
    fix: str
    only: str = ""
    """Condition of the rule. Empty means always."""


def pair_problems(settings: Section, *, needs: Iterable[Pair] = (), conflicts: Iterable[Pair] = ()) -> Iterator[str]:
    """Yield one line for each broken rule."""
    for pair in needs:
        first, named = _find(settings, pair.first)
        if first and _holds(settings, pair.only) and not _holds(settings, pair.second):
            yield f"{named} needs {pair.second}: {pair.fix}"
    for pair in conflicts:
        (first, named), (second, other) = _find(settings, pair.first), _find(settings, pair.second)
        if first and second and _holds(settings, pair.only):
            yield f"{named} does not go with {other}: {pair.fix}"


def _holds(settings: Section, condition: str) -> bool:
    return not condition or _find(settings, condition)[0]


def _find(settings: Section, condition: str) -> tuple[bool, str]:
    """Return whether a condition holds, and its setting as `KEY=VALUE`."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None
    found, sign, value = attrgetter(match["key"])(settings), match["sign"], match["value"]
    if sign is None:
        holds = bool(found)
    elif sign == ">":
        holds = found is not None and found > int(value)
    else:
        holds = (shown(found) == value) == (sign == "=")
    return holds, f"{match['key']}={shown(found)}"
