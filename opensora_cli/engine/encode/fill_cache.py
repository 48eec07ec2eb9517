"""`osora data cache`, and training with a cache: encode every clip that training can use once."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from opensora_cli.checkpoint.files import sha256_of
from opensora_cli.checkpoint.formats.peft import require_peft
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, CheckpointError, MediaError
from opensora_cli.core.limits import pick_threads, threads_used
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.core.reading import require_file
from opensora_cli.data.batches import ClipSource
from opensora_cli.data.table import BrokenFile
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.encode.clip_cache import (
    CacheWriter,
    ClipCache,
    file_state,
    is_cache_of,
    write_header,
)
from opensora_cli.engine.encode.clips import (
    ALWAYS_CACHED,
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

_ENCODER_FILES = frozenset({".json", ".safetensors", ".bin", ".model", ".txt"})
"""Endings of the files in the folder of a text encoder that change its embeddings."""


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
    if settings.lora.is_on:
        # Otherwise training would fail after everything was encoded.
        require_peft()
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
            write_header(folder, identity, encoders().empty_prompt)
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
