"""Search for the weights in the nested dictionaries that a training saved, which hold more than weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from opensora_cli.checkpoint.contents import choose
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.strict_json import shown
from opensora_cli.core.weight_choices import Selection

LeafT = TypeVar("LeafT")

_KEYS = {
    Selection.MODEL: ("model", "state_dict", "module", "model_state_dict", "generator"),
    Selection.EMA: ("ema", "ema_state_dict", "model_ema", "generator_ema"),
    Selection.MASTER: ("master",),
}
"""Usual names of the weights in a dictionary that holds more than them."""

_NAMELESS = "shadow_params"
"""Name of an average's list of tensors in diffusers."""
_MAX_DEPTH = 32
_MAX_TOTAL_NAME_LENGTH = 2**26


def find_weights(
    tree: Any, leaf: type[LeafT], *, path: Path, select: Selection | None
) -> tuple[dict[str, LeafT], Selection | None, tuple[Selection, ...]]:
    """Return the selected weights, or the model's, in a state dict, or in dictionaries around one or several.

    The result is the weights by name, where names of nested dictionaries are joined with dots; the selection; and all
    selections.

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
    if isinstance(chosen, dict) and isinstance(dict.get(chosen, _NAMELESS), list | tuple):
        raise CheckpointError(
            f"{path}: its {selection} weights are a list ({_NAMELESS}) without names",
            hint="save them from the program that made them: ema.copy_to(model.parameters()), then model.state_dict()",
        )
    leaves: dict[str, LeafT] = {}
    for name, found in find_leaves(chosen, leaf, path):
        if name in leaves:
            raise CheckpointError(f"{path} has two tensors called {shown(name)}")
        leaves[name] = found
    if not leaves and chosen != {}:
        raise CheckpointError(f"{path} holds no tensors")
    return leaves, selection, selections


# A file can replace the methods of a dictionary by attributes, so methods are taken from the class.


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


def find_scalars(tree: Any) -> dict[str, str]:
    """Return the plain values of `tree` beside its dictionaries."""
    if not isinstance(tree, dict):
        return {}
    return {
        key: str(value)
        for key, value in dict.items(tree)
        if isinstance(key, str) and isinstance(value, str | int | float | bool)
    }


def find_leaves(tree: Any, leaf: type[LeafT], path: Path) -> Iterator[tuple[str, LeafT]]:
    """Return all tensors in `tree` with their names, in bounded time even for cycles and shared references.

    Raises:
        CheckpointError: a tensor has no name, or there are too many.
    """
    left = _MAX_TOTAL_NAME_LENGTH

    def leaves(name: str, node: Any, depth: int) -> Iterator[tuple[str, LeafT]]:
        nonlocal left
        left -= len(name) + 1
        if left < 0 or depth >= _MAX_DEPTH:
            raise CheckpointError(f"{path} nests its tensors too deep, or has too many")
        if isinstance(node, leaf):
            if not name:
                raise CheckpointError(f"{path} holds a tensor without a name, not a state dict")
            yield name, node
        elif isinstance(node, dict | list | tuple):
            for key, value in dict.items(node) if isinstance(node, dict) else enumerate(node):
                yield from leaves(f"{name}.{key}" if name else str(key), value, depth + 1)

    return leaves("", tree, 0)
