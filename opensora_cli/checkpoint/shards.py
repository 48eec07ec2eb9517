"""Checkpoints in several files, with an index from tensors to files.

The index is the one of transformers: `weight_map`, tensor to file name, and `metadata`. It serves safetensors and torch
shards alike, so callers pass the functions that open or write one shard. A folder without an index is no checkpoint,
so the index is written last.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.readable import reading_file
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.formatting import first_few
from opensora_cli.core.reading import stays_inside
from opensora_cli.core.strict_json import MAX_JSON_BYTES, as_unicode, parse_object, shown

SHARD_BYTES = 4096 * 2**20
"""Default size of shards, also in ColossalAI."""

OpenShard = Callable[[Path], tuple[dict[str, LazyTensor], dict[str, str]]]
"""Opens one shard: path -> (tensors, metadata)."""

WriteShard = Callable[..., None]
"""Writes one shard: (path, tensors, *, metadata, advance)."""

_LISTED = 100
_TOTAL_SIZE, _SHA256 = "total_size", "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The content of an index file.

    Args:
        path: the index file; its shards lie in the same folder.
        weight_map: the name of each tensor's shard.
        metadata: other values of the index that are text.
        total_size: bytes of all tensors, if given.
        sha256: hexadecimal SHA-256 of the shards that have one; None means that the index holds another value here.
    """

    path: Path
    weight_map: Mapping[str, str]
    metadata: Mapping[str, str]
    total_size: int | None
    sha256: Mapping[str, str] | None

    @property
    def shard_names(self) -> list[str]:
        """The names of the shards, each once, in order."""
        return sorted(set(self.weight_map.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardForm:
    """Names and writer of the shards of one format."""

    stem: str
    suffix: str
    write: WriteShard

    @property
    def index_name(self) -> str:
        """The name of the index file."""
        return f"{self.stem}{self.suffix}.index.json"

    def shard_name(self, number: int, count: int) -> str:
        """Return the name of shard `number`, counted from 1, of `count`."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"


SAFETENSORS_FORM = ShardForm(stem="model", suffix=".safetensors", write=write_safetensors)


def read_index(path: Path) -> ShardIndex:
    """Read an index file, without looking at its shards.

    Raises:
        CheckpointError: the file is missing, or is no index.
    """
    refuse_outside(path, path.parent)
    with reading_file(path):
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is no index of shards: it is too long")
        content = path.read_bytes()
    try:
        document = parse_object(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is no index of shards: {error}") from None
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    if not _is_text_by_text(weight_map) or not isinstance(metadata, dict):
        raise CheckpointError(f"{path} is no index of shards: it has no weight_map of tensor to file name")
    total_size, sha256 = metadata.get(_TOTAL_SIZE), metadata.get(_SHA256)
    return ShardIndex(
        path=path,
        weight_map=weight_map,
        metadata={key: value for key, value in metadata.items() if isinstance(value, str)},
        total_size=total_size if type(total_size) is int else None,
        sha256={} if _SHA256 not in metadata else sha256 if _is_text_by_text(sha256) and sha256 else None,
    )


def open_shards(path: Path, *, open_shard: OpenShard) -> tuple[dict[str, LazyTensor], dict[str, str], tuple[Path, ...]]:
    """Open all shards of an index, and return their tensors, all metadata, and all files, the index first.

    Raises:
        CheckpointError: the index names files that are missing (all are listed) or lie outside its folder, or it does
            not agree with the content of the shards.
    """
    index = read_index(path)
    shards = shard_paths(index)
    listed: dict[str, set[str]] = {name: set() for name in shards}
    for key, name in index.weight_map.items():
        listed[name].add(key)
    entries: dict[str, LazyTensor] = {}
    metadata: dict[str, str] = {}
    for name, shard in shards.items():
        found, shard_metadata = open_shard(shard)
        _check_shard(shard, found.keys(), listed[name], index_name=path.name)
        entries.update(found)
        metadata.update(shard_metadata)
    return entries, {**metadata, **index.metadata}, (path, *shards.values())


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


def refuse_outside(path: Path, folder: Path) -> Path:
    """Return `path` if it lies in `folder` after all links are followed.

    The files of a snapshot in the Hugging Face cache are links to the blobs beside it; these are allowed.

    Raises:
        CheckpointError: the path lies elsewhere.
    """
    real, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(real_folder) or real.parent == _blobs_of(real_folder):
        return path
    raise CheckpointError(f"{path} is a link out of its folder", hint="put the file itself there")


def plan_shards(entries: Mapping[str, LazyTensor], shard_bytes: int) -> list[dict[str, LazyTensor]]:
    """Distribute tensors over shards, in their order. There is at least one shard, and no shard is larger than
    `shard_bytes` unless a single tensor is.
    """
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.nbytes
    return shards


def write_shards(
    folder: Path,
    entries: Mapping[str, LazyTensor],
    *,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str],
    form: ShardForm = SAFETENSORS_FORM,
    hash_each: Callable[[Sequence[Path]], Sequence[str]] | None = None,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write shards and then their index into a folder, straight to their names.

    Args:
        folder: an existing folder.
        entries, shard_bytes: the arguments of `plan_shards`.
        metadata: stored in the index and in each shard.
        form: the names and the writer of the shards.
        hash_each: returns the SHA-256 of each given file, for the index; None means an index without hashes.
        advance: called with the bytes written by each step.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, OutputError: the folder cannot be written.
    """
    shards = name_shards(entries, shard_bytes=shard_bytes, form=form)
    for name, shard in shards.items():
        form.write(folder / name, shard, metadata=metadata, advance=advance)
    hashes: dict[str, str] = {}
    if hash_each is not None:
        hashes = dict(zip(shards, hash_each([folder / name for name in shards]), strict=True))
    write_json_atomic(folder / form.index_name, make_index(shards, metadata=metadata, sha256=hashes))


def name_shards(
    entries: Mapping[str, LazyTensor], *, shard_bytes: int = SHARD_BYTES, form: ShardForm = SAFETENSORS_FORM
) -> dict[str, dict[str, LazyTensor]]:
    """Return the tensors of each shard that `plan_shards` makes, by the name of its file."""
    shards = plan_shards(entries, shard_bytes)
    return {form.shard_name(number, len(shards)): shard for number, shard in enumerate(shards, start=1)}


def make_index(
    shards: Mapping[str, Mapping[str, LazyTensor]], *, metadata: Mapping[str, str], sha256: Mapping[str, str]
) -> dict[str, object]:
    """Return the index: the shard of each tensor, the metadata, and the SHA-256 of the shards unless it is empty."""
    kept: dict[str, object] = {as_unicode(key): as_unicode(text) for key, text in metadata.items()}
    kept[_TOTAL_SIZE] = sum(entry.nbytes for shard in shards.values() for entry in shard.values())
    if sha256:
        kept[_SHA256] = dict(sha256)
    return {"metadata": kept, "weight_map": {key: name for name, shard in shards.items() for key in shard}}


def sha256_of(path: Path, *, advance: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal digits.

    Raises:
        CheckpointError: the file cannot be read, or is no regular file.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    with reading_file(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def _is_text_by_text(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _refuse_unsafe_name(index: Path, name: str) -> None:
    """Refuse a shard's name that points elsewhere by itself, on any system."""
    if not stays_inside(name):
        raise CheckpointError(f"{index} names a shard outside its folder: {shown(name)}", hint="don't trust its source")


def _blobs_of(folder: Path) -> Path | None:
    """Return the blobs folder of the Hugging Face cache, if `folder` is a snapshot or part of one."""
    for each in (folder, *folder.parents):
        if each.parent.name == "snapshots":
            return each.parent.parent / "blobs"
    return None


def _check_shard(shard: Path, found: Set[str], listed: Set[str], *, index_name: str) -> None:
    if lacking := sorted(listed - found):
        raise CheckpointError(f"{shard} lacks tensors that {index_name} has in it: {first_few(lacking)}")
    if strange := sorted(found - listed):
        raise CheckpointError(f"{shard} has tensors that {index_name} has not in it: {first_few(strange)}")
