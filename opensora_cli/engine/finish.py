"""From latents to results on disk: decode, save."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from opensora_cli.engine.configs import count_decoder_tiles, vae_tiling
from opensora_cli.engine.draw import DrawnSample
from opensora_cli.engine.hardware import peak_memory_gib
from opensora_cli.engine.loaded import KeptVAE
from opensora_cli.engine.offload import DECODE
from opensora_cli.engine.outputs import SampleFiles, refuse_existing_results
from opensora_cli.engine.plan import ExecutionPlan
from opensora_cli.engine.references import Reference, given_frames_psnr, to_uint8
from opensora_cli.engine.run import RunRecord, retried
from opensora_cli.engine.sidecar import media_tags, write_sidecar
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.hunyuan import HunyuanVAE

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GeneratedVideo:
    """One finished result."""

    path: Path
    """A file, or the folder of a PNG sequence."""
    sidecar: Path | None
    seed: int
    given_frames_psnr_db: float | None
    """How well the given frames came back; None where none were given."""


def process_and_save(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    drawn: Sequence[DrawnSample],
    references: Sequence[Reference],
    vae: KeptVAE,
    record: RunRecord,
) -> tuple[GeneratedVideo, ...]:
    """Decode and save every sample; the latents that this run saved are removed once their result is complete.

    The name is the one that the Open-Sora community knows.

    Args:
        plan: what is made.
        files: of every sample.
        drawn: the latents of every sample.
        references: what was given, to say how well it came back.
        vae: decodes them.
        record: told of stages and results.

    Raises:
        CheckpointError: the autoencoder's weights are broken or do not fit the settings.
        OutputError: a result cannot be written, or has appeared since the run began.
        HardwareError: out of memory.
    """
    videos = []
    for sample, latents in zip(files, drawn, strict=True):
        start = time.perf_counter()
        # With what was enough for one sample, the next ones go on.
        frames_THWC, plan = _decoded(plan, vae, latents.latents_CTHW, record)
        timings_s = record.timings_s | {"denoise": latents.denoise_s, "decode": time.perf_counter() - start}
        psnr = given_frames_psnr(frames_THWC, references) if references else None
        if psnr is not None:
            record.reporter.note(f"given frames came back at {psnr:.1f} dB PSNR (seed {sample.seed})")
        with record.stage("save", unit="video"):
            _save(plan, sample, frames_THWC, timings_s, psnr)
        record.finish(sample.media, sample.latents)
        videos.append(GeneratedVideo(sample.media, sample.sidecar, sample.seed, psnr))
    return tuple(videos)


def _decoded(
    plan: ExecutionPlan, vae: KeptVAE, latents_CTHW: torch.Tensor, record: RunRecord
) -> tuple[torch.Tensor, ExecutionPlan]:
    tiles = count_decoder_tiles(plan.latent_shape, plan.settings.vae)

    def decode(plan: ExecutionPlan) -> torch.Tensor:
        autoencoder = vae.on_device()
        with record.stage(DECODE, total=tiles, unit="tiles") as progress:
            return decode_latents(plan, autoencoder, latents_CTHW, on_tile=progress.advance)

    return retried(decode, plan, DECODE, record)


def _save(
    plan: ExecutionPlan,
    sample: SampleFiles,
    frames_THWC: torch.Tensor,
    timings_s: Mapping[str, float],
    psnr_db: float | None,
) -> None:
    """Write a result and its sidecar; both or neither."""
    start = time.perf_counter()
    # Once more: hours may have passed since the first check, and another run may have used the name.
    refuse_existing_results(sample, overwrite=plan.settings.output.overwrite)
    write_media(
        frames_THWC,
        sample.target,
        fps=plan.settings.video.fps,
        format=plan.settings.output.resolved_format,
        metadata=media_tags(plan, sample),
    )
    try:
        write_sidecar(
            plan,
            sample,
            timings_s={**timings_s, "save": time.perf_counter() - start},
            peak_memory_gib=peak_memory_gib(plan.hardware.device),
            given_frames_psnr_db=psnr_db,
        )
    except BaseException:
        # A video on its own would stand in the way of the run that goes on from its latents.
        _remove(sample.media)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def decode_latents(
    plan: ExecutionPlan,
    vae: HunyuanVAE,
    latents_CTHW: torch.Tensor,
    *,
    on_tile: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return the frames (T, H, W, 3), uint8 on the CPU, cut to what was asked for.

    Args:
        plan: sizes and tiling.
        vae: on the plan's device.
        latents_CTHW: of one sample.
        on_tile: called after each run of the decoder, for progress.
    """
    settings, offload = plan.settings, plan.offload
    hook = vae.decoder.register_forward_hook(lambda *_: on_tile())
    try:
        pieces_1CTHW = vae.decode_pieces(
            latents_CTHW[None].to(plan.hardware.device, plan.hardware.dtype),
            tiling=vae_tiling(settings.vae),
            chunk_frames=offload.chunk_frames,
            store=_HOST if offload.store_on_host else None,
            canvas=_HOST,
        )
        # Each becomes a quarter of its size, or less, before the next comes.
        frames = [to_uint8(piece_1CTHW[0, :, :, : plan.height, : plan.width]) for piece_1CTHW in pieces_1CTHW]
    finally:
        hook.remove()
    return torch.cat(frames)[: settings.video.num_frames]
