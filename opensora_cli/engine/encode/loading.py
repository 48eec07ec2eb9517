"""The micro-batches of clips that training is fed with."""

from typing import Any

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.listing import plain
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch
from opensora_cli.data.stream import BatchStream, PicturesFirst
from opensora_cli.engine.encode.datasets import ClipDataset, TableRequests, open_dataset
from opensora_cli.engine.encode.reading import ClipLoader, LoadClip, ReadingNotes
from opensora_cli.engine.train.objectives.task import BatchSource
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.train import TrainSettings, TrainTarget

_MOST_WARNINGS = 20


def open_batches(
    settings: TrainSettings, *, data_rank: int, data_ranks: int, reporter: Reporter, load: LoadClip | None = None
) -> BatchSource[ClipBatch]:
    """Return this rank's micro-batches of a training run.

    Args:
        settings: the run.
        data_rank: of the data-parallel ranks.
        data_ranks: how many there are.
        reporter: warned of samples that cannot be read, and of data that have changed since a checkpoint.
        load: see `open_clips`.

    Raises:
        FileProblem, RequestError, HardwareError: as `open_clips`.
    """
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

    Args:
        data: which clips.
        seed: of their order and of where they begin in their files, and of the scenes.
        micro_batches: of an update, over all ranks.
        multiple: side of a token in pixels.
        data_rank: of the data-parallel ranks.
        data_ranks: how many there are; divides `micro_batches`.
        reporter: warned of samples that cannot be read, and of data that have changed since a checkpoint.
        load: called in the workers in place of decoding, with clips that begin with the first frame of their file.
        picture_updates: first updates, which are fed with single frames of scenes.
        picture_batch_size: single frames of such a micro-batch.

    Raises:
        FileProblem: the table is missing or broken, or fills too few micro-batches for an update.
        RequestError: a resolution is too small for `multiple`.
        HardwareError: the table is parquet, and pyarrow is not installed.
    """

    notes = ReadingNotes(data.workers)

    def stream(data: DataSettings) -> BatchStream[ClipBatch]:
        dataset = open_dataset(data, seed=seed, multiple=multiple, fixed_starts=load is not None)
        if data_rank == 0:
            _warn_of_what_is_left_out(data, dataset, reporter=reporter)
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


def _warn_of_what_is_left_out(data: DataSettings, dataset: ClipDataset, *, reporter: Reporter) -> None:
    requests = dataset.requests
    if not isinstance(requests, TableRequests):
        return
    if bad := len(requests.table.bad_rows):
        reporter.warn(f"{data.table}: bad rows left out: {bad}; osora train --check-data lists them")
    batches = dataset.plan_epoch(0).batches_of_buckets
    filled = {requests.buckets[index].kind for index in range(len(requests.buckets)) if batches[index]}
    for resolution, lengths in data.buckets.items():
        for length, bucket in lengths.items():
            if bucket.probability > 0 and (resolution, length) not in filled:
                reporter.warn(f"data.buckets.{resolution}.{length} is empty: its samples fill no micro-batch")


class ReplacementWarnings:
    """Warns of samples that could not be read: of each once, and of no more than the first twenty.

    Args:
        reporter: warned.
        where: they were to be used, as in ` in validation`.
    """

    def __init__(self, reporter: Reporter, *, where: str = "") -> None:
        self._reporter = reporter
        self._where = where
        self._told: set[str] = set()

    def warn(self, batch: ClipBatch) -> None:
        """Warn of those that the micro-batch was to have."""
        for replacement in batch.replaced:
            if replacement.path in self._told or len(self._told) > _MOST_WARNINGS:
                continue
            self._told.add(replacement.path)
            text = f"{replacement.reason}: {replacement.by} takes its place{self._where}"
            if len(self._told) > _MOST_WARNINGS:
                text = f"more samples cannot be read{self._where}: osora data scan makes a table without them"
            self._reporter.warn(text)


class ClipBatches:
    """A stream of clips that says which samples could not be read.

    Args:
        batches: the stream.
        notes: what its workers are reading.
        reporter: warned of them; see `ReplacementWarnings`.
    """

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
        """Of the micro-batch that was handed out last; from 0."""
        return self._batches.epoch

    def next(self) -> ClipBatch:
        """Return this rank's next micro-batch.

        Raises:
            FileProblem: a sample cannot be read, nor those that would take its place.
            HardwareError: a worker was ended from outside, or crashed; what all workers were reading is named.
        """
        try:
            batch = self._batches.next()
        except HardwareError as error:
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
        """Go on from there.

        Raises:
            CheckpointError: this is no such state.
        """
        self._batches.load_state_dict(state_dict)

    def close(self) -> None:
        """End the workers; may come twice."""
        self._batches.close()
