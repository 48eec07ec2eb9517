"""Decoding: decode the latents of a sample, and write each piece of the video as soon as it is decoded."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

import opensora_cli
from opensora_cli.core.device import peak_memory_gib
from opensora_cli.core.documents import Document
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
    """Decoded sample, or a segment of one. Its frames are produced once, piece by piece, unless `hold` keeps them."""

    chain: Chain
    files: SampleFiles
    events: Events
    latents: tuple[torch.Tensor, ...]
    """latents_CTHW of each segment, on the CPU."""
    pieces: Iterable[torch.Tensor]
    """Frames (t, H, W, 3), uint8 on the CPU."""
    figures: Callable[[], Figures]
    """Function that returns the figures of the sample, after the last piece."""

    @property
    def frames_THWC(self) -> torch.Tensor:  # noqa: N802  # tensors carry their shape
        """All frames of a clip that `hold` returned."""
        [frames_THWC] = self.pieces
        return frames_THWC


def hold(clip: Clip) -> Clip:
    """Return a clip with all frames in memory."""
    frames_THWC = torch.cat([*clip.pieces])
    figures = clip.figures()
    return replace(clip, pieces=(frames_THWC,), figures=lambda: figures)


@contextmanager
def _decoded(sample: Sample, plan: Plan, autoencoder: Autoencoder, events: Events) -> Iterator[Clip]:
    """Yield a sample that is decoded while its pieces are read; `plan` may have a stronger offload than its own."""
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
    with closing(pieces()) as decoded:
        yield Clip(chain, sample.files, events, (latents_CTHW,), decoded, figures)


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
                with (
                    models.autoencoder(plan, events) as autoencoder,
                    _decoded(sample, plan, autoencoder, events) as clip,
                ):
                    return finish(clip)

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
        for piece_THWC in clip.pieces:
            with events.timed(_SAVE):
                yield piece_THWC
            del piece_THWC
        # The stage begins here, because saving has run between the pieces of decoding.
        saving.enter_context(events.reporter.stage(_SAVE, unit="video"))

    def figures() -> Figures:
        save_s = time.perf_counter() - start - (timings_s.get(DECODE, 0.0) - decode_s)
        return clip.figures().with_saving(save_s)

    with events.timed(_SAVE), ExitStack() as saving, closing(decoded()) as pieces:
        write_video(replace(clip, pieces=pieces, figures=figures))
    if plan.settings.condition.seamless:
        events.reporter.note(f"seamless: the last frame, which repeats the first, is dropped: {plan.num_frames} frames")
    stop = plan.settings.sampling.stop_at
    events.complete(sample)
    if stop is not None and sample.latents is not None:
        where = f"stopped after step {stop} of {plan.num_steps}"
        events.reporter.note(f"{where}: continue with {sample.command(sample.latents, is_begun=True)}")
    report_given_frames(clip)
    events.note_saved(sample.media)
    return GeneratedVideo.of(chain, sample, clip.figures().given_frames_psnr_db)


def write_video(clip: Clip) -> None:
    """Write a result, its sidecar, and its last frame if requested: all files or none."""
    sample, settings, output = clip.files, clip.chain.settings, clip.chain.settings.output
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
        return sidecar_document(clip.chain, sample, num_bytes=num_bytes, figures=clip.figures().to_json())

    write_media(
        clip.pieces,
        sample.target,
        fps=settings.video.fps,
        format=settings.output_format,
        metadata=tags if output.metadata else {},
        # Another run may have used the name since the first check.
        replace=output.overwrite,
        describe=describe,
        last_frame=last_frame,
    )


def report_given_frames(clip: Clip) -> None:
    """Report the PSNR of a user's frames, with a warning if they came back badly."""
    psnr_db, reporter = clip.figures().given_frames_psnr_db, clip.events.reporter
    if psnr_db is None or clip.chain.find(PICTURE) is not None:
        return
    came = f"given frames came back at {psnr_db:.1f} dB PSNR (seed {clip.files.seed})"
    if psnr_db < LOW_PSNR_DB:
        reporter.warn(
            f"{came}, below {LOW_PSNR_DB:.0f} dB: the reference is far from what the model makes, and the video shows "
            "something else; a reference like the model's own videos comes back better"
        )
    else:
        reporter.note(came)
