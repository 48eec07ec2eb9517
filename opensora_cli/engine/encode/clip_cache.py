"""Cache of encoded clips on disk: training with it neither decodes nor encodes, and needs no frozen models.

A cache is a folder. `cache.safetensors` has its identity and the embeddings of the empty prompt. Each
`clips-*.safetensors` has about 256 MiB of tensors, named by clip and part. Files appear whole and never change. So an
interrupted cache is continued, another condition mode adds only its references, and several processes can fill one.
A clip whose file was replaced is added again, and the newest file that has the clip counts.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.core.reading import require_file
from opensora_cli.data.batches import ClipRequest
from opensora_cli.engine.encode.clips import POOLED_PROMPT_EMBEDS, PROMPT_EMBEDS, CachedClip, EmptyPrompt

Identity = Mapping[str, str]
"""Digests of the models that made a cache, and values of the settings that change its tensors, by name."""

FileState = tuple[int, int]
"""Size of the file of a clip in bytes, and its modification time in nanoseconds."""

HEADER_FILE = "cache.safetensors"
_SHARD_PATTERN = "clips-*.safetensors"
_SHARD_BYTES = 256 * 2**20
# Keys in the metadata of the files.
_IDENTITY = "osora.identity"
_CLIPS = "osora.clips"


def write_header(folder: Path, identity: Identity, empty_prompt: EmptyPrompt) -> None:
    """Begin a cache; raises OutputError if it cannot be written."""
    tensors = {
        PROMPT_EMBEDS: empty_prompt.prompt_embeds_LC,
        POOLED_PROMPT_EMBEDS: empty_prompt.pooled_prompt_embeds_V,
    }
    metadata = {_IDENTITY: json.dumps(dict(identity), sort_keys=True)}
    write_weights(folder / HEADER_FILE, tensors, metadata=metadata)


def is_cache_of(folder: Path, identity: Identity, *, complete: bool = True) -> bool:
    """Return whether a folder has a cache with this identity, or with these entries if `identity` is not `complete`.

    Raises FileProblem if a cache with clips has another identity; one without clips can be replaced.
    """
    found = _identity_of(folder)
    if found is None:
        return False
    names = {*found, *identity} if complete else {*identity}
    differing = {name for name in names if found.get(name) != identity.get(name)}
    if differing and any(folder.glob(_SHARD_PATTERN)):
        raise FileProblem(
            f"{folder} was made for another run, which differs in: {', '.join(sorted(differing))}",
            hint="name another folder, --set train_mmdit.cache=FOLDER, or delete this one",
        )
    return not differing


def _identity_of(folder: Path) -> Identity | None:
    path = folder / HEADER_FILE
    return _metadata(path, _IDENTITY) if path.exists() else None


def key_of(request: ClipRequest) -> str:
    """Return the key of a clip in a cache: a hash of its path, frames, size, rate and caption."""
    return hashlib.sha256(json.dumps(asdict(request), sort_keys=True).encode()).hexdigest()[:32]


def file_state(path: str) -> FileState | None:
    """Return the state of the file of a clip, or None if there is no file, as for clips of a program."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


class ClipCache:
    """Reader of a cache (see `is_cache_of`); it can be sent to other processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Clip -> name of a tensor -> file.
        self._clips: dict[str, dict[str, Path]] = {}
        self._states: dict[str, FileState] = {}
        self._open: dict[Path, Any] = {}
        for path in sorted(folder.glob(_SHARD_PATTERN), key=lambda shard: shard.lstat().st_mtime_ns):
            with _reading(path):
                for key, about in _metadata(path, _CLIPS).items():
                    state = about["file"] and tuple(about["file"])
                    if state and self._states.setdefault(key, state) != state:
                        self._states[key] = state
                        del self._clips[key]
                    self._clips.setdefault(key, {}).update(dict.fromkeys(about["names"], path))

    def __len__(self) -> int:
        return len(self._clips)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # open files stay in their process

    def names(self, request: ClipRequest, *, file: FileState | None = None) -> Set[str]:
        """Return the names of the tensors of a clip; an empty set if it is not cached.

        `file` is the present state of the clip's file; the tensors must come from this state. None accepts any state.
        """
        key = key_of(request)
        is_other = file is not None and self._states.get(key, file) != file
        return set() if is_other else self._clips.get(key, {}).keys()

    def clip(self, request: ClipRequest) -> CachedClip:
        """Return a clip on the host; raises FileProblem if it is not cached."""
        key = key_of(request)
        if key not in self._clips:
            raise FileProblem(f"{self._folder} lacks {request.path}", hint="run `osora data cache` again")
        tensors = {}
        for name, path in self._clips[key].items():
            with _reading(path):
                if path not in self._open:
                    self._open[path] = safe_open(path, framework="pt")
                tensors[name] = self._open[path].get_tensor(f"{key}.{name}")
        return CachedClip(tensors)

    def empty_prompt(self) -> EmptyPrompt:
        """Return the embeddings of the empty prompt."""
        path = self._folder / HEADER_FILE
        with _reading(path), safe_open(path, framework="pt") as file:
            return EmptyPrompt(file.get_tensor(PROMPT_EMBEDS), file.get_tensor(POOLED_PROMPT_EMBEDS))


class CacheWriter:
    """Writer that adds clips to a cache with a header, in files of about `shard_bytes`.

    Another run can replace the header while there are no clips. From then on, nothing is added: raises FileProblem.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._identity = _identity_of(folder)
        self._waiting: dict[str, tuple[Mapping[str, Tensor], FileState | None]] = {}
        self._bytes = 0

    def add(self, request: ClipRequest, tensors: Mapping[str, Tensor], *, file: FileState | None = None) -> None:
        """Add new tensors of a clip; writes a file when there are enough, and raises OutputError if that fails.

        `file` is the state of its file before it was read, or None without a file.
        """
        self._waiting[key_of(request)] = tensors, file
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the clips that were added since the last file; raises OutputError if that fails."""
        if not self._waiting:
            return
        if _identity_of(self._folder) != self._identity:
            raise FileProblem(
                f"another run has begun its own cache in {self._folder}", hint="name another folder for one of the two"
            )
        clips = {key: {"names": [*clip], "file": file} for key, (clip, file) in self._waiting.items()}
        tensors = {f"{key}.{name}": tensor for key, (clip, _) in self._waiting.items() for name, tensor in clip.items()}
        content = json.dumps(clips)
        # Two processes write the same file only with the same content.
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        write_weights(self._folder / _SHARD_PATTERN.replace("*", digest), tensors, metadata={_CLIPS: content})
        self._waiting, self._bytes = {}, 0


def _metadata(path: Path, key: str) -> dict[str, Any]:
    with _reading(path), safe_open(path, framework="pt") as file:
        found: object = json.loads((file.metadata() or {})[key])
        if not isinstance(found, dict):
            raise ValueError(f"{key} is no object")
        return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    require_file(path, problem=CheckpointError)  # safetensors would wait for a pipe
    try:
        yield
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is broken: it cannot be read: {error}",
            hint="delete it; `osora data cache` then makes what is missing",
        ) from error
