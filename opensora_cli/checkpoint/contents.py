"""Record of an opened checkpoint, and the choice of one of the sets of weights that a training saved."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import shown

_SHARD_NAME = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(\..+)", re.ASCII)


def shard_of(name: str) -> tuple[str, int, int] | None:
    """Return index, number and count for a name such as `model-00001-of-00004.safetensors`; else None.

    Shards are counted from 1. A single shard is a whole checkpoint.
    """
    match = _SHARD_NAME.fullmatch(name)
    if match is None or int(match[3]) < 2:
        return None
    return f"{match[1]}{match[4]}.index.json", int(match[2]), int(match[3])


def choose(select: Selection | None, selections: Sequence[Selection], *, path: Path) -> Selection | None:
    """Return the selected weights, or the first ones; None if there is no choice.

    Raises:
        RequestError: the selected weights are missing.
    """
    if select is not None and select not in (selections or (Selection.MODEL,)):
        there = ", ".join(selections) or "only one set of weights"
        raise RequestError(f"{path} has no {select} weights: it has {there}", hint="choose with --select")
    return (select or selections[0]) if selections else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint; none of its tensors has been read."""

    format: Format
    path: Path
    """The opened file or folder."""
    selection: Selection | None = None
    """Selected set of weights; None if there is no choice."""
    selections: tuple[Selection, ...] = ()
    """Sets of weights to choose from; empty if there is no choice."""
    entries: Mapping[str, LazyTensor]
    """The tensors by name, in the file's order."""
    metadata: Mapping[str, str]
    """Text stored beside the tensors."""
    files: tuple[Path, ...]
    """Every file of `entries`, index files included."""
    sha256: Mapping[Path, str] = field(default_factory=dict)
    """Hashes of shards that their index has."""

    @property
    def form(self) -> str:
        """The format; for a single shard of several also its number, from its name."""
        return f"{self.format}, {self._shard}" if self._shard else self.format.value

    @property
    def caveat(self) -> str | None:
        """A warning that this is a single shard of several; None for a whole checkpoint."""
        return f"{self.path} is {self._shard}: a part of a checkpoint" if self._shard else None

    @property
    def _shard(self) -> str | None:
        shard = shard_of(self.path.name) if self.files == (self.path,) else None
        return shard and f"shard {shard[1]} of {shard[2]}"


LeafT = TypeVar("LeafT")

_KEYS = {
    Selection.MODEL: ("model", "state_dict", "module", "model_state_dict", "generator"),
    Selection.EMA: ("ema", "ema_state_dict", "model_ema", "generator_ema"),
    Selection.MASTER: ("master",),
}
"""Usual names of the weights in a dictionary that holds more than them."""

_MAX_DEPTH = 32
_MAX_TOTAL_NAME_LENGTH = 2**26


def find_weights(
    tree: Any, leaf: type[LeafT], *, path: Path, select: Selection | None
) -> tuple[dict[str, LeafT], Selection | None, tuple[Selection, ...]]:
    """Return the selected weights, or the model's, in a state dict, or in dictionaries around one or several.

    The result is the weights by name, where names of nested dictionaries are joined with dots; the selection; and all
    selections.

    A file can replace the methods of a dictionary by attributes, so methods are taken from the class.

    Raises:
        RequestError: the selected weights are missing.
        CheckpointError: there are no weights at all, two with the same name, or some without a name.
    """
    parts = _parts(tree, leaf)
    selections = () if parts.keys() <= {Selection.MODEL} else tuple(parts)
    selection = choose(select, selections, path=path)
    chosen = parts[selection or Selection.MODEL] if parts else tree
    for _ in range(_MAX_DEPTH):
        chosen = _parts(chosen, leaf).get(Selection.MODEL, chosen)
    leaves: dict[str, LeafT] = {}
    # The time is bounded even for cycles and shared references.
    left = _MAX_TOTAL_NAME_LENGTH

    def add(name: str, node: Any, depth: int) -> None:
        nonlocal left
        left -= len(name) + 1
        if left < 0 or depth >= _MAX_DEPTH:
            raise CheckpointError(f"{path} nests its tensors too deep, or has too many")
        if isinstance(node, leaf):
            if not name:
                raise CheckpointError(f"{path} holds a tensor without a name, not a state dict")
            if name in leaves:
                raise CheckpointError(f"{path} has two tensors called {shown(name)}")
            leaves[name] = node
        elif isinstance(node, dict | list | tuple):
            for key, value in dict.items(node) if isinstance(node, dict) else enumerate(node):
                add(f"{name}.{key}" if name else str(key), value, depth + 1)

    add("", chosen, 0)
    if not leaves and chosen != {}:
        raise CheckpointError(f"{path} holds no tensors")
    return leaves, selection, selections


def _parts(tree: Any, leaf: type[LeafT]) -> dict[Selection, dict[Any, Any]]:
    """Return the separate sets of weights in `tree`; an empty dictionary if `tree` is itself one set."""
    if not isinstance(tree, dict) or any(isinstance(value, leaf) for value in dict.values(tree)):
        return {}
    parts = {}
    for selection, keys in _KEYS.items():
        found = [tree[key] for key in keys if isinstance(dict.get(tree, key), dict)]
        if found:
            parts[selection] = found[0]
    return parts
