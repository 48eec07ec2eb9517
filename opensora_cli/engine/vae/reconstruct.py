"""`osora vae reconstruct`: encode and decode pictures and videos, and show them beside the originals."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import lcm
from pathlib import Path
from statistics import fmean

import torch
from pydantic import Field
from torch import Tensor

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, MediaError, OsoraError, OutputError
from opensora_cli.core.progress import Reporter, SilentReporter, StageProgress
from opensora_cli.core.threads import pick_threads, threads_used
from opensora_cli.engine.components.autoencoders import load_autoencoder, vae_tiling
from opensora_cli.engine.components.hardware import (
    Hardware,
    OutOfMemoryError,
    is_out_of_memory,
    peak_memory_gib,
    pick_hardware,
    versions,
)
from opensora_cli.engine.vae.early import ENDINGS, find_weights, result_stems
from opensora_cli.media.containers import MediaFacts
from opensora_cli.media.read import probe, read_cut
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.similarity import SSIM_WINDOW, psnr_db, ssim
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.vae import ReconstructSettings

SIDECAR_SCHEMA = "osora.vae-reconstruct-file/1"

_PICTURE_FPS = 1.0  # not visible to users


@dataclass(frozen=True, slots=True)
class Window:
    """Window of frames that are encoded at once."""

    frames_THWC: Tensor
    """Frames in uint8."""
    num_new: int
    """Number of frames at the end that no earlier window has."""


class Reconstructed(Document):
    """Result of one reconstructed file."""

    file: str
    output: Path
    num_frames: int
    height: int
    width: int
    source_num_frames: int
    source_height: int
    source_width: int
    psnr_db: float
    """PSNR of the RGB values, averaged over frames."""
    ssim: float
    """SSIM of the luma, averaged over frames."""
    frame_psnr_db: tuple[float, ...] = Field(exclude=True)
    frame_ssim: tuple[float, ...] = Field(exclude=True)


class Failed(Document):
    """File that could not be reconstructed."""

    file: str
    error: str


class Reconstruction(Document):
    """Results of all files."""

    SCHEMA = "osora.vae-reconstruct/1"

    autoencoder: str
    weights: Path
    psnr_of: str = "RGB, mean over frames"
    ssim_of: str = "luma, mean over frames"
    mean_psnr_db: float | None
    """Mean PSNR over files; None if all failed."""
    mean_ssim: float | None
    files: tuple[Reconstructed | Failed, ...]

    @classmethod
    def of(cls, files: Sequence[Reconstructed | Failed], *, autoencoder: str, weights: Path) -> "Reconstruction":
        """Return the document of these files."""
        psnrs, ssims = _means(files)
        return cls(
            autoencoder=autoencoder,
            weights=weights,
            mean_psnr_db=round(fmean(psnrs), 3) if psnrs else None,
            mean_ssim=round(fmean(ssims), 5) if ssims else None,
            files=tuple(files),
        )

    def lines(self) -> list[str]:
        """Return a table with a line for each file, and the means over files."""
        psnrs, ssims = _means(self.files)
        table = [("PSNR dB (RGB)", "SSIM (luma)", "frames", "size", "result")]
        done = (row for row in self.files if isinstance(row, Reconstructed))
        for row, psnr, similarity in zip(done, psnrs, ssims, strict=True):
            size = f"{row.width}x{row.height}"
            table.append((f"{psnr:.2f}", f"{similarity:.4f}", str(row.num_frames), size, str(row.output)))
        if len(psnrs) > 1:
            table.append((f"{fmean(psnrs):.2f}", f"{fmean(ssims):.4f}", "", "", f"mean of {len(psnrs)} files"))
        widths = [max(len(line[column]) for line in table) for column in range(4)]
        return [
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[4]])
            for line in table
        ]

    def raise_for_problems(self) -> None:
        """Raise BatchError with all files that could not be reconstructed, if any."""
        failed = [row.error for row in self.files if isinstance(row, Failed)]
        if failed:
            raise BatchError(
                "\n".join([f"{len(failed)} of {len(self.files)} files could not be reconstructed", *failed])
            )


def _means(files: Sequence[Reconstructed | Failed]) -> tuple[list[float], list[float]]:
    """Return the mean PSNR and the mean SSIM of each reconstructed file."""
    done = [row for row in files if isinstance(row, Reconstructed)]
    return [fmean(row.frame_psnr_db) for row in done], [fmean(row.frame_ssim) for row in done]


def reconstruct(settings: ReconstructSettings, *, reporter: Reporter | None = None) -> Reconstruction:
    """Encode and decode every file, and write the original on the left and the reconstruction on the right.

    If the autoencoder has a posterior, its mode is used. A long video is encoded in clips, at most two of which are in
    memory. A file that fails does not stop the other files.

    Raises:
        RequestError: sizes of the autoencoder contradict each other.
        CheckpointError: its weights are missing or broken, or do not fit the settings.
        OutputError: a result exists already, or its folder cannot be written.
        HardwareError: the device is missing.
        KeyboardInterrupt: the user pressed Ctrl-C; the argument lists the finished files.
    """
    reporter = reporter or SilentReporter()
    hardware = pick_hardware(settings.runtime.device, settings.runtime.dtype)
    weights = find_weights(settings)
    stems = result_stems(settings)
    _make_folder(settings)
    autoencoder = load_autoencoder(settings.vae, weights, device=hardware.device, dtype=hardware.dtype)
    job = _Job(settings, autoencoder, hardware, weights, reporter)
    rows: list[Reconstructed | Failed] = []
    try:
        with threads_used(pick_threads(asked=settings.runtime.threads), reporter):
            for file, stem in zip(settings.files, stems, strict=True):
                rows.append(job.run(file, stem))
    except KeyboardInterrupt as interrupt:
        finished = [f"finished: {row.output}" for row in rows if isinstance(row, Reconstructed)]
        raise KeyboardInterrupt("\n".join(finished or ["nothing was finished yet"])) from interrupt
    return Reconstruction.of(rows, autoencoder=settings.vae.kind, weights=weights)


@dataclass(frozen=True, slots=True)
class _Job:
    """State that all files share."""

    settings: ReconstructSettings
    autoencoder: Autoencoder
    hardware: Hardware
    weights: Path
    reporter: Reporter

    def run(self, file: str, stem: Path) -> Reconstructed | Failed:
        """Reconstruct one file. An error of the file becomes its result."""
        try:
            return self._run(file, stem)
        except (OsoraError, MemoryError, RuntimeError) as error:
            message = what_failed(file, error)
            self.reporter.warn(message)
            return Failed(file=file, error=message)

    def _run(self, file: str, stem: Path) -> Reconstructed:
        start = time.perf_counter()
        facts = probe(file)
        height, width = self._cropped_size(facts)
        clip = self.autoencoder.grid.longest_clip(self.settings.clip.num_frames)
        frames_HWC = (center(frame, height, width) for frame in read_cut(file, start=0, num_frames=facts.num_frames))
        output = stem.with_name(f"{stem.name}.{_ending(facts)}")
        with self.reporter.stage(Path(file).name, total=facts.num_frames, unit="frames") as progress:
            comparing = _Comparing(progress)

            def compared() -> Reconstructed:
                return Reconstructed(
                    file=file,
                    output=output,
                    num_frames=len(comparing.psnr_db),
                    height=height,
                    width=width,
                    source_num_frames=facts.num_frames,
                    source_height=facts.height,
                    source_width=facts.width,
                    psnr_db=round(fmean(comparing.psnr_db), 3),
                    ssim=round(fmean(comparing.ssim), 5),
                    frame_psnr_db=tuple(comparing.psnr_db),
                    frame_ssim=tuple(comparing.ssim),
                )

            def describe(num_bytes: int) -> dict[str, object] | None:
                if not self.settings.output.metadata:
                    return None
                return self._sidecar_document(compared(), num_bytes=num_bytes, seconds=time.perf_counter() - start)

            write_media(
                (comparing.side_by_side(*self._round_trip(window)) for window in windows(frames_HWC, clip)),
                output,
                fps=facts.fps or _PICTURE_FPS,
                format=_ending(facts),
                replace=self.settings.output.overwrite,
                describe=describe,
            )
        row = compared()
        self._report_crop(row)
        return row

    def _cropped_size(self, facts: MediaFacts) -> tuple[int, int]:
        # H.264 accepts only even sizes.
        multiple = lcm(self.autoencoder.grid.spatial_compression_ratio, 2)
        height, width = (side // multiple * multiple for side in (facts.height, facts.width))
        if min(height, width) < SSIM_WINDOW:
            least = -(-SSIM_WINDOW // multiple) * multiple
            raise MediaError(
                f"{facts.width}x{facts.height} pixels are too few for this autoencoder: it needs {least}x{least}"
            )
        return height, width

    def _round_trip(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the new frames of a window, as far as they are decoded, and their reconstruction: uint8 (T,H,W,3)."""
        num_frames = self.autoencoder.grid.longest_clip(len(window.frames_THWC))
        frames_THWC = window.frames_THWC[:num_frames]
        tiling = vae_tiling(self.settings.vae)
        with torch.inference_mode():
            # No variable holds the pixels, so their memory is free for the decoded pixels.
            latents_1CTHW = self.autoencoder.encode(pixels(frames_THWC, self.hardware), tiling=tiling)
            decoded_1CTHW = self.autoencoder.decode(latents_1CTHW, tiling=tiling, canvas=torch.device("cpu"))
        num_new = min(window.num_new, num_frames)
        return frames_THWC[-num_new:], to_uint8(decoded_1CTHW[0, :, -num_new:])

    def _report_crop(self, row: Reconstructed) -> None:
        if (row.height, row.width) != (row.source_height, row.source_width):
            size = f"{row.source_width}x{row.source_height}"
            self.reporter.note(f"{row.file}: cropped from {size} to {row.width}x{row.height}")
        if row.num_frames != row.source_num_frames:
            self.reporter.note(f"{row.file}: the first {row.num_frames} of its {row.source_num_frames} frames")

    def _sidecar_document(self, row: Reconstructed, *, num_bytes: int, seconds: float) -> dict[str, object]:
        return {
            "schema": SIDECAR_SCHEMA,
            **row.to_json(),
            "bytes": num_bytes,
            "frame_psnr_db": [round(value, 3) for value in row.frame_psnr_db],
            "frame_ssim": [round(value, 5) for value in row.frame_ssim],
            "autoencoder": self.settings.vae.kind.value,
            "weights": str(self.weights),
            "device": str(self.hardware.device),
            "device_name": self.hardware.device_name,
            "dtype": self.hardware.dtype_name,
            "timings_s": {"reconstruct": round(seconds, 3)},
            **peak_memory_gib(self.hardware.device),
            "versions": versions(),
            "settings": self.settings.model_dump(mode="json"),
        }


