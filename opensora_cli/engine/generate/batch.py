"""`osora generate --prompts FILE`: many requests in one run, with the models loaded once."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from pydantic import ValidationError

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.progress import Reporter, SilentReporter, StageProgress
from opensora_cli.core.rank_link import beat
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.threads import ThreadChoice
from opensora_cli.engine.components.weights import require_weights_of
from opensora_cli.engine.generate.documents import BatchResult, FailedRow
from opensora_cli.engine.generate.dry_run import BatchPlan, PlanDocument, PlannedShape
from opensora_cli.engine.generate.events import RunRecord
from opensora_cli.engine.generate.manifest import Manifest
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import request_hashes
from opensora_cli.engine.generate.pipeline import computing
from opensora_cli.engine.generate.plan import Chain
from opensora_cli.engine.generate.planning import require_fit, require_weights
from opensora_cli.engine.generate.prompts import OWN_KEYS, Row, Shard
from opensora_cli.engine.generate.ranks import (
    device_for_rows,
    joined_for_rows,
    require_devices,
    start_ranks_of_rows,
)
from opensora_cli.engine.generate.request import request_of_rank, resolve
from opensora_cli.engine.generate.run import Run, carry_out, completed, plan_here, watched
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.settings.explain import Given, explain
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest
from opensora_cli.settings.output import OutputSettings
from opensora_cli.settings.sampling import SamplingSettings

_DEFAULTS: Mapping[str, object] = {
    "prompt": "",
    "negative_prompt": "",
    "sampling.seed": SamplingSettings().seed,
    "condition.references": (),
}
_ROWS_AHEAD = 64
"""Rows whose prompts are encoded before the first of them is made; the prompt cache has a limit."""

Failures = list[tuple[Row, OsoraError]]


class RowReporter(SilentReporter):
    """Passes on warnings with the number of their row, and notes about the machine once."""

    def __init__(self, reporter: Reporter) -> None:
        self.shown = reporter
        """Reporter of the run."""
        self._noted: set[str] = set()
        self.row = 0

    def note(self, text: str) -> None:
        """Show a note about the machine, once."""
        kind = text.partition(":")[0]
        if kind in ("model", "attention", "threads", "memory", "weights") and text not in self._noted:
            self._noted.add(text)
            self.shown.note(text)

    def warn(self, text: str) -> None:
        """Show a warning with the number of its row, once: a row is planned, and its prompt read, twice."""
        if (line := f"row {self.row}: {text}") not in self._noted:
            self._noted.add(line)
            self.shown.warn(line)


class _Requests:
    """Settings and plan of each row.

    `models` are loaded models that the plans may use; None for a dry run. `reporter` is the reporter of the rows.
    """

    def __init__(self, request: GenerateRequest, models: LoadedModels | None, reporter: RowReporter) -> None:
        self._request, self._models, self._reporter = request, models, reporter
        self._templates: dict[object, GenerateSettings] = {}
        self._threads: dict[object, ThreadChoice | None] = {}
        given = {key: request.find(key) for key in OWN_KEYS}
        self._defaults = {key: _DEFAULTS[key] if at is None else at.value for key, at in given.items()}
        self.device: str | None = None
        """Device of this rank; None for the device of the settings."""

    def settings(self, row: Row) -> GenerateSettings:
        """Return the settings of a row.

        Raises:
            RequestError: the row breaks a rule, or its devices would share a video.
            FileProblem: a file of settings is missing or broken.
        """
        if row.problem is not None:
            raise RequestError(row.problem)
        template = self._templates.get(row.shape)
        if template is None:
            # A template is valid only with a prompt: the first row lends its own.
            own = {key: Given(value, f"row {row.number}") for key, value in row.own.items()}
            request = replace(self._request, overrides={**self._request.overrides, **dict(row.shape), **own})
            template = _one_device_each(resolve(request, reporter=self._reporter, is_row=True).settings)
            self._templates[row.shape] = template
        changes = {**self._defaults, **row.own}
        if row.name is not None:
            kind = template.output_format
            ending = "" if row.name.lower().endswith(f".{kind}") else f".{kind}"
            changes["output.path"] = str(Path(template.output.path) / f"{row.name}{ending}")
        try:
            return template.replace(changes)
        except ValidationError as error:
            raise RequestError("; ".join(explain(error))) from error

    def plan(self, row: Row) -> Chain:
        """Return the jobs of a row. Rows of one shape use the same number of threads; errors as in `generate`."""
        settings = completed(self.settings(row), self._reporter)
        chain = plan_here(settings, self._models, device=self.device, threads=self._threads.get(row.shape))
        chain = chain.with_threads()
        self._threads[row.shape] = chain.video.threads
        return chain


def _one_device_each(settings: GenerateSettings) -> GenerateSettings:
    """Return settings for which each device makes whole videos.

    Raises RequestError if devices would share a video, or no video would be made.
    """
    if settings.output.explore:
        raise RequestError("output.explore=true leaves no videos, and --prompts makes them: drop one of them")
    parallel = settings.parallel
    sharing = {name: degree for name, degree in parallel.degrees.items() if name != "data_parallel_degree"}
    if prod(sharing.values()) > 1 or (parallel.data_parallel_degree or parallel.world_size) != parallel.world_size:
        named = ", ".join(f"parallel.{name}={degree}" for name, degree in parallel.degrees.items())
        raise RequestError(
            f"with --prompts each of the {parallel.world_size} devices makes videos of its own, and {named} lets some "
            "share one",
            hint="drop it, or make a video that is too large for one device by a run of its own",
        )
    return settings.replace({"parallel.data_parallel_degree": parallel.world_size})


class _Made(Document):
    """Rows of one process."""

    rows: int
    made: int
    outputs: dict[int, tuple[Path, ...]]
    """Results of the finished rows, by row number."""
    failed: tuple[FailedRow, ...]
    manifest: Path


def generate_rows(
    request: GenerateRequest,
    rows: Sequence[Row],
    *,
    shard: Shard,
    reporter: Reporter,
    context: RankContext | None = None,
    rank_arguments: Sequence[str] = (),
) -> BatchResult | None:
    """Make and save the videos of every row of this shard, with models that stay loaded.

    The prompts of many rows are encoded first, into the prompt cache, so that the encoders are loaded once also where
    they do not fit beside the transformer. Then the rows are made one after the other. Finished rows are kept, and a
    row that fails stops no other. `request` has the settings that all rows share.

    Several devices make rows of their own, in ranks that this process starts with the command line `rank_arguments`.
    It then returns None, since rank 0 prints. `context` is set in a rank, which returns the result of all ranks.

    Raises:
        RequestError: the results would be one file, or all rows contradict themselves in the same way.
        CheckpointError: weights are missing.
        OutputError: the manifest cannot be written.
        HardwareError: there are fewer devices.
        RankFailure: a rank failed; finished rows are kept.
        KeyboardInterrupt: its argument says how many rows are finished.
    """
    shown = RowReporter(reporter)
    if context is not None:
        request = request_of_rank(request, context)
        shard = shard.part(context.rank, context.world_size)
    chosen = shard.rows(rows)
    with LoadedModels(stay=True) as models:
        batch = _Batch(request, chosen, models, shown)
        return _generate_rows(batch, shard, shown, context, rank_arguments)


def _generate_rows(
    batch: "_Batch", shard: Shard, shown: RowReporter, context: RankContext | None, rank_arguments: Sequence[str]
) -> BatchResult | None:
    if context is not None:
        with joined_for_rows(context) as group:
            first = batch.first_settings()
            if first is not None:
                batch.requests.device = device_for_rows(first, context)
            made = batch.make(shard, watched(shown))
            beat("rows")  # The other ranks may take long.
            return _result_of([_Made.model_validate(each) for each in all_gather_json(made.to_json(), group)])
    first = batch.first_settings()
    if first is None:
        batch.raise_if_one_failure()
    elif first.parallel.world_size > 1:
        require_devices(first)
        start_ranks_of_rows(first, rank_arguments)
        return None
    else:
        require_weights_of(first)
    made = batch.make(shard, shown)
    if not made.outputs:
        batch.raise_if_one_failure()
    return _result_of([made])


class _Batch:
    """Rows of one process."""

    def __init__(self, request: GenerateRequest, rows: list[Row], models: LoadedModels, shown: RowReporter) -> None:
        self.requests = _Requests(request, models, shown)
        self._folder, self._rows, self._models, self._shown = _folder_of(request), rows, models, shown
        self._failures: Failures = []
        self._outputs: dict[int, Sequence[Path]] = {}
        self._made = 0

    def first_settings(self) -> GenerateSettings | None:
        """Return the settings of the first valid row; None, with the failures of all rows, if there is none."""
        for row in self._rows:
            try:
                return self.requests.settings(row)
            except OsoraError as error:
                self._failures.append((row, error))
        return None

    def raise_if_one_failure(self) -> None:
        """Raise the error of all rows if they have the same: it is the error of the request."""
        if len({error.message for _, error in self._failures}) == 1:
            raise self._failures[0][1]

    def make(self, shard: Shard, reporter: Reporter) -> _Made:
        """Make the rows that are not finished. `reporter` gets the stages of each row."""
        self._failures.clear()
        with (
            Manifest(self._folder, shard) as manifest,
            self._shown.shown.stage("rows", total=len(self._rows), unit="rows") as progress,
        ):
            try:
                for start in range(0, len(self._rows), _ROWS_AHEAD):
                    self._make_some(self._rows[start : start + _ROWS_AHEAD], manifest, reporter, progress)
            except KeyboardInterrupt as interrupt:
                finished = f"{len(self._outputs)} of {len(self._rows)} rows are finished: the same command goes on"
                raise KeyboardInterrupt(finished) from interrupt
        return _Made(
            rows=len(self._rows),
            made=self._made,
            outputs={number: tuple(paths) for number, paths in self._outputs.items()},
            failed=_failed_rows(self._failures),
            manifest=manifest.path,
        )

    def _make_some(self, rows: Sequence[Row], manifest: Manifest, reporter: Reporter, progress: StageProgress) -> None:
        """Encode the prompts of some rows, and then make the rows."""
        waiting: list[tuple[Row, str]] = []
        for row in rows:
            with self._failing(row, None, manifest, progress):
                chain = self.requests.plan(row)
                key = _key(chain, row)
                finished = None if chain.settings.output.overwrite else manifest.finished(key)
                if finished is not None:
                    self._outputs[row.number] = finished
                    progress.advance()
                    continue
                _encode(chain, self._models, reporter)
                waiting.append((row, key))
        for row, key in waiting:
            with self._failing(row, key, manifest, progress):
                start = time.perf_counter()
                # Planned again: by now the cache has its prompts, and other models are loaded.
                made = carry_out(self.requests.plan(row), Run(reporter=reporter, models=self._models), repeats=True)
                paths, seeds = [video.path for video in made.videos], [video.seed for video in made.videos]
                manifest.add_done(row, key, paths, seeds=seeds, seconds=time.perf_counter() - start)
                self._outputs[row.number] = paths
                self._made += 1
                progress.advance()

    @contextmanager
    def _failing(self, row: Row, key: str | None, manifest: Manifest, progress: StageProgress) -> Iterator[None]:
        """Let a failure of the block end this row alone."""
        self._shown.row = row.number
        try:
            yield
        except OsoraError as error:
            manifest.add_failed(row, key, error.message)
            self._failures.append((row, error))
            progress.advance()


def _encode(chain: Chain, models: LoadedModels, reporter: Reporter) -> None:
    """Encode the prompts of a row into the prompt cache; nothing without a writable cache."""
    plan = chain.video
    if not plan.settings.runtime.prompt_cache or not models.prompts.is_writable or plan.decodes_only:
        return
    require_weights(chain, reporter)
    require_fit(chain)
    record = RunRecord(reporter, keeps_results=False)
    with computing(plan, reporter):
        for each in dict(chain.jobs).values():
            text_embeds(each, models, record)


def _key(chain: Chain, row: Row) -> str:
    """Return the hash of everything that decides the results of a row, the key of its line in the manifest."""
    request, settings = request_hashes(chain), chain.settings
    seeds = range(settings.sampling.seed, settings.sampling.seed + chain.num_samples)
    described = [row.name, *(request(seed, settings.output_format) for seed in seeds)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _folder_of(request: GenerateRequest) -> Path:
    """Return the folder of all results. Raises RequestError if the request names one file."""
    given = request.find("output.path")
    output = OutputSettings() if given is None else OutputSettings(path=str(given.value))
    if output.named_format is not None:
        raise RequestError(f"output.path={output.path} is one file: name a folder for the results of all rows")
    return Path(output.path)


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


def plan_rows(request: GenerateRequest, rows: Sequence[Row], *, shard: Shard, reporter: Reporter) -> BatchPlan:
    """Return a plan for each shape of rows, without making any. Errors are those of `generate_rows`."""
    _folder_of(request)
    chosen, shown = shard.rows(rows), RowReporter(reporter)
    requests = _Requests(request, None, shown)
    failures: Failures = []
    shapes: dict[object, PlanDocument] = {}
    counts: dict[object, int] = {}
    for row in chosen:
        if row.problem is None and row.shape in shapes:
            counts[row.shape] += 1
            continue
        shown.row = row.number
        try:
            shapes[row.shape], counts[row.shape] = PlanDocument.of(requests.plan(row)), 1
        except OsoraError as error:
            failures.append((row, error))
    planned = tuple(PlannedShape(rows=counts[shape], plan=plan) for shape, plan in shapes.items())
    return BatchPlan(rows=len(chosen), failed=_failed_rows(failures), shapes=planned)
