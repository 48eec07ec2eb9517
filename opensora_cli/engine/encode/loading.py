"""The micro-batches that training learns from: how workers read clips, and the streams of one rank."""

from collections.abc import Callable, Iterator
from ctypes import addressof, c_char, memmove
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from opensora_cli.core.exceptions import FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.media_choices import Fit
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batch_stream import BatchStream, PicturesFirst, WorkerEnded
from opensora_cli.data.batches import BucketSampler, ClipBatch, ClipRequest, MicroBatch, Replacement
from opensora_cli.data.scene_clips import SceneClip
from opensora_cli.engine.encode.datasets import ClipDataset, ClipRequests, TableRequests, open_dataset
from opensora_cli.engine.encode.left_out import find_left_out
from opensora_cli.media.read import read_cut
from opensora_cli.media.resize import fit_frames
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.train import TrainSettings, TrainTarget

_NOTE_BYTES = 512
_MOST_WARNINGS = 20

LoadClip = Callable[[ClipRequest], Any]
"""Takes the place of decoding, as a cache does. It raises an `OsoraError` for a sample that is not available."""


def read_clip(request: ClipRequest, *, fit: Fit | str = Fit.CROP) -> Tensor:
    """Return the frames of a request, uint8 (T, H, W, 3): decoded and resized, or rendered.

    A MediaError if the file is missing, broken or too short.
    """
    scene = SceneClip.named(request.path)
    if scene is not None:
        fps = request.fps or 1.0  # of a single frame it does not matter
        return torch.from_numpy(scene.render(size=request.height, num_frames=request.num_frames, fps=fps))
    frames = read_cut(request.path, start=request.start, num_frames=request.num_frames, interval=request.interval)
    is_picture = request.num_frames == 1
    # Frame by frame, so that of a large video no more than one is held at its own size.
    return torch.stack(
        [_fitted(frame, height=request.height, width=request.width, fit=fit, picture=is_picture) for frame in frames]
    )


def _fitted(frame_HWC: Tensor, *, height: int, width: int, fit: Fit | str, picture: bool) -> Tensor:
    pixels_C1HW = fit_frames(frame_HWC[None], height=height, width=width, fit=fit, picture=picture)
    # Eight bits are a quarter of what has to go from process to process, and on to the device.
    levels_HWC = ((pixels_C1HW[:, 0] + 1) * 127.5).round().permute(1, 2, 0)
    return levels_HWC.to(torch.uint8)


