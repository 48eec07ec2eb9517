"""Changes to a checkpoint before it is read: other names, fewer tensors, another dtype.

Each function takes tensors by name and returns tensors by name, in the same order.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from opensora_cli.checkpoint.lazy import LazyTensor, rounded
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import plain

_REGEX = "re:"


def rename(entries: Mapping[str, LazyTensor], rules: Sequence[str]) -> dict[str, LazyTensor]:
    """Give tensors other names.

    Args:
        entries: the tensors.
        rules: applied in order. `OLD=NEW` replaces the start of names that begin with OLD. An empty NEW removes a
            prefix; an empty OLD adds one to every name. `re:PATTERN=NEW` replaces all matches of a regular expression
            in a name; NEW may refer to its groups (`\\1`, `\\g<name>`). The last `=` separates the two sides.

    Raises:
        RequestError: a rule is malformed, matches nothing, or gives two tensors one name or a tensor an empty name.
    """
    for rule in rules:
        substitute = _substitution(rule)
        changed = {name: substitute(name) for name in entries}
        if all(new is None for new in changed.values()):
            raise RequestError(f"rename={rule!r} matches no tensor{_such_as(entries)}")
        sources: dict[str, str] = {}
        for name, new in changed.items():
            new_name = name if new is None else new
            if not new_name:
                raise RequestError(f"rename={rule!r} leaves nothing of the name {plain(name)}")
            if new_name in sources:
                both = f"{plain(sources[new_name])} and {plain(name)}"
                raise RequestError(f"rename={rule!r} gives {both} the same name: {plain(new_name)}")
            sources[new_name] = name
        entries = {new_name: entries[name] for new_name, name in sources.items()}
    return dict(entries)


def _substitution(rule: str) -> Callable[[str], str | None]:
    """Return a function from a name to the new name, or to None if the rule does not apply."""
    old, equals, new = rule.rpartition("=")
    if not equals:
        raise RequestError(f"rename={rule!r} must be OLD=NEW or {_REGEX}PATTERN=NEW")
    if not old.startswith(_REGEX):
        return lambda name: new + name[len(old) :] if name.startswith(old) else None
    try:
        pattern = re.compile(old[len(_REGEX) :])
    except re.error as error:
        raise RequestError(f"rename={rule!r} is no regular expression: {error}") from error

    def substitute(name: str) -> str | None:
        try:
            new_name, count = pattern.subn(new, name)
        except (re.error, IndexError) as error:
            raise RequestError(f"rename={rule!r} cannot be filled in: {error}") from error
        return new_name if count else None

    return substitute


def only(entries: Mapping[str, LazyTensor], patterns: Sequence[str]) -> dict[str, LazyTensor]:
    """Keep the tensors whose names match one of the shell-style `patterns`, such as `double_blocks.*.bias`.

    Raises RequestError if a pattern matches nothing.
    """
    matched = _matched(entries, patterns, option="only")
    return {name: entry for name, entry in entries.items() if name in matched}


def drop(entries: Mapping[str, LazyTensor], patterns: Sequence[str]) -> dict[str, LazyTensor]:
    """Drop the tensors whose names match a pattern; see `only`."""
    matched = _matched(entries, patterns, option="drop")
    return {name: entry for name, entry in entries.items() if name not in matched}


def _matched(entries: Mapping[str, LazyTensor], patterns: Sequence[str], *, option: str) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name in entries if fnmatchcase(name, pattern)}
        if not found:
            raise RequestError(f"{option}={pattern!r} matches no tensor{_such_as(entries)}")
        matched |= found
    return matched


def _such_as(entries: Mapping[str, LazyTensor]) -> str:
    return f"; there is, for example, {plain(next(iter(entries)))}" if entries else "; there are none"


def cast(entries: Mapping[str, LazyTensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Cast all floating point tensors to another dtype, rounded as torch does; integers and booleans keep theirs.

    Reading raises the CheckpointError of `rounded`. 8-bit tensors must have been multiplied by their scales before; see
    `fp8.dequantize`.
    """
    return {
        name: _cast(name, entry, dtype) if entry.dtype.is_floating_point and entry.dtype != dtype else entry
        for name, entry in entries.items()
    }


def _cast(name: str, entry: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(entry.shape, dtype, lambda: rounded(entry.read(), dtype, name=name))
