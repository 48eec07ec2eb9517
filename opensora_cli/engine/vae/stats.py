"""`osora vae stats`: mean and deviation of the latents of pictures and videos, for each channel."""

import os
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

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
from opensora_cli.settings.vae import EncodeSettings


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


@dataclass(slots=True)
class RunningMoments:
    """Running mean and variance of the values of each channel, in fp64, merged pairwise (Chan et al. 1979)."""

    count: int = 0
    """Number of values of a channel."""
    mean_C: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares_C: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Sum of squared differences from the mean."""

    @classmethod
    def of(cls, values_CN: Tensor) -> "RunningMoments":
        """Return the moments of these values, at least one per channel."""
        values_CN = values_CN.double()
        mean_C = values_CN.mean(dim=1)
        squares_C = (values_CN - mean_C[:, None]).square().sum(dim=1)
        return cls(values_CN.shape[1], mean_C.cpu(), squares_C.cpu())

    def merge(self, other: "RunningMoments") -> None:
        """Add the values of `other`."""
        total, step_C = self.count + other.count, other.mean_C - self.mean_C
        if total:
            self.squares_C = self.squares_C + other.squares_C + step_C.square() * (self.count * other.count / total)
            self.mean_C = self.mean_C + step_C * (other.count / total)
            self.count = total

    def over_channels(self) -> "RunningMoments":
        """Return the moments of all values together, as one channel."""
        merged = RunningMoments()
        for mean, squares in zip(self.mean_C, self.squares_C, strict=True) if self.count else ():
            merged.merge(RunningMoments(self.count, mean[None], squares[None]))
        return merged

    def channels(self) -> list[ChannelStatistics]:
        """Return mean and deviation of each channel; an empty list before the first values."""
        if not self.count:
            return []
        spread_C = (self.squares_C / (self.count - 1)).sqrt() if self.count > 1 else None
        return [
            ChannelStatistics(mean=mean, deviation=None if spread_C is None else float(spread_C[index]))
            for index, mean in enumerate(self.mean_C.tolist())
        ]


def latent_statistics(settings: EncodeSettings, *, reporter: Reporter | None = None) -> LatentStatistics:
    """Encode all files, and return mean and deviation of their latents, over all values of each channel.

    If the autoencoder has a posterior, its mode is used. Videos are cut into clips of `clip.num_frames`, one of which
    is in memory. The rest at the end is cut to a length that the autoencoder accepts. A folder means the pictures and
    videos in it. A file that fails, or a folder that cannot be read, does not stop the others, and is not counted.

    Raises:
        RequestError: sizes of the autoencoder contradict each other.
        FileProblem: a folder has neither pictures nor videos.
        CheckpointError: weights are missing or broken, or do not fit the settings.
        HardwareError: the device is missing.
    """
    reporter = reporter or SilentReporter()
    hardware = pick_hardware(settings.runtime.device, settings.runtime.dtype)
    weights = find_autoencoder(settings)
    moments, failed, frames = RunningMoments(), [], 0

    def unread(place: Path, reason: str) -> None:
        reporter.warn(reason)
        failed.append(Failed(file=str(place), error=reason))

    files = list[str]()
    for name in settings.files:
        files += map(str, media_files(Path(name), unread=unread)) if os.path.isdir(name) else [name]
    autoencoder = load_autoencoder(settings.vae, weights, device=hardware.device, dtype=hardware.dtype)
    closed = len(failed)
    with (
        threads_used(pick_threads(asked=settings.runtime.threads), reporter),
        reporter.stage("encode", total=len(files), unit="files") as progress,
    ):
        for file in files:
            found = attempt(file, partial(_encode, file, settings, autoencoder, hardware), reporter=reporter)
            if isinstance(found, Failed):
                failed.append(found)
            else:
                moments.merge(found[0])
                frames += found[1]
            progress.advance()
    encoded = len(files) + closed - len(failed)
    if encoded == 1:
        reporter.warn("the latents of one file tell little of others: take many clips of the data to scale by them")
    total = moments.over_channels().channels()
    return LatentStatistics(
        autoencoder=settings.vae.kind,
        weights=weights,
        files=encoded,
        frames=frames,
        values_per_channel=moments.count,
        channels=tuple(moments.channels()),
        mean=total[0].mean if total else None,
        deviation=total[0].deviation if total else None,
        settings=scaling_settings(settings.vae, total[0]) if total else {},
        failed=tuple(failed),
    )


def _encode(
    file: str, settings: EncodeSettings, autoencoder: Autoencoder, hardware: Hardware
) -> tuple[RunningMoments, int]:
    """Return the moments of a file's latents, and the number of encoded frames."""
    facts, grid = probe(file), autoencoder.grid
    height, width = cropped_size(facts, grid.spatial_compression_ratio)
    longest, moments, count = grid.longest_clip(settings.clip.num_frames), RunningMoments(), 0
    frames_HWC = (center(frame, height, width) for frame in read_cut(file, start=0, num_frames=facts.num_frames))
    while clip := list(islice(frames_HWC, longest)):
        kept_THWC = torch.stack(clip[: grid.longest_clip(len(clip))])
        with torch.inference_mode():
            latents_1CTHW = autoencoder.encode(pixels(kept_THWC, hardware), tiling=vae_tiling(settings.vae))
        if not bool(latents_1CTHW.isfinite().all()):
            raise MediaError(f"{file}: its latents are not finite", hint="use --dtype float32")
        moments.merge(RunningMoments.of(latents_1CTHW[0].flatten(1)))
        count += len(kept_THWC)
    return moments, count


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