class ReadingNotes:
    """What each worker is reading, in shared memory: a decoder that crashes cannot name its file."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._notes = RawArray(c_char, max(workers, 1) * _NOTE_BYTES)

    def note(self, path: str) -> None:
        """Note what this process reads, if it is a worker."""
        worker = get_worker_info()
        if worker is not None:
            # The end of a long path is more specific than its beginning.
            content = path.encode("utf-8", "surrogateescape")[-_NOTE_BYTES:]
            memmove(addressof(self._notes) + worker.id * _NOTE_BYTES, content.ljust(_NOTE_BYTES, b"\0"), _NOTE_BYTES)

    def paths(self) -> list[str]:
        """Return what the workers noted last."""
        content = bytes(self._notes)
        notes = (content[index * _NOTE_BYTES : (index + 1) * _NOTE_BYTES] for index in range(self._workers))
        return [path for note in notes if (path := note.rstrip(b"\0").decode("utf-8", "replace"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLoader:
    """Reads micro-batches.

    A sample that cannot be read is replaced by the first of the batch's substitutes that can: the same ones in every
    run, so that a run that was resumed repeats one that was not.
    """

    requests: ClipRequests
    fit: Fit | str
    load: LoadClip | None
    """None: frames are decoded."""
    notes: ReadingNotes

    def __call__(self, asked: MicroBatch) -> ClipBatch:
        """Read one micro-batch; a FileProblem if a sample cannot be read, and none of its substitutes either."""
        substitutes = iter(asked.substitutes)
        replaced: list[Replacement] = []
        clips = [self._read(asked, place, substitutes, replaced) for place in range(len(asked.samples))]
        requests = [request for request, _ in clips]
        contents = [content for _, content in clips]
        return ClipBatch(
            number=asked.number,
            epoch=asked.epoch,
            paths=tuple(request.path for request in requests),
            captions=tuple(request.caption for request in requests),
            fps=tuple(request.fps for request in requests),
            motion_scores=tuple(request.motion_score for request in requests),
            pixels_BTHWC=torch.stack(contents) if self.load is None else None,
            cached=None if self.load is None else tuple(contents),
            replaced=tuple(replaced),
        )

    def _read(
        self, asked: MicroBatch, place: int, substitutes: Iterator[int], replaced: list[Replacement]
    ) -> tuple[ClipRequest, Any]:
        failures: list[tuple[str, str]] = []
        sample: int | None = asked.samples[place]
        while sample is not None:
            request = self.requests.request(sample, bucket=asked.bucket, number=asked.number, place=place)
            try:
                content = self._content(request)
            except OsoraError as error:
                failures.append((request.path, error.message))
                sample = next(substitutes, None)
                continue
            except Exception as error:
                error.add_note(f"while reading {request.path}")
                raise
            replaced += [Replacement(path=path, reason=reason, by=request.path) for path, reason in failures]
            return request, content
        path, reason = failures[0]
        raise FileProblem(
            f"{reason} (sample {path}; {len(failures) - 1} others of its bucket cannot be read in its place)",
            hint="osora data scan makes a table without broken files",
        )

    def _content(self, request: ClipRequest) -> Any:
        self.notes.note(request.path)
        return read_clip(request, fit=self.fit) if self.load is None else self.load(request)


def open_batches(
    settings: TrainSettings, *, data_rank: int, data_ranks: int, reporter: Reporter, load: LoadClip | None = None
) -> "ClipBatches":
    """Return this rank's micro-batches of a training run; for `load`, warnings and errors see `open_clips`."""
    vae_phase = settings.target is TrainTarget.VAE
    return open_clips(
        settings.data,
        seed=settings.loop.seed,
        micro_batches=settings.loop.micro_batches or data_ranks,
        multiple=pixel_multiple(settings),
        data_rank=data_rank,
        data_ranks=data_ranks,
        reporter=reporter,
        load=load,
        picture_updates=settings.train_vae.picture_steps if vae_phase else 0,
        picture_batch_size=settings.train_vae.picture_batch_size,
    )


def open_clips(
    data: DataSettings,
    *,
    seed: int,
    micro_batches: int,
    multiple: int,
    data_rank: int = 0,
    data_ranks: int = 1,
    reporter: Reporter,
    load: LoadClip | None = None,
    picture_updates: int = 0,
    picture_batch_size: int = 1,
) -> "ClipBatches":
    """Return this rank's micro-batches of a table or of the procedural scenes.

    Warnings are about samples that cannot be read, and data that have changed since a checkpoint.

    Args:
        seed: of their order and of where they begin in their files, and of the scenes.
        micro_batches: of an update, over all ranks; a multiple of `data_ranks`.
        multiple: side of a token in pixels.
        load: called in the workers in place of decoding, with clips that begin with the first frame of their file.
        picture_updates: first updates, which are fed with single frames of scenes.
        picture_batch_size: single frames of such a micro-batch.

    Errors are those of `open_dataset`; a FileProblem, too, if the data fill too few micro-batches for an update.
    """
    notes = ReadingNotes(data.workers)

    def stream(data: DataSettings) -> BatchStream[ClipBatch]:
        dataset = open_dataset(data, seed=seed, multiple=multiple, fixed_starts=load is not None)
        if data_rank == 0:
            _warn_of_what_is_left_out(data, dataset, seed=seed, reporter=reporter)
        return BatchStream(
            dataset.plan_epoch,
            ClipLoader(requests=dataset.requests, fit=data.fit, load=load, notes=notes),
            fingerprint=dataset.fingerprint,
            micro_batches=micro_batches,
            rank=data_rank,
            ranks=data_ranks,
            workers=data.workers,
            prefetch=data.prefetch,
            warn=reporter.warn,
        )

    clips = stream(data)
    if not picture_updates:
        return ClipBatches(clips, notes=notes, reporter=reporter)
    changes = {"scenes.picture_share": 1.0, "scenes.picture_batch_size": picture_batch_size}
    pictures = stream(data.replace(changes))
    batches_of_update = micro_batches // data_ranks
    first = PicturesFirst(pictures, clips, updates=picture_updates, batches_of_update=batches_of_update)
    return ClipBatches(first, notes=notes, reporter=reporter)


