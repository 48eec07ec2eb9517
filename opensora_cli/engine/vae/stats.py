"""`osora vae stats`: mean and deviation of the latents of pictures and videos, for each channel."""

import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, MediaError
from opensora_cli.core.limits import pick_threads, threads_used
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.architectures import load_autoencoder, vae_tiling
from opensora_cli.engine.components.hardware import Hardware, pick_hardware
from opensora_cli.engine.components.weights import find_autoencoder
from opensora_cli.engine.vae.reconstruct import Failed, attempt, center, cropped_size, pixels
from opensora_cli.media.read import media_files, probe, read_cut
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.components import VAEKind, VAESettings
from opensora_cli.settings.tools import EncodeSettings


class ChannelStatistics(Document):
    """Statistics of one channel of the latents."""

    mean: float
    deviation: float | None
    """Sample standard deviation (n-1); None for a single value."""


class LatentStatistics(Document):
    """Statistics of the latents of all files."""

    SCHEMA = "osora.vae-stats/1"

    autoencoder: str
    weights: Path
    files: int
    """Number of encoded files."""
    frames: int
    values_per_channel: int
    """Latent frames x rows x columns, over all files."""
    channels: tuple[ChannelStatistics, ...]
    """Statistics of each channel, with the current scaling of the settings."""
    mean: float | None
    """Mean over all channels; None if nothing was encoded."""
    deviation: float | None
    settings: dict[str, float]
    """Settings of `osora train` that scale these latents to deviation 1, and to mean 0 if there is a shift."""
    failed: tuple[Failed, ...]

    def lines(self) -> list[str]:
        """Return a table with a line for each channel, and the settings in the syntax of `--set`."""
        rows = [(str(index), row.mean, row.deviation) for index, row in enumerate(self.channels)]
        rows += [("all", self.mean, self.deviation)] if self.mean is not None else []
        found = [f"{'channel':>7}  {'mean':>12}  {'deviation':>12}"]
        for name, mean, deviation in rows:
            found.append(f"{name:>7}  {mean:>12.6f}  {'-' if deviation is None else f'{deviation:.6f}':>12}")
        source = f"of {self.frames:,} frames in {self.files:,} files"
        found.append(f"latents    {self.values_per_channel:,} values a channel, {source}")
        if self.settings:
            found.append(f"settings   {' '.join(f'--set {key}={value:.7g}' for key, value in self.settings.items())}")
        return found

    def raise_for_problems(self) -> None:
        """Raise BatchError with all files that could not be encoded, if any."""
        if self.failed:
            count = f"{len(self.failed)} of {self.files + len(self.failed)} files could not be encoded"
            raise BatchError("\n".join([f"{count}, and do not count", *(file.error for file in self.failed)]))


class EncodedFile(NamedTuple):
    """Latents of a file, summed up in fp64."""

    frames: int
    values: int
    """Number of values of each channel."""
    sums_2C: Tensor
    """Sums of the values and of their squares."""


def channel_statistics(values: int, sums_2C: Tensor) -> list[ChannelStatistics]:
    """Return mean and deviation of each channel with so many values, at least one."""
    mean_C = sums_2C[0] / values
    variance_C = (sums_2C[1] - sums_2C[0] * mean_C) / max(values - 1, 1)
    deviations = variance_C.clamp_min(0).sqrt().tolist() if values > 1 else [None] * len(mean_C)
    return [
        ChannelStatistics(mean=mean, deviation=each) for mean, each in zip(mean_C.tolist(), deviations, strict=True)
    ]


