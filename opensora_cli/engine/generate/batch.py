"""`osora generate --prompts FILE`: many requests in one run, with the models loaded once."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.progress import Reporter, StageProgress
from opensora_cli.core.rank_link import beat
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.decode import GeneratedVideo, SampleFrames, save
from opensora_cli.engine.generate.documents import BatchPlan, BatchResult, FailedRow, PlanDocument, PlannedShape
from opensora_cli.engine.generate.encoded_text import text_embeds
from opensora_cli.engine.generate.execution_plan import PICTURE, ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.make import computing, require_weights
from opensora_cli.engine.generate.manifest import Manifest
from opensora_cli.engine.generate.prompts import Row, Shard
from opensora_cli.engine.generate.ranks import (
    device_for_rows,
    joined_for_rows,
    request_of_rank,
    require_devices,
    start_ranks_of_rows,
)
from opensora_cli.engine.generate.run import Run, begin, make_together, watched
from opensora_cli.engine.generate.shapes import Failures, RowReporter, Shape, raise_if_all_are_one, shapes_of
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import Claims, sample_files
from opensora_cli.engine.generate.work import Work
from opensora_cli.settings.load import GenerateRequest, given_for
from opensora_cli.settings.output import OutputSettings


def _folder_of(request: GenerateRequest) -> Path:
    """Return where all results go; a RequestError if that is one file."""
    given = given_for(request, "output.path")
    output = OutputSettings() if given is None else OutputSettings(path=str(given.value))
    if output.named_format is not None:
        raise RequestError(f"output.path={output.path} is one file: name a folder for the results of all rows")
    return Path(output.path)


class _Made(Document):
    """What one process has made of its rows."""

    rows: int
    made: int
    outputs: dict[int, tuple[Path, ...]]
    """Of the rows that are finished, by their numbers."""
    failed: tuple[FailedRow, ...]
    manifest: Path


def generate_rows(
    request: GenerateRequest,
    rows: Sequence[Row],
    *,
    shard: Shard,
    reporter: Reporter,
    models: LoadedModels,
    context: RankContext | None = None,
    rank_arguments: Sequence[str] = (),
) -> BatchResult | None:
    """Make and save what every row of this shard asks for, with models that stay loaded; what is finished is kept.

    Rows of one shape are made one after the other, or as many together as `sampling.batch_size` says. Their prompts are
    encoded first, many at a time, so that the encoders are loaded once also where there is no room for them beside the
    transformer. A row that fails stops no other. `request` has what all rows have in common.

    Several devices make rows of their own, in ranks that are started here by the command line `rank_arguments`: then
    None is returned, since the first of them prints. `context` is set in a rank, which returns the result of all.

    Raises:
        RequestError: the request is for one file, or contradicts itself for every row.
        CheckpointError: weights are missing.
        OutputError: the manifest cannot be written.
        HardwareError: there are fewer devices.
        RankFailure: a rank failed; what others have finished is kept.
        KeyboardInterrupt: its argument says how much is finished.
    """
    told = RowReporter(reporter)
    if context is None:
        chosen = shard.rows(rows)
        shapes, failures = shapes_of(request, chosen, told)
        if not shapes:
            raise_if_all_are_one(failures)
        elif shapes[0].template.parallel.world_size > 1:
            require_devices(shapes[0].template)
            start_ranks_of_rows(shapes[0].template, rank_arguments)
            return None
        made = _make_rows(_folder_of(request), shapes, failures, len(chosen), shard, told, told, models)
        if not made.outputs:
            raise_if_all_are_one(failures)
        return _result_of([made])
    request = request_of_rank(request, context)
    part = shard.part(context.rank, context.world_size)
    chosen = part.rows(rows)
    with joined_for_rows(context) as group:
        shapes, failures = shapes_of(request, chosen, told)
        for shape in shapes:
            shape.device = device_for_rows(shape.template, context)
        made = _make_rows(_folder_of(request), shapes, failures, len(chosen), part, told, watched(told), models)
        beat("rows")  # The wait for the others may be long.
        return _result_of([_Made.model_validate(each) for each in all_gather_json(made.to_json(), group)])


def _make_rows(
    folder: Path,
    shapes: Sequence[Shape],
    failures: Failures,
    count: int,
    shard: Shard,
    told: RowReporter,
    reporter: Reporter,
    models: LoadedModels,
) -> _Made:
    """Make the `count` rows of one process; `failures`, the refused ones, get those that fail.

    `reporter` gets the stages of each row, in place of `told`, to which it hands them on.
    """
    with Manifest(folder, shard) as manifest, told.shown.stage("rows", total=count, unit="rows") as progress:
        batch = _Batch(manifest, models, told, reporter, progress)
        for row, error in failures:
            batch.fail(row, None, error)
        try:
            for shape in shapes:
                batch.make(shape)
        except KeyboardInterrupt as interrupt:
            finished = f"{len(batch.outputs)} of {count} rows are finished: the same command goes on"
            raise KeyboardInterrupt(finished) from interrupt
    failures[:] = batch.failures
    outputs = {number: tuple(paths) for number, paths in batch.outputs.items()}
    failed = _failed_rows(failures)
    return _Made(rows=count, made=batch.made, outputs=outputs, failed=failed, manifest=manifest.path)


def _result_of(parts: Sequence[_Made]) -> BatchResult:
    outputs = {number: paths for part in parts for number, paths in part.outputs.items()}
    made = sum(part.made for part in parts)
    return BatchResult(
        rows=sum(part.rows for part in parts),
        made=made,
        kept=len(outputs) - made,
        failed=tuple(sorted((row for part in parts for row in part.failed), key=lambda failed: failed.row)),
        outputs=tuple(path for number in sorted(outputs) for path in outputs[number]),
        manifest=parts[0].manifest,
    )


def _failed_rows(failures: Failures) -> tuple[FailedRow, ...]:
    ordered = sorted(failures, key=lambda failure: failure[0].number)
    return tuple(FailedRow(row=row.number, prompt=row.prompt, error=error.message) for row, error in ordered)


@dataclasses.dataclass(slots=True)
class _Job:
    """A row that is being made."""

    row: Row
    key: str
    plan: ExecutionPlan
    embeds: tuple[PromptEmbeds, ...] = ()
    picture_embeds: tuple[PromptEmbeds, ...] = ()
    videos: list[GeneratedVideo] = dataclasses.field(default_factory=list)
    is_over: bool = False
    """Whether it is finished, or has failed."""

    @property
    def names(self) -> set[Path]:
        """Those of its results."""
        settings = self.plan.settings
        return {sample_files(settings, index).target for index in range(self.plan.num_samples)}


class _Batch:
    """A run over many rows."""

    def __init__(
        self,
        manifest: Manifest,
        models: LoadedModels,
        told: RowReporter,
        reporter: Reporter,
        progress: StageProgress,
    ) -> None:
        self._manifest, self._models = manifest, models
        self._told, self._reporter, self._progress = told, reporter, progress
        self.failures: Failures = []
        self.outputs: dict[int, Sequence[Path]] = {}
        """Of the rows that are finished, by their numbers."""
        self.made = 0

    def fail(self, row: Row, key: str | None, error: OsoraError) -> None:
        """Remember a row that is not made."""
        self._manifest.add_failed(row, key, error.message)
        self.failures.append((row, error))
        self._progress.advance()

    def make(self, shape: Shape) -> None:
        """Make the rows of a shape that are not finished."""
        waiting: list[tuple[Row, str]] = []
        for row in shape.rows:
            key = shape.key(row)
            finished = None if shape.template.output.overwrite else self._manifest.finished(key)
            if finished is None:
                waiting.append((row, key))
            else:
                self._finish(row, finished)
        for start in range(0, len(waiting), shape.rows_together):
            self._make_together(shape, waiting[start : start + shape.rows_together])

    def _make_together(self, shape: Shape, rows: Sequence[tuple[Row, str]]) -> None:
        jobs: list[_Job] = []
        for row, key in rows:
            with self._failing(row, key):
                jobs.append(_Job(row, key, shape.plan(row, self._models, self._reporter)))
        self._encode(jobs)
        for group in _groups([job for job in jobs if not job.is_over]):
            self._make_group(group)

    def _encode(self, jobs: Sequence[_Job]) -> None:
        """Encode all prompts; those of pictures after those of videos, since they may be of other encoders."""
        record = RunRecord(self._reporter, keeps_results=False)
        for job in jobs:
            with self._failing_job(job), computing(job.plan, self._reporter):
                job.embeds = text_embeds(job.plan, self._models, record)
        for job in jobs:
            if job.plan.picture is not None and not job.is_over:
                with self._failing_job(job), computing(job.plan, self._reporter), record.part(PICTURE) as part:
                    job.picture_embeds = text_embeds(job.plan.picture, self._models, part)

    def _make_group(self, jobs: Sequence[_Job]) -> None:
        """Make rows together, each of which is finished, or fails, by itself."""
        start = time.perf_counter()
        with Claims(repeats=True) as claims:
            works: dict[Work, _Job] = {}
            for job in jobs:
                with self._failing_job(job):
                    work = self._begin(job, claims)
                    if work is not None:
                        works[work] = job

            by_name = {sample.target: job for work, job in works.items() for sample in work.files}

            def finish(frames: SampleFrames) -> None:
                job = by_name[frames.sample.target]
                self._told.row = job.row.number
                job.videos.append(save(frames))
                if len(job.videos) == job.plan.num_samples:
                    self._done(job, (time.perf_counter() - start) / len(works))

            if works:
                make_together(list(works), self._models, self._reporter, finish=finish)
            for work, job in works.items():
                job.embeds = job.picture_embeds = ()
                if work.error is not None and not job.is_over:
                    self._fail_job(job, work.error)

    def _begin(self, job: _Job, claims: Claims) -> Work | None:
        """Return what is to be made for a row; None where all of it was made before."""
        run = Run(reporter=self._reporter, models=self._models, embeds=job.embeds, picture_embeds=job.picture_embeds)
        require_weights(job.plan, self._reporter)
        begun = begin(job.plan, run, claims)
        job.videos += begun.kept
        if not begun.work.files:
            self._done(job, 0.0)
            return None
        begun.work.stops_all = False
        return begun.work

    def _done(self, job: _Job, seconds: float) -> None:
        videos = sorted(job.videos, key=lambda video: video.seed)
        paths = [video.path for video in videos]
        self._manifest.add_done(job.row, job.key, paths, seeds=[video.seed for video in videos], seconds=seconds)
        job.is_over = True
        self._finish(job.row, paths)
        self.made += 1

    def _fail_job(self, job: _Job, error: OsoraError) -> None:
        job.is_over = True
        self.fail(job.row, job.key, error)

    @contextmanager
    def _failing_job(self, job: _Job) -> Iterator[None]:
        """Let a failure of the block end this job alone."""
        self._told.row = job.row.number
        try:
            yield
        except OsoraError as error:
            self._fail_job(job, error)

    def _finish(self, row: Row, paths: Sequence[Path]) -> None:
        self.outputs[row.number] = paths
        self._progress.advance()

    @contextmanager
    def _failing(self, row: Row, key: str) -> Iterator[None]:
        """Let a failure of the block end this row alone."""
        self._told.row = row.number
        try:
            yield
        except OsoraError as error:
            self.fail(row, key, error)


def _groups(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Yield the rows that are made together: as many as a batch takes, with references of one mode, and with results of
    different names, as one is made only once."""
    waiting: dict[str, list[_Job]] = {}
    for job in jobs:
        group = waiting.setdefault(job.plan.mode.name, [])
        is_full = len(group) * job.plan.num_samples >= job.plan.offload.batch_size
        if group and (is_full or any(job.names & other.names for other in group)):
            yield group
            waiting[job.plan.mode.name] = [job]
        else:
            group.append(job)
    yield from waiting.values()


def plan_rows(request: GenerateRequest, rows: Sequence[Row], *, shard: Shard, reporter: Reporter) -> BatchPlan:
    """Return what `generate_rows` would do: a plan for each shape, whatever the number of rows; errors are the same."""
    _folder_of(request)
    chosen = shard.rows(rows)
    told = RowReporter(reporter)
    shapes, failures = shapes_of(request, chosen, told)
    planned = []
    for shape in shapes:
        for row in shape.rows:
            told.row = row.number
            try:
                plan = shape.plan(row, None, told)
            except OsoraError as error:
                failures.append((row, error))
                continue
            planned.append(PlannedShape(rows=len(shape.rows), plan=PlanDocument.of(plan)))
            break
    return BatchPlan(
        rows=len(chosen),
        failed=_failed_rows(failures),
        shapes=tuple(planned),
    )
