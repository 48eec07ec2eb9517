"""Encoded clips on disk, so that training neither decodes nor encodes them, nor holds the frozen models in memory.

A cache is a folder: `cache.safetensors` records what made it and has the empty prompt's embeddings; every
`clips-*.safetensors` has up to some hundred megabytes of tensors, each named after its clip's frames, size, rate and
caption, and what it is of the clip. Files appear whole and are never changed. So a cache that was interrupted goes on
where it stopped, another condition mode adds its references, and several processes may fill it side by side. A clip
whose file was replaced is added again, and the newest file that has it counts.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.stream import Entry, HeldEntry
from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.core.files import atomic_path
from opensora_cli.core.reading import require_file
from opensora_cli.data.batches import ClipRequest
from opensora_cli.engine.encode.encoding import POOLED_PROMPT_EMBEDS, PROMPT_EMBEDS, CachedClip, EmptyPrompt

Identity = Mapping[str, str]
"""What made a cache, each with its digest or value: the models, and the settings that change what they make."""

FileState = tuple[int, int]
"""Size in bytes of a clip's file, and when it was changed, in nanoseconds."""

HEADER_FILE = "cache.safetensors"
_SHARD_PATTERN = "clips-*.safetensors"
_SHARD_BYTES = 256 * 2**20
# Keys in the metadata of the files.
_IDENTITY = "osora.identity"
_CLIPS = "osora.clips"
_THREADS = "osora.threads"
_MOST_THREADS = 1024  # as settings allow


class ClipCache:
    """A cache that is read (see `is_cache_of`). It may be handed to other processes.

    A broken file of it is a CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # clip -> what of it -> where.
        self._clips: dict[str, dict[str, Path]] = {}
        self._files: dict[str, FileState] = {}
        for path in sorted(folder.glob(_SHARD_PATTERN), key=lambda shard: shard.stat().st_mtime_ns):
            try:
                for key, about in _metadata(path, _CLIPS).items():
                    # Caches of earlier versions have the names alone.
                    names, file = (about, None) if isinstance(about, list) else (about["names"], about["file"])
                    self._add(key, dict.fromkeys(names, path), None if file is None else tuple(file))
            except (TypeError, LookupError) as error:
                raise _broken(path, f"its {_CLIPS} are no list of clips") from error
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return len(self._clips)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # open files stay in their process

    def names(self, request: ClipRequest, *, file: FileState | None = None) -> Set[str]:
        """Return the names of the tensors that there are of a clip; none where the cache does not have it.

        `file` is the clip's file as it is now, from which they must have been made; None: from any version of it.
        """
        key = key_of(request)
        is_other = file is not None and self._files.get(key, file) != file
        return set() if is_other else self._clips.get(key, {}).keys()

    def clip(self, request: ClipRequest) -> CachedClip:
        """Return a clip, on the host; a FileProblem if it is not cached, a CheckpointError if its file is broken."""
        key = key_of(request)
        if key not in self._clips:
            raise FileProblem(f"{self._folder} lacks {request.path}", hint="run `osora data cache` again")
        tensors = {}
        for name, path in self._clips[key].items():
            if path not in self._open:
                self._open[path] = _opened(path)
            tensors[name] = _tensor(self._open[path], path, f"{key}.{name}")
        return CachedClip(tensors)

    def empty_prompt(self) -> EmptyPrompt:
        """Return the embeddings of the empty prompt; a CheckpointError if they are missing."""
        path = self._folder / HEADER_FILE
        file = _opened(path)
        return EmptyPrompt(_tensor(file, path, PROMPT_EMBEDS), _tensor(file, path, POOLED_PROMPT_EMBEDS))

    def _add(self, key: str, places: Mapping[str, Path], file: FileState | None) -> None:
        if file is not None and self._files.setdefault(key, file) != file:
            self._files[key] = file
            del self._clips[key]
        self._clips.setdefault(key, {}).update(places)


class CacheWriter:
    """Adds clips to a cache that has its header, in files of about `shard_bytes`.

    Nothing is added once another run has replaced the header, as it may while there are no clips: a FileProblem.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._identity = _identity_of(folder)
        self._waiting: dict[str, tuple[Mapping[str, Tensor], FileState | None]] = {}
        self._bytes = 0

    def add(self, request: ClipRequest, tensors: Mapping[str, Tensor], *, file: FileState | None = None) -> None:
        """Keep what is new of a clip, and write a file when there is enough for one (OutputError).

        `file` is the clip's file as it was before it was read; None: it has none.
        """
        self._waiting[key_of(request)] = tensors, file
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last file; an OutputError if that fails."""
        if not self._waiting:
            return
        if _identity_of(self._folder) != self._identity:
            raise FileProblem(
                f"another run has begun its own cache in {self._folder}", hint="name another folder for one of the two"
            )
        clips = {key: {"names": [*clip], "file": file} for key, (clip, file) in self._waiting.items()}
        tensors = {f"{key}.{name}": tensor for key, (clip, _) in self._waiting.items() for name, tensor in clip.items()}
        content = json.dumps(clips)
        # Named after what it holds: no two processes write the same file, unless with the same content.
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        with atomic_path(self._folder / _SHARD_PATTERN.replace("*", digest)) as temporary:
            write_safetensors(temporary, _entries(tensors), metadata={_CLIPS: content})
        self._waiting, self._bytes = {}, 0


def key_of(request: ClipRequest) -> str:
    """Return the name that a clip has in a cache: a digest of its frames, size, rate and caption."""
    return hashlib.sha256(json.dumps(asdict(request), sort_keys=True).encode()).hexdigest()[:32]


def file_state(path: str) -> FileState | None:
    """Return how a clip's file is now; None: it is not there, or the clip is a procedural scene, which has none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def write_header(folder: Path, identity: Identity, empty_prompt: EmptyPrompt) -> None:
    """Begin a cache; an OutputError if it cannot be written."""
    tensors = {
        PROMPT_EMBEDS: empty_prompt.prompt_embeds_LC,
        POOLED_PROMPT_EMBEDS: empty_prompt.pooled_prompt_embeds_V,
    }
    with atomic_path(folder / HEADER_FILE) as temporary:
        metadata = {
            _IDENTITY: json.dumps(dict(identity), sort_keys=True),
            _THREADS: json.dumps({"count": torch.get_num_threads()}),
        }
        write_safetensors(temporary, _entries(tensors), metadata=metadata)