@dataclass(slots=True)
class _Comparing:
    """Running comparison of original and decoded frames."""

    progress: StageProgress
    psnr_db: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)

    def side_by_side(self, original_THWC: Tensor, decoded_THWC: Tensor) -> Tensor:
        """Return both side by side in one picture, the original on the left."""
        for original_HWC, decoded_HWC in zip(original_THWC, decoded_THWC, strict=True):
            self.psnr_db.append(psnr_db(original_HWC, decoded_HWC))
            self.ssim.append(ssim(original_HWC, decoded_HWC))
            self.progress.advance()
        return torch.cat((original_THWC, decoded_THWC), dim=2)


def windows(frames_HWC: Iterator[Tensor], length: int) -> Iterator[Window]:
    """Cut a stream of frames into windows of `length`. The last window reaches back to have the same length.

    A stream shorter than `length` has one shorter window, and a stream without frames has none.
    """
    before_THWC: Tensor | None = None
    while chunk := list(islice(frames_HWC, length)):
        if any(frame.shape != chunk[0].shape for frame in chunk):
            raise MediaError("its frames change their size")
        num_new = len(chunk)
        frames_THWC = torch.stack(chunk)
        chunk.clear()
        if before_THWC is not None:
            frames_THWC = torch.cat((before_THWC[num_new:], frames_THWC))
        yield Window(frames_THWC, num_new=num_new)
        before_THWC = frames_THWC


