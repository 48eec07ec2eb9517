"""Reading checkpoints in several files, with an index from tensors to files.

The index is the one of transformers: `weight_map`, tensor to file name, and `metadata`. It serves safetensors and torch
shards alike, so callers pass the function that opens one shard.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.readable import refuse_outside
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.reading import read_json_object, stays_inside
from opensora_cli.core.strict_json import shown

OpenShard = Callable[[Path], tuple[dict[str, LazyTensor], dict[str, str]]]
"""Opens one shard: path -> (tensors, metadata)."""

_LISTED = 100
_SHA256 = "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The content of an index file.

    Args:
        path: the index file; its shards lie in the same folder.
        weight_map: the name of each tensor's shard.
        metadata: other values of the index that are text.
        sha256: hexadecimal SHA-256 of the shards that have one; None means that the index holds another value here.
    """

    path: Path
    weight_map: Mapping[str, str]
    metadata: Mapping[str, str]
    sha256: Mapping[str, str] | None

    @property
    def shard_names(self) -> list[str]:
        """The names of the shards, each once, in order."""
        return sorted(set(self.weight_map.values()))


def read_index(path: Path) -> ShardIndex:
    """Read an index file, without looking at its shards.

    Raises:
        CheckpointError: the file is missing, or is no index.
    """
    document = read_json_object(refuse_outside(path, path.parent), problem=CheckpointError)
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    if not _is_text_by_text(weight_map) or not isinstance(metadata, dict):
        raise CheckpointError(f"{path} is no index of shards: it has no weight_map of tensor to file name")
    sha256 = metadata.get(_SHA256)
    return ShardIndex(
        path=path,
        weight_map=weight_map,
        metadata={key: value for key, value in metadata.items() if isinstance(value, str)},
        sha256={} if _SHA256 not in metadata else sha256 if _is_text_by_text(sha256) and sha256 else None,
    )


def open_shards(
    index: ShardIndex, *, open_shard: OpenShard
) -> tuple[dict[str, LazyTensor], dict[str, str], tuple[Path, ...]]:
    """Open all shards of an index, and return their tensors, all metadata, and all files, the index first.

    Raises:
        CheckpointError: the index names files that are missing (all are listed) or lie outside its folder, or it does
            not agree with the content of the shards.
    """
    shards = shard_paths(index)
    listed: dict[str, set[str]] = {name: set() for name in shards}
    for key, name in index.weight_map.items():
        listed[name].add(key)
    entries: dict[str, LazyTensor] = {}
    metadata: dict[str, str] = {}
    for name, shard in shards.items():
        found, shard_metadata = open_shard(shard)
        _check_shard(shard, found.keys(), listed[name], index_name=index.path.name)
        entries.update(found)
        metadata.update(shard_metadata)
    return entries, {**metadata, **index.metadata}, (index.path, *shards.values())


def shard_paths(index: ShardIndex) -> dict[str, Path]:
    """Return the paths of the shards of an index, by name.

    Raises:
        CheckpointError: some are missing (all are listed), or one lies outside the folder of the index.
    """
    folder = index.path.parent
    for name in index.shard_names:
        _refuse_unsafe_name(index.path, name)
    paths = {name: folder / name for name in index.shard_names}
    try:
        missing = [name for name, path in paths.items() if not refuse_outside(path, folder).is_file()]
    except OSError as error:
        raise CheckpointError(f"{index.path} names a shard that cannot be read: {error.strerror or error}") from error
    if missing:
        listed = ", ".join(shown(name) for name in missing[:_LISTED]) + (", ..." if len(missing) > _LISTED else "")
        raise CheckpointError(
            f"{index.path} names {len(paths)} shards, of which {len(missing)} are missing: {listed}", hint="fetch them"
        )
    return paths


def _is_text_by_text(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _refuse_unsafe_name(index: Path, name: str) -> None:
    """Refuse a shard's name that points elsewhere by itself, on any system."""
    if not stays_inside(name):
        raise CheckpointError(f"{index} names a shard outside its folder: {shown(name)}", hint="don't trust its source")


def _check_shard(shard: Path, found: Set[str], listed: Set[str], *, index_name: str) -> None:
    if lacking := sorted(listed - found):
        raise CheckpointError(f"{shard} lacks tensors that {index_name} has in it: {first_few(lacking)}")
    if strange := sorted(found - listed):
        raise CheckpointError(f"{shard} has tensors that {index_name} has not in it: {first_few(strange)}")