def threads_of(folder: Path) -> int | None:
    """Return how many threads a cache was begun with, on which the rounding of sums depends; None: not known.

    A CheckpointError if its first file is broken.
    """
    path = folder / HEADER_FILE
    if not path.exists() or _THREADS not in (_opened(path).metadata() or {}):
        return None
    count = _metadata(path, _THREADS).get("count")
    return count if isinstance(count, int) and 0 < count <= _MOST_THREADS else None


def is_cache_of(folder: Path, identity: Identity) -> bool:
    """Return whether there is a cache in `folder`, made with `identity`; one without clips belongs to nobody.

    A FileProblem if something else made it, a CheckpointError if its first file is broken.
    """
    found = _identity_of(folder)
    if found is None or (found != identity and not any(folder.glob(_SHARD_PATTERN))):
        return False
    _refuse_other(folder, {name for name in {*found, *identity} if found.get(name) != identity.get(name)})
    return True


def require_same_settings(folder: Path, settings: Identity) -> None:
    """Refuse a cache with clips that was made with other settings, before files are hashed for the rest of its
    identity. Raises as `is_cache_of`.
    """
    found = _identity_of(folder)
    if found is not None and any(folder.glob(_SHARD_PATTERN)):
        _refuse_other(folder, {name for name, value in settings.items() if found.get(name) != value})


def _identity_of(folder: Path) -> Identity | None:
    path = folder / HEADER_FILE
    return _metadata(path, _IDENTITY) if path.exists() else None


def _refuse_other(folder: Path, differing: Set[str]) -> None:
    if differing:
        raise FileProblem(
            f"{folder} was made for another run, which differs in: {', '.join(sorted(differing))}",
            hint="name another folder, --set train_mmdit.cache=FOLDER, or delete this one",
        )


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    return {name: HeldEntry(tensor) for name, tensor in tensors.items()}


def _metadata(path: Path, key: str) -> dict[str, Any]:
    try:
        found: object = json.loads((_opened(path).metadata() or {})[key])
    except (KeyError, ValueError, RecursionError) as error:
        raise _broken(path, f"it has no {key}") from error
    if not isinstance(found, dict):
        raise _broken(path, f"its {key} are no object")
    return found


def _opened(path: Path) -> Any:
    require_file(path, problem=CheckpointError)  # the library would wait for a pipe
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise _broken(path, str(error)) from error


def _tensor(file: Any, path: Path, name: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise _broken(path, str(error)) from error
    return tensor


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is broken: {reason}", hint="delete it; `osora data cache` then makes what is missing"
    )
