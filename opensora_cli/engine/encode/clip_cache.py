"""Cache of encoded clips on disk: `osora data cache` and training fill it, and training with it needs no frozen models.

A cache is a folder. `cache.safetensors` has its identity and the embeddings of the empty prompt. Each
`clips-*.safetensors` has about 256 MiB of tensors, named by clip and part. Files appear whole and never change. So an
interrupted cache is continued, another condition mode adds only its references, and several processes can fill one.
A clip whose file was replaced is added again, and the newest file that has the clip counts.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opensora_cli.checkpoint.files import sha256_of
from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, CheckpointError, FileProblem, MediaError
from opensora_cli.core.limits import pick_threads, threads_used
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.core.reading import require_file
from opensora_cli.data.batches import ClipRequest, ClipSource
from opensora_cli.data.table import BrokenFile
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.encode.clips import (
    ALWAYS_CACHED,
    POOLED_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    CachedClip,
    EmptyPrompt,
    FreshClip,
    encode_for_cache,
    frozen_dtype,
    load_encoders,
    part_name,
)
from opensora_cli.engine.encode.datasets import open_table
from opensora_cli.engine.encode.inputs import require_cache_inputs, require_frozen_parts
from opensora_cli.sampling.conditioning import encoded_parts, fitting_modes
from opensora_cli.settings.train import TrainSettings

Identity = Mapping[str, str]
"""Digests of the models that made a cache, and values of the settings that change its tensors, by name."""

FileState = tuple[int, int]
"""Size of the file of a clip in bytes, and its modification time in nanoseconds."""

HEADER_FILE = "cache.safetensors"
_SHARD_PATTERN = "clips-*.safetensors"
_SHARD_BYTES = 256 * 2**20
_IDENTITY = "osora.identity"
_CLIPS = "osora.clips"
_ENCODER_FILES = frozenset({".json", ".safetensors", ".bin", ".model", ".txt"})
"""Endings of the files in the folder of a text encoder that change its embeddings."""


def write_header(folder: Path, identity: Identity, empty_prompt: EmptyPrompt) -> None:
    """Begin a cache; raises OutputError if it cannot be written."""
    tensors = {
        PROMPT_EMBEDS: empty_prompt.prompt_embeds_LC,
        POOLED_PROMPT_EMBEDS: empty_prompt.pooled_prompt_embeds_V,
    }
    metadata = {_IDENTITY: json.dumps(dict(identity), sort_keys=True)}
    write_weights(folder / HEADER_FILE, tensors, metadata=metadata)


def is_cache_of(folder: Path, identity: Identity, *, complete: bool = True) -> bool:
    """Return whether a folder has a cache. Raises FileProblem if it has another identity.

    If `identity` is not `complete`, only its entries are compared.
    """
    path = folder / HEADER_FILE
    if not path.exists():
        return False
    found = _metadata(path, _IDENTITY)
    names = {*found, *identity} if complete else {*identity}
    if differing := sorted(name for name in names if found.get(name) != identity.get(name)):
        raise FileProblem(
            f"{folder} was made for another run, which differs in: {', '.join(differing)}",
            hint="name another folder, --set train_mmdit.cache=FOLDER, or delete this one",
        )
    return True


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
    """Writer that adds clips to a cache with a header, in files of about `shard_bytes`."""

    def __init__(self, folder: Path, *, shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
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


class CacheReport(Document):
    """Result of `osora data cache`."""

    SCHEMA = "osora.data-cache/1"

    folder: Path
    clips: int
    """Clips that are in the cache now."""
    encoded: int
    """Clips that this run encoded."""
    failed: tuple[BrokenFile, ...]

    def lines(self) -> list[str]:
        """Return the result for people."""
        return [
            f"{self.folder}  {self.clips} clips, {self.encoded} of them encoded now",
            *(f"failed  {clip.path}: {clip.reason}" for clip in self.failed),
        ]

    def raise_for_problems(self) -> None:
        """Raise BatchError if clips could not be read."""
        if self.failed:
            raise BatchError(
                f"{len(self.failed)} of {len(self.failed) + self.clips} clips could not be read",
                hint="fix them and rerun; training skips clips that the cache lacks",
            )


def cache_clips(settings: TrainSettings, *, reporter: Reporter | None = None) -> CacheReport:
    """Encode the clips of `data` that `train_mmdit.cache` lacks, in one process; the errors are those of `fill_cache`.

    Clips of a file that was replaced are encoded again. After an interruption the next run continues with the
    remaining clips.
    """
    require_cache_inputs(settings)
    reporter = reporter or SilentReporter()
    device = pick_hardware(settings.device_name, "float32").device
    folder = _folder(settings)
    with threads_used(pick_threads(asked=settings.threads), reporter):
        encoded, failed = fill_cache(settings, device=device, reporter=reporter)
    return CacheReport(folder=folder, clips=len(ClipCache(folder)), encoded=encoded, failed=tuple(failed))


def _folder(settings: TrainSettings) -> Path:
    assert settings.clip_cache is not None
    return Path(settings.clip_cache)


def fill_cache(
    settings: TrainSettings,
    *,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
    barrier: Callable[[], None] = lambda: None,
    reporter: Reporter,
    source: ClipSource | None = None,
) -> tuple[int, list[BrokenFile]]:
    """Begin or continue the cache of `settings`; return the number of clips that were encoded, and the failed ones.

    Without a `source`, clips are those of the table. Each of `ranks` processes encodes a share; `barrier` returns when
    all have called it.

    Raises:
        CheckpointError: frozen parts, or files of the cache, are missing or broken.
        FileProblem: the cache was made with other parts or settings, or the table cannot be read.
        OutputError: the cache cannot be written.
        KeyboardInterrupt: its argument says how to continue.
    """
    folder = _folder(settings)
    source = source or open_table(settings, fixed_starts=True)
    requests = [*source.requests()]
    encoders = cache(partial(load_encoders, settings, device=device))
    if rank == 0:
        # Settings first: hashing the weights takes long.
        require_same_settings(settings, device=device)
        identity = cache_identity(settings, device=device, reporter=reporter)
        if not is_cache_of(folder, identity):
            empty_prompt = encoders().empty_prompt
            # Loading takes long: another run may have begun its cache meanwhile.
            if not is_cache_of(folder, identity):
                write_header(folder, identity, empty_prompt)
    barrier()
    clips, writer, failed = ClipCache(folder), CacheWriter(folder), list[BrokenFile]()
    parts = {length: _parts(settings, length) for length in {request.num_frames for request in requests}}
    missing = [
        request
        for request in requests[rank::ranks]
        if not clips.names(request, file=file_state(request.path)) >= {*ALWAYS_CACHED, *parts[request.num_frames]}
    ]
    if not missing:
        return 0, []
    with reporter.stage("encode", total=len(missing), unit="clips") as progress:
        try:
            for request in missing:
                # Before reading: a file that changes meanwhile is encoded again by the next run.
                file = file_state(request.path)
                try:
                    pixels_THWC = source.read(request)
                except MediaError as error:
                    failed.append(BrokenFile(path=request.path, reason=error.message))
                else:
                    clip = FreshClip(encoders(), pixels_THWC, request, settings.train_mmdit)
                    known = clips.names(request, file=file)
                    writer.add(request, encode_for_cache(clip, parts[request.num_frames], known=known), file=file)
                progress.advance()
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(f"finished clips are in {folder}: continue with the same command") from interrupt
        finally:
            writer.flush()
    return len(missing) - len(failed), failed


def require_same_settings(settings: TrainSettings, *, device: torch.device) -> None:
    """Raise FileProblem if the cache of `settings` has clips that were made with other settings."""
    is_cache_of(_folder(settings), _settings_identity(settings, device=device), complete=False)


def cache_identity(settings: TrainSettings, *, device: torch.device, reporter: Reporter) -> dict[str, str]:
    """Return the digests of the weights and the settings that decide the encoded clips."""
    parts = zip(("autoencoder", "T5", "CLIP"), require_frozen_parts(settings), strict=True)
    files = {name: _files(path) for name, path in parts}
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    with reporter.stage("hash", total=size, unit=BYTES) as progress:
        digests = {
            name: " ".join(f"{path.name}:{sha256_of(path, advance=progress.advance)}" for path in paths)
            for name, paths in files.items()
        }
    return {**digests, **_settings_identity(settings, device=device)}


def _settings_identity(settings: TrainSettings, *, device: torch.device) -> dict[str, str]:
    chosen, text = settings.train_mmdit, settings.text
    return {
        "autoencoder's settings": json.dumps(settings.vae.model_dump(mode="json"), sort_keys=True),
        "text lengths": f"{text.t5_max_length}, {text.clip_max_length}",
        "fit": str(settings.data.fit),
        "captions": f"add_fps={chosen.add_fps}, add_motion_score={chosen.add_motion_score}",
        "precision": str(frozen_dtype(chosen, device)).removeprefix("torch."),
    }


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        require_file(path, problem=CheckpointError)
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.suffix in _ENCODER_FILES)


def _parts(settings: TrainSettings, num_frames: int) -> list[str]:
    """Return the references that the condition modes of a run need of a clip, by name."""
    causal, lengths = settings.vae.grid.is_causal, settings.train_mmdit.lengths
    weights, frames = settings.train_mmdit.mode_weights.by_mode(), settings.vae.grid.latent_frames(num_frames)
    compression = settings.vae.grid.time_compression_ratio
    names = [
        part_name(part)
        for mode in fitting_modes(weights, num_latent_frames=frames, causal=causal, lengths=lengths)
        for part in encoded_parts(mode, causal=causal, temporal_compression=compression, lengths=lengths)
    ]
    return list(dict.fromkeys(names))