def latent_statistics(settings: EncodeSettings, *, reporter: Reporter | None = None) -> LatentStatistics:
    """Encode all files, and return mean and deviation of their latents, over all values of each channel.

    If the autoencoder has a posterior, its mode is used. Videos are cut into clips of `clip.num_frames`, one of which
    is in memory. The rest at the end is cut to a length that the autoencoder accepts. A folder means the pictures and
    videos in it. A file that fails does not stop the others, and is not counted.

    Raises:
        RequestError: sizes of the autoencoder contradict each other.
        FileProblem: a folder has neither pictures nor videos.
        CheckpointError: weights are missing or broken, or do not fit the settings.
        HardwareError: the device is missing.
    """
    reporter = reporter or SilentReporter()
    hardware = pick_hardware(settings.runtime.device, settings.runtime.dtype)
    weights = find_autoencoder(settings)
    encoded, failed = list[EncodedFile](), list[Failed]()

    def unread(place: Path, reason: str) -> None:
        reporter.warn(reason)
        failed.append(Failed(file=str(place), error=reason))

    files = list[str]()
    for name in settings.files:
        files += map(str, media_files(Path(name), unread=unread)[0]) if os.path.isdir(name) else [name]
    autoencoder = load_autoencoder(settings.vae, weights, device=hardware.device, dtype=hardware.dtype)
    with (
        threads_used(pick_threads(asked=settings.runtime.threads), reporter),
        reporter.stage("encode", total=len(files), unit="files") as progress,
    ):
        for file in files:
            found = attempt(file, partial(_encode, file, settings, autoencoder, hardware), reporter=reporter)
            if isinstance(found, Failed):
                failed.append(found)
            else:
                encoded.append(found)
            progress.advance()
    if len(encoded) == 1:
        reporter.warn("the latents of one file tell little of others: take many clips of the data to scale by them")
    values, channels, total = sum(file.values for file in encoded), list[ChannelStatistics](), None
    if encoded:
        sums_2C = torch.stack([file.sums_2C for file in encoded]).sum(dim=0)
        channels = channel_statistics(values, sums_2C)
        [total] = channel_statistics(values * len(channels), sums_2C.sum(dim=1, keepdim=True))
    return LatentStatistics(
        autoencoder=settings.vae.kind,
        weights=weights,
        files=len(encoded),
        frames=sum(file.frames for file in encoded),
        values_per_channel=values,
        channels=tuple(channels),
        mean=total.mean if total else None,
        deviation=total.deviation if total else None,
        settings=scaling_settings(settings.vae, total) if total else {},
        failed=tuple(failed),
    )


def _encode(file: str, settings: EncodeSettings, autoencoder: Autoencoder, hardware: Hardware) -> EncodedFile:
    facts, grid = probe(file), autoencoder.grid
    height, width = cropped_size(facts, grid.spatial_compression_ratio)
    longest, frames, values = grid.longest_clip(settings.clip.num_frames), 0, 0
    sums_2C = torch.zeros(2, 1, dtype=torch.float64)
    frames_HWC = (center(frame, height, width) for frame in read_cut(file, start=0, num_frames=facts.num_frames))
    while clip := list(islice(frames_HWC, longest)):
        kept_THWC = torch.stack(clip[: grid.longest_clip(len(clip))])
        with torch.inference_mode():
            latents_1CTHW = autoencoder.encode(pixels(kept_THWC, hardware), tiling=vae_tiling(settings.vae))
        if not bool(latents_1CTHW.isfinite().all()):
            raise MediaError(f"{file}: its latents are not finite", hint="use --dtype float32")
        values_CN = latents_1CTHW[0].flatten(1).double()
        sums_2C = sums_2C + torch.stack([values_CN.sum(dim=1), values_CN.square().sum(dim=1)]).cpu()
        frames, values = frames + len(kept_THWC), values + values_CN.shape[1]
    return EncodedFile(frames, values, sums_2C)


def scaling_settings(vae: VAESettings, latents: ChannelStatistics) -> dict[str, float]:
    """Return the settings that scale latents to deviation 1, and to mean 0 if there is a shift.

    `latents` are the statistics with the current scaling of `vae`. The result is empty if the latents do not vary.
    """
    if not latents.deviation:
        return {}
    if vae.kind is VAEKind.DC_AE:
        return {"vae.dc_ae.scaling_factor": latents.deviation * (vae.dc_ae.scaling_factor or 1.0)}
    section, key = (vae.flux_ae, "vae.flux_ae") if vae.kind is VAEKind.FLUX_AE else (vae, "vae")
    return {
        f"{key}.scale_factor": section.scale_factor / latents.deviation,
        f"{key}.shift_factor": latents.mean / section.scale_factor + section.shift_factor,
    }
