"""`osora generate --prompts FILE`: many requests in one run, with the models loaded once.

The first pass encodes prompts, and the second makes each row. Sidecars say which rows are done.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, InUseError, OsoraError, RequestError
from opensora_cli.core.files import remove_left
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import RankContext, beat
from opensora_cli.engine.components.weights import require_weights_of
from opensora_cli.engine.generate.chain import require_runnable
from opensora_cli.engine.generate.dry_run import PlanDocument, plan_generation
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.pipeline import computing
from opensora_cli.engine.generate.prompts import Row
from opensora_cli.engine.generate.ranks import device_for_rows, joined_for_rows, require_devices, start_ranks
from opensora_cli.engine.generate.request import replaced, resolve
from opensora_cli.engine.generate.run import generate, plan_here
from opensora_cli.engine.generate.sidecar import choose_outputs
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.engine.launch.rank import WatchedReporter
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import named_format
from opensora_cli.settings.load import GenerateRequest

_ROWS_AHEAD = 32
"""Rows whose prompts are encoded before the first of them is made; memory keeps 128 texts."""
_LOOK_S = 1.0
"""Seconds between two looks at rows that another process makes."""
_LISTED_ROWS = 20
_OF_A_ROW: Mapping[str, bool | set[str]] = {
    **dict.fromkeys(("prompt", "negative_prompt", "output"), True),
    "sampling": {"seed"},
    "condition": {"references"},
}
"""Settings that may differ between rows with the same plan."""
_MACHINE_NOTES = ("saved", "model", "attention", "threads", "offload", "memory", "weights", "refine")
"""First words of the notes that are shown, each once."""


class FailedRow(Document):
    """Row that failed."""

    row: int
    """Number of the row, from 1."""
    prompt: str
    name: str | None = None
    """Name of the result in the table; None without one."""
    error: str


class BatchResult(Document):
    """Results of a run over many prompts."""

    SCHEMA = "osora.batch/3"

    rows: int
    """Number of requested rows, of the shard if there is one."""
    made: int
    kept: int
    """Number of rows that an earlier run finished."""
    failed: tuple[FailedRow, ...]
    outputs: tuple[Path, ...]
    """Results of all finished rows, in the order of the file."""

    def lines(self) -> list[str]:
        return [str(path) for path in self.outputs]

    def raise_for_problems(self) -> None:
        if self.failed:
            others = "the others are finished; " if self.outputs else ""
            raise BatchError(
                "\n".join([f"{len(self.failed)} of {self.rows} rows failed", *_failed_lines(self.failed)]),
                hint=f"{others}--json lists all, and the same command tries these again",
            )


def _failed_lines(failed: Sequence[FailedRow]) -> list[str]:
    lines = [f"row {each.row}: {each.error}" for each in failed[:_LISTED_ROWS]]
    return lines if len(failed) <= _LISTED_ROWS else [*lines, f"and {len(failed) - _LISTED_ROWS} more"]


class PlannedShape(Document):
    """Rows that differ only in prompt, seed, references and name."""

    rows: int
    plan: PlanDocument
    """Plan of the first row."""


class BatchPlan(Document):
    """Plan of a run over many prompts."""

    SCHEMA = "osora.batch-plan/4"

    rows: int
    failed: tuple[FailedRow, ...]
    """Rows that would be refused."""
    shapes: tuple[PlannedShape, ...]

    def lines(self) -> list[str]:
        shapes = "1 shape" if len(self.shapes) == 1 else f"{len(self.shapes)} shapes"
        head = f"rows      {self.rows} of {shapes}, and {len(self.failed)} that would be refused"
        largest_first = sorted(self.shapes, key=lambda shape: -shape.plan.peak_bytes)
        plans = (line for shape in largest_first for line in (*shape.plan.lines(), f"rows      {shape.rows}", ""))
        return [*plans, head, *_failed_lines(self.failed)]

    def raise_for_problems(self) -> None:
        for shape in self.shapes:
            shape.plan.raise_for_problems()


def plan_rows(request: GenerateRequest, rows: Sequence[Row], *, reporter: Reporter) -> BatchPlan:
    """Return a plan for each group of rows that differ only in prompts, seed, references and name."""
    own = _Rows(request, rows, reporter)
    plans: dict[str, PlanDocument] = {}
    counts: Counter[str] = Counter()
    for row, settings in own.valid:
        with own.failing(row):
            shape = settings.model_dump_json(exclude=_OF_A_ROW)
            if shape not in plans:
                plans[shape] = plan_generation(settings, reporter=own.shown, on=request.on)
            counts[shape] += 1
    shapes = tuple(PlannedShape(rows=counts[shape], plan=plan) for shape, plan in plans.items())
    return BatchPlan(rows=len(rows), failed=_in_order(own.failed), shapes=shapes)


def generate_rows(
    request: GenerateRequest,
    rows: Sequence[Row],
    *,
    reporter: Reporter,
    context: RankContext | None = None,
    rank_arguments: Sequence[str] = (),
) -> BatchResult | None:
    """Make and save the videos of every row, with models that stay loaded.

    A row with results of the same request is kept, and a row that fails stops no other. Processes that
    work on the same rows make each row once. Several devices make different rows, in ranks that this process starts.

    Args:
        context: set in one of several ranks, each of which returns the result of all ranks.
        rank_arguments: arguments of `osora generate` for ranks that are started here.

    Returns None if ranks were started; rank 0 prints the result.
    """
    with LoadedModels(stay=True) as models:
        if context is None:
            own = _Rows(request, rows, reporter)
            if own.valid:
                first = own.valid[0][1]
                if first.parallel.world_size > 1:
                    require_devices(first)
                    start_ranks(first, "generate", rank_arguments, gives_settings=False)
                    return None
                require_weights_of(first)
            parts = [own.make(models, own.shown)]
            if own.error is not None and not own.outputs and len({row.error for row in own.failed}) == 1:
                raise own.error  # What is wrong with every row is wrong with the request.
        else:
            with joined_for_rows(context) as group:
                own = _Rows(request, rows[context.rank :: context.world_size], reporter, context)
                device = device_for_rows(own.valid[0][1], context) if own.valid else None
                part = own.make(models, WatchedReporter(own.shown), device=device)
                beat("rows")  # The other ranks may take long.
                parts = [_Part.model_validate(each) for each in all_gather_json(part.to_json(), group)]
    outputs = {number: paths for part in parts for number, paths in part.outputs.items()}
    made = sum(part.made for part in parts)
    return BatchResult(
        rows=len(rows),
        made=made,
        kept=len(outputs) - made,
        failed=_in_order([row for part in parts for row in part.failed]),
        outputs=tuple(path for number in sorted(outputs) for path in outputs[number]),
    )


def _in_order(failed: Sequence[FailedRow]) -> tuple[FailedRow, ...]:
    return tuple(sorted(failed, key=lambda each: each.row))


class _RowReporter(SilentReporter):
    """Reporter of saved videos, of warnings with the number of their row, and of notes about the machine, each once."""

    def __init__(self, reporter: Reporter) -> None:
        self.row = 0
        self._reporter = reporter
        self._shown: set[str] = set()

    def note(self, text: str) -> None:
        if text.partition(":")[0].partition(" ")[0] in _MACHINE_NOTES and text not in self._shown:
            self._shown.add(text)
            self._reporter.note(text)

    def warn(self, text: str) -> None:
        if (line := f"row {self.row}: {text}") not in self._shown:
            self._shown.add(line)
            self._reporter.warn(line)


class _Part(Document):
    """Results of one process."""

    made: int
    outputs: dict[int, tuple[Path, ...]]
    """Results of the finished rows, by row number."""
    failed: tuple[FailedRow, ...]


class _Rows:
    """Rows of this process."""

    def __init__(
        self, request: GenerateRequest, rows: Sequence[Row], reporter: Reporter, context: RankContext | None = None
    ) -> None:
        path = request.text("output.path")
        if path is not None and named_format(path) is not None:
            raise RequestError(f"output.path={path} is one file: name a folder for the results of all rows")
        self._count, self._reporter = len(rows), reporter
        self.shown = _RowReporter(reporter)
        self.valid: list[tuple[Row, GenerateSettings]] = []
        self.outputs: dict[int, tuple[Path, ...]] = {}
        self.failed: list[FailedRow] = []
        self.error: OsoraError | None = None
        for row in rows:
            with self.failing(row):
                self.valid.append((row, _row_settings(row, request, self.shown, context)))

    @contextmanager
    def failing(self, row: Row) -> Iterator[None]:
        """Record an error of the block as the failure of a row."""
        self.shown.row = row.number
        try:
            yield
        except OsoraError as error:
            self.error = error
            self.failed.append(FailedRow(row=row.number, prompt=row.prompt, name=row.name, error=error.message))

    def make(self, models: LoadedModels, of_row: Reporter, *, device: str | None = None) -> _Part:
        """Make the rows that are not finished. `of_row` is the reporter of each, and `device` that of a rank."""
        for line in _failed_lines(self.failed) if self.valid else ():
            self._reporter.warn(f"{line}; the others are made")
        made, left, done = 0, self.valid, 0
        with self._reporter.stage("rows", total=self._count, unit="rows") as progress:

            def advance() -> None:
                nonlocal done
                before, done = done, len(self.outputs) + len(self.failed)
                progress.advance(done - before)

            advance()
            try:
                while left:
                    encoded, left = self._encoded(left[:_ROWS_AHEAD], models, of_row, device), left[_ROWS_AHEAD:]
                    advance()
                    in_use = []
                    for row, settings in encoded:
                        with self.failing(row):
                            try:
                                result = generate(settings, reporter=of_row, models=models, device=device)
                            except InUseError:  # Another process makes it now.
                                in_use.append((row, settings))
                                continue
                            assert result is not None
                            made += not all(video.made_before for video in result.videos)
                            self.outputs[row.number] = tuple(video.path for video in result.videos)
                        advance()
                    if in_use and not left:
                        beat("rows")
                        time.sleep(_LOOK_S)
                    left = [*left, *in_use]
            except KeyboardInterrupt as interrupt:
                finished = f"{len(self.outputs)} of {self._count} rows are finished: the same command continues"
                raise KeyboardInterrupt(finished) from interrupt
        return _Part(made=made, outputs=self.outputs, failed=tuple(self.failed))

    def _encoded(
        self, rows: Sequence[tuple[Row, GenerateSettings]], models: LoadedModels, of_row: Reporter, device: str | None
    ) -> list[tuple[Row, GenerateSettings]]:
        """Encode the prompts of rows; return the rows that are neither finished nor failed."""
        left = []
        for row, settings in rows:
            with self.failing(row):
                chain = plan_here(settings, models, reporter=self.shown, device=device)
                plan, files = chain.video, choose_outputs(chain)
                if all(sample.made_before for sample in files):
                    # A run that was killed right after the result may have left temporary files.
                    remove_left(files[0].media.parent)
                    self.outputs[row.number] = tuple(sample.media for sample in files)
                    continue
                if not plan.decodes_only:
                    require_runnable(chain, of_row)
                    with computing(plan, of_row):
                        for each in chain.by_role.values():
                            text_embeds(each, models, Events(of_row))
                # These settings have the number of threads of a CPU, on which embeddings depend.
                left.append((row, chain.settings))
        return left


def _row_settings(
    row: Row, request: GenerateRequest, reporter: Reporter, context: RankContext | None
) -> GenerateSettings:
    if row.problem is not None:
        raise RequestError(row.problem)
    request = replace(request, overrides={**request.overrides, **row.given})
    settings = resolve(request, reporter=reporter, context=context, is_row=True)
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
    changes: dict[str, object] = {"parallel.data_parallel_degree": parallel.world_size}
    if row.name is not None:
        ending = f".{settings.output_format}"
        name = row.name if row.name.lower().endswith(ending) else row.name + ending
        changes["output.path"] = str(Path(settings.output.path) / name)
    return replaced(settings, changes)
