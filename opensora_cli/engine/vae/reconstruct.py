"""`osora vae reconstruct`: encode and decode pictures and videos, and show them beside the originals."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import lcm
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor

from opensora_cli.core.device import peak_memory_gib
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, MediaError, OsoraError
from opensora_cli.core.formatting import aligned_rows
from opensora_cli.core.limits import pick_threads, threads_used
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.architectures import load_autoencoder, vae_tiling
from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory, pick_hardware, versions
from opensora_cli.engine.components.weights import find_autoencoder
from opensora_cli.engine.vae.early import ENDINGS, result_stems
from opensora_cli.media.containers import MediaFacts
from opensora_cli.media.read import probe, read_cut
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.similarity import SSIM_WINDOW, psnr_db, ssim
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.tools import ReconstructSettings

SIDECAR_SCHEMA = "osora.vae-reconstruct-file/1"

T = TypeVar("T")

_PICTURE_FPS = 1.0  # not visible to users


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

    SCHEMA = "osora.vae-reconstruct/2"

    autoencoder: str
    weights: Path
    mean_psnr_db: float | None
    """Mean PSNR over files; None if all failed."""
    mean_ssim: float | None
    files: tuple[Reconstructed | Failed, ...]

    def lines(self) -> list[str]:
        """Return a table with a line for each file, and the means over files."""
        table = [("PSNR dB (RGB)", "SSIM (luma)", "frames", "size", "result")]
        done = [row for row in self.files if isinstance(row, Reconstructed)]
        for row in done:
            size = f"{row.width}x{row.height}"
            table.append((f"{row.psnr_db:.2f}", f"{row.ssim:.4f}", str(row.num_frames), size, str(row.output)))
        if len(done) > 1:
            table.append((f"{self.mean_psnr_db:.2f}", f"{self.mean_ssim:.4f}", "", "", f"mean of {len(done)} files"))
        return aligned_rows(table)

    def raise_for_problems(self) -> None:
        """Raise BatchError with all files that could not be reconstructed, if any."""
        if failed := [row.error for row in self.files if isinstance(row, Failed)]:
            count = f"{len(failed)} of {len(self.files)} files could not be reconstructed"
            raise BatchError("\n".join([count, *failed]))


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
    weights = find_autoencoder(settings)
    stems = result_stems(settings)
    autoencoder = load_autoencoder(settings.vae, weights, device=hardware.device, dtype=hardware.dtype)
    rows: list[Reconstructed | Failed] = []
    try:
        with threads_used(pick_threads(asked=settings.runtime.threads), reporter):
            for file, stem in zip(settings.files, stems, strict=True):
                do = partial(_reconstruct, file, stem, settings, autoencoder, hardware, weights, reporter)
                rows.append(attempt(file, do, reporter=reporter))
    except KeyboardInterrupt as interrupt:
        finished = [f"finished: {row.output}" for row in rows if isinstance(row, Reconstructed)]
        raise KeyboardInterrupt("\n".join(finished or ["nothing was finished yet"])) from interrupt
    done = [row for row in rows if isinstance(row, Reconstructed)]
    return Reconstruction(
        autoencoder=settings.vae.kind,
        weights=weights,
        mean_psnr_db=round(fmean(row.psnr_db for row in done), 3) if done else None,
        mean_ssim=round(fmean(row.ssim for row in done), 5) if done else None,
        files=tuple(rows),
    )


def attempt(file: str, do: Callable[[], T], *, reporter: Reporter) -> "T | Failed":
    """Return the result for a file, or the error of the file with a warning. A bug of this program is raised."""
    try:
        return do()
    except (OsoraError, MemoryError, RuntimeError) as error:
        message = str(error)
        if isinstance(error, OsoraError):
            message = error.message
        elif is_out_of_memory(error):
            message = "out of memory: use fewer clip.num_frames, vae.spatial_tiling=true or smaller tiles"
        else:
            raise
        message = message if file in message else f"{file}: {message}"
        reporter.warn(message)
        return Failed(file=file, error=message)


def _reconstruct(
    file: str,
    stem: Path,
    settings: ReconstructSettings,
    autoencoder: Autoencoder,
    hardware: Hardware,
    weights: Path,
    reporter: Reporter,
) -> Reconstructed:
    start = time.perf_counter()
    facts, grid, tiling = probe(file), autoencoder.grid, vae_tiling(settings.vae)
    # H.264 accepts only even sizes.
    height, width = cropped_size(facts, lcm(grid.spatial_compression_ratio, 2), least=SSIM_WINDOW)
    frames_HWC = (center(frame, height, width) for frame in read_cut(file, start=0, num_frames=facts.num_frames))
    video, picture = ENDINGS
    output = stem.with_name(f"{stem.name}.{picture if facts.fps is None else video}")
    psnrs, ssims = list[float](), list[float]()

    def side_by_side() -> Iterator[Tensor]:
        """Yield the new frames of each window, as far as they are decoded, on the left of their reconstruction."""
        for window_THWC, num_new in windows(frames_HWC, grid.longest_clip(settings.clip.num_frames)):
            window_THWC = window_THWC[: grid.longest_clip(len(window_THWC))]
            with torch.inference_mode():
                # No variable holds the pixels, so their memory is free for the decoded pixels.
                latents_1CTHW = autoencoder.encode(pixels(window_THWC, hardware), tiling=tiling)
                decoded_1CTHW = autoencoder.decode(latents_1CTHW, tiling=tiling, canvas=torch.device("cpu"))
            original_THWC = window_THWC[-num_new:]
            decoded_THWC = to_uint8(decoded_1CTHW[0, :, -num_new:])
            for original_HWC, decoded_HWC in zip(original_THWC, decoded_THWC, strict=True):
                psnrs.append(psnr_db(original_HWC, decoded_HWC))
                ssims.append(ssim(original_HWC, decoded_HWC))
                progress.advance()
            yield torch.cat((original_THWC, decoded_THWC), dim=2)

    def row() -> Reconstructed:
        return Reconstructed(
            file=file,
            output=output,
            num_frames=len(psnrs),
            height=height,
            width=width,
            source_num_frames=facts.num_frames,
            source_height=facts.height,
            source_width=facts.width,
            psnr_db=round(fmean(psnrs), 3),
            ssim=round(fmean(ssims), 5),
            frame_psnr_db=tuple(psnrs),
            frame_ssim=tuple(ssims),
        )

    def sidecar(num_bytes: int) -> dict[str, object] | None:
        return {
            "schema": SIDECAR_SCHEMA,
            **row().to_json(),
            "bytes": num_bytes,
            "frame_psnr_db": [round(value, 3) for value in psnrs],
            "frame_ssim": [round(value, 5) for value in ssims],
            "autoencoder": settings.vae.kind.value,
            "weights": str(weights),
            "device": str(hardware.device),
            "device_name": hardware.device_name,
            "dtype": hardware.dtype_name,
            "timings_s": {"reconstruct": round(time.perf_counter() - start, 3)},
            **peak_memory_gib(hardware.device),
            "versions": versions(),
            "settings": settings.model_dump(mode="json"),
        }

    with reporter.stage(Path(file).name, total=facts.num_frames, unit="frames") as progress:
        write_media(
            side_by_side(),
            output,
            fps=facts.fps or _PICTURE_FPS,
            format=output.suffix[1:],
            replace=settings.output.overwrite,
            describe=sidecar if settings.output.metadata else None,
        )
    if (height, width) != (facts.height, facts.width):
        reporter.note(f"{file}: cropped from {facts.width}x{facts.height} to {width}x{height}")
    if len(psnrs) != facts.num_frames:
        reporter.note(f"{file}: the first {len(psnrs)} of its {facts.num_frames} frames")
    return row()


def windows(frames_HWC: Iterator[Tensor], length: int) -> Iterator[tuple[Tensor, int]]:
    """Cut a stream of frames into windows of `length`; yield each with the number of its frames that are new.

    The last window reaches back to have the same length. A stream shorter than `length` has one shorter window.
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
        yield frames_THWC, num_new
        before_THWC = frames_THWC


def cropped_size(facts: MediaFacts, multiple: int, *, least: int = 1) -> tuple[int, int]:
    """Return height and width, cut to multiples. Raises MediaError if a side is smaller than `least`."""
    height, width = (side // multiple * multiple for side in (facts.height, facts.width))
    least = -(-least // multiple) * multiple
    if min(height, width) < least:
        raise MediaError(
            f"{facts.width}x{facts.height} pixels are too few for this autoencoder: it needs {least}x{least}"
        )
    return height, width


def pixels(frames_THWC: Tensor, hardware: Hardware) -> Tensor:
    """Convert uint8 frames to the input of an autoencoder: (1,3,T,H,W) in [-1,1]."""
    levels_1CTHW = frames_THWC.to(hardware.device).permute(3, 0, 1, 2)[None]
    return levels_1CTHW.to(hardware.dtype).div_(127.5).sub_(1.0)


def center(frame_HWC: Tensor, height: int, width: int) -> Tensor:
    """Crop a frame to its center."""
    top, left = (frame_HWC.shape[0] - height) // 2, (frame_HWC.shape[1] - width) // 2
    return frame_HWC[top : top + height, left : left + width]