def pixel_multiple(settings: TrainSettings) -> int:
    """Return how many pixels a run's clips are multiples of: a token's side, or for autoencoders a latent's."""
    compression = settings.vae.grid.spatial_compression_ratio
    return compression * (settings.model.patch_size if settings.target is TrainTarget.MMDIT else 1)


def _warn_of_what_is_left_out(data: DataSettings, dataset: ClipDataset, *, seed: int, reporter: Reporter) -> None:
    requests = dataset.requests
    if not isinstance(requests, TableRequests):
        return
    if bad := len(requests.table.bad_rows):
        reporter.warn(f"{data.table}: bad rows left out: {bad}; osora train --check-data lists them")
    sampler = BucketSampler(buckets=requests.buckets, samples=requests.table.samples, seed=seed)
    everything = np.ones(len(requests.table), dtype=bool)
    left_out = find_left_out(requests, everything, sampler.assigned(0))
    for each in left_out:
        reporter.warn(
            f"{data.table}: rows left out: {each.rows} of {len(requests.table)}, {each.reason} ({each.examples[0]}); "
            "osora train --check-data lists them, and what takes them in"
        )
    batches = sampler(0).batches_of_buckets
    filled = {requests.buckets[index].kind for index in range(len(requests.buckets)) if batches[index]}
    for resolution, lengths in data.buckets.items():
        for length, bucket in lengths.items():
            if bucket.probability > 0 and (resolution, length) not in filled:
                reporter.warn(f"data.buckets.{resolution}.{length} is empty: its samples fill no micro-batch")


class ReplacementWarnings:
    """Warns of samples that could not be read: of each once, and of no more than the first twenty.

    `where` is appended to a warning, as in ` in validation`.
    """

    def __init__(self, reporter: Reporter, *, where: str = "") -> None:
        self._reporter = reporter
        self._where = where
        self._warned: set[str] = set()

    def warn(self, batch: ClipBatch) -> None:
        """Warn of those that the micro-batch was to have."""
        for replacement in batch.replaced:
            if replacement.path in self._warned or len(self._warned) > _MOST_WARNINGS:
                continue
            self._warned.add(replacement.path)
            text = f"{replacement.reason}: {replacement.by} takes its place{self._where}"
            if len(self._warned) > _MOST_WARNINGS:
                text = f"more samples cannot be read{self._where}: osora data scan makes a table without them"
            self._reporter.warn(text)


class ClipBatches:
    """A stream of clips that warns about samples that could not be read."""

    def __init__(
        self,
        batches: BatchStream[ClipBatch] | PicturesFirst[ClipBatch],
        *,
        notes: ReadingNotes,
        reporter: Reporter,
    ) -> None:
        self._batches = batches
        self._notes = notes
        self._replaced = ReplacementWarnings(reporter)

    @property
    def epoch(self) -> int:
        """Of the last micro-batch that was returned; from 0."""
        return self._batches.epoch

    def next(self) -> ClipBatch:
        """Return this rank's next micro-batch.

        A FileProblem if a sample and its substitutes cannot be read; a HardwareError if a worker was killed or crashed,
        which names the files that workers were reading.
        """
        try:
            batch = self._batches.next()
        except WorkerEnded as error:
            raise HardwareError(
                f"{error.message}; last read were {', '.join(map(plain, self._notes.paths()))}",
                hint=f"{error.hint}; or one of these files crashes its decoder: take it out of the table",
            ) from error
        self._replaced.warn(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is; see `BatchStream`."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; a CheckpointError if it is none."""
        self._batches.load_state_dict(state_dict)

    def close(self) -> None:
        """End the workers; idempotent."""
        self._batches.close()
