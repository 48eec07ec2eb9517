"""Error messages about settings: the setting, its value, the rule and the fix."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import ValidationError

from opensora_cli.core.formatting import as_unicode, plain

_LONGEST = 200
_SHORTENED = 0.85
"""Similarity of a name that lacks words of another one. A single wrong letter counts as more similar."""
_LEADING_KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*(?=[= ])")
_PLAIN = re.compile(r"[^\s'\"]+")
_RULES = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "must be a whole number"),
    "greater_than": "must be over {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be under {lt}",
    "less_than_equal": "must be at most {le}",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode text",
}
"""Rules by the kind of error. Other errors have pydantic's own words."""
_OF_KEYS = {
    "extra_forbidden": "is not a setting",
    "missing": "must be given",
    "model_type": "is a section: set one of its keys",
}
"""Rules whose messages show no value."""


@dataclass(frozen=True)
class Given:
    """Value from the user, usually text, and its source: `--steps`, `OSORA_SAMPLING__SEED` or `my.yaml`."""

    value: object
    source: str


def explain(error: ValidationError, given: Mapping[str, Given] | None = None) -> list[str]:
    """Return one line for each broken rule, with the source of the value where `given` has its key."""
    given, lines = given or {}, []
    for line in (line for details in error.errors(include_url=False) for line in _lines(details)):
        key = match.group() if (match := _LEADING_KEY.match(line)) else ""
        # An item of a list has the source of the list.
        while key and key not in given:
            key = key.rpartition(".")[0]
        lines.append(f"{line} (from {given[key].source})" if key else line)
    return lines


def either(choices: Sequence[str]) -> str:
    """Return choices as a phrase: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice most similar to `word`, or None if none is similar."""
    close = get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return close[0] if close else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known key most similar to `key`, or None if none is similar.

    The name counts more than the section, and missing words are allowed: `num_steps` finds
    `sampling.num_inference_steps`.
    """
    name = key.rpartition(".")[2]

    def likeness(candidate: str) -> tuple[float, float]:
        other = candidate.rpartition(".")[2]
        shortened = set(name.split("_")) <= set(other.split("_"))
        names = max(_SHORTENED if shortened else 0.0, SequenceMatcher(None, name, other).ratio())
        return names, SequenceMatcher(None, key, candidate).ratio()

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.6 else None


def _lines(details: Any) -> list[str]:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        # Validators of this package write whole lines.
        return str(context["error"]).splitlines()
    key = ".".join(part for part in details["loc"] if isinstance(part, str) and part != "[key]")
    if kind in _OF_KEYS:
        return [f"{key} {_OF_KEYS[kind]}"]
    if kind == "enum":
        choices = re.findall(r"'([^']*)'", context["expected"])
        close = nearest(str(details["input"]), choices)
        rule = f"must be one of {', '.join(choices)}" + (f": did you mean {close}?" if close else "")
    elif kind in _RULES:
        bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
        rule = _RULES[kind].format_map(bounds)
    else:
        rule = re.sub(r"^\w+ should(.*?)( after validation.*)?$", r"must\1", details["msg"])
    return [f"{key}={_shown(details['input'])} {rule}"]


def _shown(value: object) -> str:
    text = as_unicode(value if isinstance(value, str) else str(value))
    if len(text) > _LONGEST:
        return plain(text)
    return text if _PLAIN.fullmatch(text) else repr(value)
