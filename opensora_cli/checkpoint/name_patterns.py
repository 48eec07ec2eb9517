"""Values for modules by patterns of their names, as PEFT keeps ranks and alphas.

PEFT takes each key for a regular expression of a module's whole name, or of the end of it after a dot; the first that
matches counts. Most keys are plain names, whose dots are dots here. An adapter may come from anybody, and Python can
take years over a regular expression: so only simple ones are understood, and they are matched in bounded time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from opensora_cli.checkpoint.strict_json import shown

_ATOM = r"(?:\\[.dw_-]|\[[\w-]+\]|[\w.-])"
_TOKEN = re.compile(rf"\((?:\?:)?(?P<choices>(?:\\?[\w.-]|\|)*)\)|(?P<atom>{_ATOM})(?P<repeat>[*+?]?)")
_PLAIN = re.compile(r"\^?(?:\\\.|[\w.-])+")
_LITERAL = re.compile(r"\\?[\w.-]")
_MAX_LENGTH = 200
_MAX_REGULAR = 100
_MAX_CHOICES = 100
_MAX_WORK = 10**8


@dataclass(frozen=True, slots=True)
class _Atom:
    """What one character of a name has to be, and how often."""

    accepts: re.Pattern[str]
    may_repeat: bool
    may_lack: bool


class NamePattern:
    """A regular expression of names: characters, classes of them, `*`, `+` and `?` behind one, `(a|b)` of plain names.

    Args:
        text: the expression.

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise ValueError("it is too long")
        self._whole = text.startswith("^")
        body = text.removeprefix("^").removesuffix("$")
        if "|" in text and "(" not in text and body == text:
            body = f"({text})"
        parts: list[list[list[_Atom]]] = []
        place = 0
        while place < len(body):
            token = _TOKEN.match(body, place)
            if token is None:
                raise ValueError("only names, classes of characters, repeats of one and (a|b) are understood")
            parts.append(_choices(token))
            place = token.end()
        count = 1
        for part in parts:
            count *= len(part)
            if count > _MAX_CHOICES:
                raise ValueError("it has too many choices")
        self._sequences = [[atom for run in runs for atom in run] for runs in product(*parts)]

    def matches(self, name: str) -> bool:
        """Return whether it is of the whole name, or of the end of it after a dot."""
        return any(_is_matched(sequence, name, whole=self._whole) for sequence in self._sequences)


class ValuesByName:
    """Values by patterns of names; of those that match a name, the first counts.

    Args:
        values: by pattern.

    Raises:
        ValueError: a pattern is not understood, or there are too many; says which and why.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._plain: dict[str, tuple[int, float]] = {}
        self._regular: list[tuple[int, float, NamePattern]] = []
        self._length = 0
        for number, (text, value) in enumerate(values.items()):
            key = text.removesuffix("$")
            if _PLAIN.fullmatch(key):
                self._plain.setdefault(key.replace("\\.", "."), (number, value))
                continue
            try:
                self._regular.append((number, value, NamePattern(text)))
            except ValueError as error:
                raise ValueError(f"the pattern {shown(text)} is refused: {error}") from None
            self._length += len(text)
            if len(self._regular) > _MAX_REGULAR:
                raise ValueError(f"there are more than {_MAX_REGULAR} regular expressions")

    def check(self, names: Iterable[str]) -> None:
        """Check that values of so many names are found in no time.

        Raises:
            ValueError: they are not.
        """
        if self._length * sum(map(len, names)) > _MAX_WORK:
            raise ValueError("there are too many regular expressions for so many modules")

    def get(self, name: str, default: float) -> float:
        """Return the value for a name."""
        found = [self._plain[key] for key in (f"^{name}", *_ends(name)) if key in self._plain]
        found += [(number, value) for number, value, pattern in self._regular if pattern.matches(name)]
        return min(found)[1] if found else default


def _choices(token: re.Match[str]) -> list[list[_Atom]]:
    if token["atom"] is None:
        return [[_atom(literal) for literal in _LITERAL.findall(choice)] for choice in token["choices"].split("|")]
    return [[_atom(token["atom"], token["repeat"])]]


def _atom(text: str, repeat: str = "") -> _Atom:
    try:
        return _Atom(re.compile(text), repeat in ("*", "+"), repeat in ("*", "?"))
    except re.error as error:
        raise ValueError(str(error)) from None


def _is_matched(atoms: list[_Atom], name: str, *, whole: bool) -> bool:
    """Return whether `atoms` are what `name`, or its end after a dot, consists of.

    All ways to match are followed side by side, so that the time is at most that of both lengths multiplied.
    """
    places: set[int] = set()
    for index, character in enumerate(name):
        if index == 0 or (not whole and name[index - 1] == "."):
            places.add(0)
        moved = set()
        for place in _with_lacking(atoms, places):
            if place < len(atoms) and atoms[place].accepts.match(character):
                moved |= {place, place + 1} if atoms[place].may_repeat else {place + 1}
        places = moved
    return len(atoms) in _with_lacking(atoms, places)


def _with_lacking(atoms: list[_Atom], places: set[int]) -> set[int]:
    """Return `places`, and those behind them that are reached without a character."""
    reached = set(places)
    for place in places:
        while place < len(atoms) and atoms[place].may_lack:
            place += 1
            reached.add(place)
    return reached


def _ends(name: str) -> Iterable[str]:
    """Yield the name, and what of it is behind each dot."""
    while name:
        yield name
        name = name.partition(".")[2]