def pixels(frames_THWC: Tensor, hardware: Hardware) -> Tensor:
    """Convert uint8 frames to the input of an autoencoder: (1,3,T,H,W) in [-1,1]."""
    levels_1CTHW = frames_THWC.to(hardware.device).permute(3, 0, 1, 2)[None]
    return levels_1CTHW.to(hardware.dtype).div_(127.5).sub_(1.0)


def center(frame_HWC: Tensor, height: int, width: int) -> Tensor:
    """Crop a frame to its center."""
    top, left = (frame_HWC.shape[0] - height) // 2, (frame_HWC.shape[1] - width) // 2
    return frame_HWC[top : top + height, left : left + width]


def _ending(facts: MediaFacts) -> str:
    video, picture = ENDINGS
    return picture if facts.fps is None else video


def _make_folder(settings: ReconstructSettings) -> None:
    """Make the folder of the results. Raises OutputError if it cannot be written."""
    folder, hint = Path(settings.output.folder), "choose another folder with --out"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write in {folder}: {error.strerror or error}", hint=hint) from error
    if not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write in {folder}", hint=hint)


def what_failed(file: str, error: OsoraError | MemoryError | RuntimeError) -> str:
    """Return the message of a failed file. An error that is a bug of this program is raised again."""
    if not isinstance(error, OsoraError):
        if not is_out_of_memory(error):
            raise error
        error = OutOfMemoryError("out of memory: use fewer clip.num_frames, vae.spatial_tiling=true or smaller tiles")
    return error.message if file in error.message else f"{file}: {error.message}"
