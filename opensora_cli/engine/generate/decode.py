"""Decoding: decode the latents of a sample, and write each piece of the video as soon as it is decoded."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

import opensora_cli
from opensora_cli.core.device import peak_memory_gib
from opensora_cli.core.documents import Document
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.architectures import count_decoder_tiles, vae_tiling
from opensora_cli.engine.estimate.offload import DECODE, DENOISE
from opensora_cli.engine.generate.chain import Chain
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.outputs import SampleFiles, is_begun, read_made
from opensora_cli.engine.generate.plan import PICTURE, Plan
from opensora_cli.engine.generate.references import LOW_PSNR_DB, GivenFramesPSNR
from opensora_cli.engine.generate.request import picture_path
from opensora_cli.engine.generate.sample import Sample
from opensora_cli.engine.generate.sidecar import sidecar_document
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.write import LastFrame, write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.parallel.divided_work import shared_tiles

V = TypeVar("V")

_SAVE = "save"
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Figures:
    """Times and measurements of one sample."""

    timings_s: Mapping[str, float]
    """Seconds of each stage. Loading and text cover the whole run."""
    peak_memory_gib: Mapping[str, float]
    """Peak memory of the device or of the process, by the keys of `device.peak_memory_gib`."""
    given_frames_psnr_db: float | None
    """PSNR of the given frames in the video; None without references."""
    segments: tuple[Mapping[str, object], ...] = ()
    """Prompt, seed and place of each segment of an extended video, as its sidecar has them."""

    def with_saving(self, seconds: float) -> "Figures":
        return replace(self, timings_s={**self.timings_s, _SAVE: seconds})

    def to_json(self) -> dict[str, object]:
        db = self.given_frames_psnr_db
        return {
            "timings_s": {stage: round(seconds, 3) for stage, seconds in self.timings_s.items()},
            **self.peak_memory_gib,
            "given_frames_psnr_db": None if db is None else round(db, 2),
            "segments": [*self.segments],
        }


@dataclass(frozen=True, slots=True)
class Clip:
    """Decoded sample, or a segment of one, whose frames are produced once, piece by piece."""

    chain: Chain
    files: SampleFiles
    events: Events
    latents: tuple[torch.Tensor, ...]
    """latents_CTHW of each segment, on the CPU."""
    pieces: Generator[torch.Tensor]
    """Frames (t, H, W, 3), uint8 on the CPU."""
    figures: Callable[[], Figures]
    """Function that returns the figures of the sample, after the last piece."""


@dataclass(frozen=True, slots=True)
class HeldVideo:
    """Decoded sample in memory."""

    chain: Chain
    files: SampleFiles
    latents: tuple[torch.Tensor, ...]
    """latents_CTHW of each segment, on the CPU."""
    frames_THWC: torch.Tensor
    """Frames in uint8 RGB, on the CPU."""
    figures: Figures


def hold(clip: Clip) -> HeldVideo:
    frames_THWC = torch.cat([*clip.pieces])
    return HeldVideo(clip.chain, clip.files, clip.latents, frames_THWC, clip.figures())


def _decoded(sample: Sample, plan: Plan, autoencoder: Autoencoder, events: Events) -> Clip:
    """Return a sample that is decoded while its pieces are read; `plan` may have a stronger offload than its own."""
    assert sample.denoised is not None
    latents_CTHW, denoise_s = sample.denoised.latents_CTHW, sample.denoised.denoise_s
    psnr = GivenFramesPSNR(sample.references, num_frames=plan.settings.video.num_frames)
    before_s = events.timings_s.setdefault(DECODE, 0.0)

    def pieces() -> Generator[torch.Tensor]:
        left, tiles = plan.num_frames, count_decoder_tiles(plan.latent_shape, plan.settings.vae)
        with (
            events.stage(DECODE, total=tiles, unit="tiles") as progress,
            closing(decode_latents(plan, autoencoder, latents_CTHW, on_tile=progress.advance)) as decoded,
        ):
            for piece_THWC in decoded:
                psnr.add(piece_THWC)
                if left > 0:  # A seamless loop drops its last frame.
                    yield piece_THWC[:left]
                left -= len(piece_THWC)
                # Free the piece while the next one is decoded.
                del piece_THWC

    def figures() -> Figures:
        own = {DENOISE: denoise_s, DECODE: events.timings_s[DECODE] - before_s}
        peaks = peak_memory_gib(plan.hardware.device)
        return Figures({**events.timings_s, **own}, peaks, psnr.db)

    chain = sample.chain.change(lambda each: plan if each is sample.plan else each)
    return Clip(chain, sample.files, events, (latents_CTHW,), pieces(), figures)


def decode_latents(
    plan: Plan, vae: Autoencoder, latents_CTHW: torch.Tensor, *, on_tile: Callable[[], None] = lambda: None
) -> Generator[torch.Tensor]:
    """Yield frames (t, H, W, 3) piece by piece, uint8 on the CPU; `on_tile` is called after each run of the decoder."""

    def shown(piece_BCTHW: torch.Tensor) -> torch.Tensor:
        return to_uint8(piece_BCTHW[0, :, :, : plan.height, : plan.width])

    with vae.decoder.register_forward_hook(lambda *_: on_tile()):
        missing = plan.settings.video.num_frames
        # Unlike a loop over the pieces themselves, map keeps none of them while its frames are used.
        for piece_THWC in map(shown, _pieces(plan, vae, latents_CTHW)):
            piece_THWC = piece_THWC[:missing]
            missing -= len(piece_THWC)
            yield piece_THWC
            del piece_THWC


def _pieces(plan: Plan, vae: Autoencoder, latents_CTHW: torch.Tensor) -> Iterator[torch.Tensor]:
    return vae.decode_pieces(
        latents_CTHW[None].to(plan.hardware.device, plan.hardware.dtype),
        tiling=vae_tiling(plan.settings.vae),
        chunk_frames=plan.offload.chunk_frames,
        store=_HOST if plan.offload.store_on_host else None,
        canvas=_HOST,
    )


def decode_samples(
    samples: Sequence[Sample], models: LoadedModels, events: Events, *, finish: Callable[[Clip], V]
) -> tuple[V, ...]:
    """Decode the samples of one plan in turn; return the result of `finish` for each, on rank 0 alone."""
    plan = samples[0].plan
    ranks = models.ranks.of(plan)
    results: list[V] = []
    with ExitStack() as shared:
        if ranks.count > 1 and count_decoder_tiles(plan.latent_shape, plan.settings.vae) > 1:
            models.make_room(plan, DECODE)
            autoencoder = shared.enter_context(models.autoencoder(plan, events))
            decoder = shared.enter_context(shared_tiles(autoencoder))
            if not ranks.is_main:
                with events.stage(DECODE, total=len(samples), unit="samples") as progress:
                    for sample in samples:
                        assert sample.denoised is not None
                        # The outputs have no pixels: rank 0 writes the videos.
                        deque(_pieces(plan, autoencoder, sample.denoised.latents_CTHW), maxlen=0)
                        progress.advance()
                decoder.wait()
        if not ranks.is_main:
            return ()
        for sample in samples:

            def decode(plan: Plan, sample: Sample = sample) -> V:
                with models.autoencoder(plan, events) as autoencoder:
                    return finish(_decoded(sample, plan, autoencoder, events))

            # The next sample starts with the offload that was enough for this one.
            result, plan = retried(decode, plan, DECODE, models, events)
            results.append(result)
    return tuple(results)


class GeneratedVideo(Document):
    """Result in files, as `--json` prints it."""

    path: Path
    """File, or folder of a PNG sequence."""
    sidecar: Path | None
    seed: int
    given_frames_psnr_db: float | None
    """PSNR of the given frames in the video; None without references."""
    picture_file: Path | None = None
    """Picture that was made first, as the reference; None if none is kept."""
    made_before: bool = False
    """Whether an earlier run of the same request made the result."""

    @classmethod
    def of(cls, chain: Chain, sample: SampleFiles, psnr_db: float | None = None) -> "GeneratedVideo":
        if sample.made_before:
            psnr_db = read_made(sample).get("given_frames_psnr_db")
        return cls(
            path=sample.media,
            sidecar=sample.sidecar,
            seed=sample.seed,
            given_frames_psnr_db=psnr_db,
            picture_file=picture_path(sample.target) if chain.settings.picture.save else None,
            made_before=sample.made_before,
        )


def save(clip: Clip) -> GeneratedVideo:
    """Write a result piece by piece, all files or none, and remove the latents that were saved for it."""
    chain, sample, events = clip.chain, clip.files, clip.events
    plan, timings_s = chain.video, events.timings_s
    start, decode_s = time.perf_counter(), timings_s.get(DECODE, 0.0)

    def decoded() -> Generator[torch.Tensor]:
        with closing(clip.pieces) as pieces:
            for piece_THWC in pieces:
                with events.timed(_SAVE):
                    yield piece_THWC
                del piece_THWC
        # The stage begins here, because saving has run between the pieces of decoding.
        saving.enter_context(events.reporter.stage(_SAVE, unit="video"))

    def figures() -> Figures:
        save_s = time.perf_counter() - start - (timings_s.get(DECODE, 0.0) - decode_s)
        return clip.figures().with_saving(save_s)

    with events.timed(_SAVE), ExitStack() as saving, closing(decoded()) as pieces:
        write_video(pieces, chain, sample, figures)
    if plan.settings.condition.seamless:
        events.reporter.note(f"seamless: the last frame, which repeats the first, is dropped: {plan.num_frames} frames")
    stop = plan.settings.sampling.stop_at
    events.complete(sample, keeps_latents=stop is not None)
    if stop is not None and sample.latents is not None:
        where = f"stopped after step {stop} of {plan.num_steps}"
        events.reporter.note(f"{where}: continue with {sample.command(sample.latents, is_begun=True)}")
    psnr_db = clip.figures().given_frames_psnr_db
    report_given_frames(chain, psnr_db, sample.seed, events.reporter)
    events.note_saved(sample.media)
    return GeneratedVideo.of(chain, sample, psnr_db)


def write_video(
    pieces_tHWC: Iterable[torch.Tensor], chain: Chain, sample: SampleFiles, figures: Callable[[], Figures]
) -> None:
    """Write a result, its sidecar with the last `figures`, and its last frame if requested: all files or none."""
    settings, output = chain.settings, chain.settings.output
    last_frame = None
    if output.last_frame:
        last_frame = LastFrame(sample.last_frame, replace=output.overwrite or is_begun(sample))
    # The metadata has no time and no path, so that the same request makes the same bytes.
    tags = {
        "prompt": settings.prompt,
        "seed": str(sample.seed),
        "model": settings.model.name,
        "software": f"osora {opensora_cli.__version__}",
    }

    def describe(num_bytes: int) -> dict[str, object] | None:
        if sample.sidecar is None:
            return None
        return sidecar_document(chain, sample, num_bytes=num_bytes, figures=figures().to_json())

    write_media(
        pieces_tHWC,
        sample.target,
        fps=settings.video.fps,
        format=settings.output_format,
        metadata=tags if output.metadata else {},
        # Another run may have used the name since the first check.
        replace=output.overwrite,
        describe=describe,
        last_frame=last_frame,
    )


def report_given_frames(chain: Chain, psnr_db: float | None, seed: int, reporter: Reporter) -> None:
    """Report the PSNR of a user's frames, with a warning if they came back badly."""
    if psnr_db is None or chain.find(PICTURE) is not None:
        return
    came = f"given frames came back at {psnr_db:.1f} dB PSNR (seed {seed})"
    if psnr_db < LOW_PSNR_DB:
        reporter.warn(
            f"{came}, below {LOW_PSNR_DB:.0f} dB: the reference is far from what the model makes, and the video shows "
            "something else; a reference like the model's own videos comes back better"
        )
    else:
        reporter.note(came)
