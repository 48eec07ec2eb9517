"""Filling a cache: every clip that training can ask for is encoded once."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from opensora_cli.core.conditions import ReferencePart
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import MediaError
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipRequest
from opensora_cli.engine.encode.clip_cache import (
    CacheWriter,
    ClipCache,
    file_state,
    is_cache_of,
    require_same_settings,
    write_header,
)
from opensora_cli.engine.encode.clip_conditions import encoded_parts, fitting_modes
from opensora_cli.engine.encode.datasets import all_requests
from opensora_cli.engine.encode.encoding import (
    ALWAYS_CACHED,
    Encoders,
    FreshClip,
    encode_for_cache,
    fresh_clip,
    part_name,
)
from opensora_cli.engine.encode.frozen_parts import cache_identity, cache_settings, load_encoders
from opensora_cli.engine.encode.loading import pixel_multiple, read_clip
from opensora_cli.settings.train import TrainSettings


class FailedClip(Document):
    """A clip that could not be read."""

    path: str
    reason: str


def prepare_cache(
    settings: TrainSettings,
    *,
    device: torch.device,
    rank: int,
    ranks: int,
    barrier: Callable[[], None],
    reporter: Reporter,
) -> ClipCache | None:
    """Return the cache that a training run reads, after what it lacks was encoded; None if the run has none.

    All `ranks` processes call this and encode a share each; `barrier` returns when all have called it. Clips that
    cannot be read become warnings.

    Raises:
        CheckpointError: frozen parts, or files of the cache, are missing or broken.
        FileProblem: the cache was made with other parts, or the table cannot be read.
        OutputError: the cache cannot be written.
        KeyboardInterrupt: its argument is how to continue.
    """
    if settings.train_mmdit.cache is None:
        return None
    requests = cache_requests(settings)
    folder, encoders = Path(settings.train_mmdit.cache), lazy_encoders(settings, device)
    if rank == 0:
        begin_cache(settings, folder, encoders, device=device, reporter=reporter)
    barrier()
    _, failed = fill_cache(settings, folder, requests[rank::ranks], encoders, reporter=reporter)
    if failed:
        others = f", and {len(failed) - 1} more clips" if len(failed) > 1 else ""
        reporter.warn(f"left out: {failed[0].path} ({failed[0].reason}){others}")
    barrier()
    return ClipCache(folder)


def lazy_encoders(settings: TrainSettings, device: torch.device) -> Callable[[], Encoders]:
    """Return what loads the encoders at its first call, if there is one."""
    return cache(partial(load_encoders, settings, device=device))


def begin_cache(
    settings: TrainSettings,
    folder: Path,
    encoders: Callable[[], Encoders],
    *,
    device: torch.device,
    reporter: Reporter,
) -> None:
    """Make a new cache, or see to it that the one that is there was made with these settings and parts."""
    require_same_settings(folder, cache_settings(settings, device=device))
    identity = cache_identity(settings, device=device, reporter=reporter)
    if not is_cache_of(folder, identity):
        write_header(folder, identity, encoders().empty_prompt())


def fill_cache(
    settings: TrainSettings,
    folder: Path,
    requests: Sequence[ClipRequest],
    encoders: Callable[[], Encoders],
    *,
    reporter: Reporter,
) -> tuple[int, list[FailedClip]]:
    """Encode what the cache lacks of these clips; return how many, and what could not be read."""
    clips = ClipCache(folder)
    parts = {frames: _parts(settings, num_frames=frames) for frames in settings.data.lengths()}
    share = [
        request
        for request in requests
        if not clips.names(request, file=file_state(request.path)) >= {*ALWAYS_CACHED, *parts[request.num_frames]}
    ]
    if not share:
        return 0, []
    writer, failed = CacheWriter(folder), list[FailedClip]()
    with reporter.stage("encode", total=len(share), unit="clips") as progress:
        try:
            for request in share:
                # Before it is read: a file that changes during the run is encoded again by the next one.
                file = file_state(request.path)
                try:
                    clip = _fresh(settings, encoders(), request)
                except MediaError as error:
                    failed.append(FailedClip(path=request.path, reason=error.message))
                else:
                    known = clips.names(request, file=file)
                    writer.add(request, encode_for_cache(clip, parts[request.num_frames], known=known), file=file)
                progress.advance()
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(f"what is finished is in {folder}: go on with the same command") from interrupt
        finally:
            # What is finished is kept, whatever ends this.
            writer.flush()
    return len(share) - len(failed), failed


def cache_requests(settings: TrainSettings) -> list[ClipRequest]:
    """Return every clip that training can ask for, once; errors are those of `open_dataset`."""
    requests = all_requests(settings.data, seed=settings.loop.seed, multiple=pixel_multiple(settings))
    return list(dict.fromkeys(requests))


def _fresh(settings: TrainSettings, encoders: Encoders, request: ClipRequest) -> FreshClip:
    return fresh_clip(
        encoders,
        read_clip(request, fit=settings.data.fit),
        caption=request.caption,
        fps=request.fps,
        motion_score=request.motion_score,
        settings=settings.train_mmdit,
    )


def _parts(settings: TrainSettings, *, num_frames: int) -> dict[str, ReferencePart]:
    """Return the references of a clip that the condition modes of the run need."""
    grid, chosen = settings.vae.grid, settings.train_mmdit
    lengths = chosen.lengths
    modes = fitting_modes(
        chosen.mode_weights.by_mode(),
        num_latent_frames=grid.latent_frames(num_frames),
        causal=grid.is_causal,
        lengths=lengths,
    )
    parts = (
        part
        for mode in modes
        for part in encoded_parts(
            mode, causal=grid.is_causal, temporal_compression=grid.time_compression_ratio, lengths=lengths
        )
    )
    return {part_name(part): part for part in parts}
