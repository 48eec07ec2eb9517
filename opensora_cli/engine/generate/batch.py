"""`osora generate --prompts FILE`: many requests in one run, with the models loaded once.

The first pass encodes prompts into the prompt cache, and the second makes each row. Sidecars say which rows are done.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from pydantic import ValidationError

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, InUseError, OsoraError, RequestError
from opensora_cli.core.progress import Reporter, SilentReporter, StageProgress
from opensora_cli.core.rank_link import beat
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.temporary_files import remove_left
from opensora_cli.engine.components.weights import require_weights_of
from opensora_cli.engine.generate.chain import require_fit, require_weights
from opensora_cli.engine.generate.dry_run import PlanDocument, plan_generation
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.pipeline import computing
from opensora_cli.engine.generate.prompts import Row
from opensora_cli.engine.generate.ranks import device_for_rows, joined_for_rows, require_devices, start_ranks, watched
from opensora_cli.engine.generate.request import request_of_rank, resolve
from opensora_cli.engine.generate.run import generate, plan_here
from opensora_cli.engine.generate.sidecar import choose_outputs
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import named_format
from opensora_cli.settings.layers import explain
from opensora_cli.settings.load import GenerateRequest

_ROWS_AHEAD = 64
"""Rows whose prompts are encoded before the first of them is made; the prompt cache has a limit."""
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

    @classmethod
    def of(cls, row: Row, error: OsoraError) -> "FailedRow":
        """Return the document of a row."""
        return cls(row=row.number, prompt=row.prompt, name=row.name, error=error.message)


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
        """Return the path of every result."""
        return [str(path) for path in self.outputs]

    def raise_for_problems(self) -> None:
        """Raise BatchError if rows failed."""
        if self.failed:
            others = "the others are finished; " if self.outputs else ""
            raise BatchError(
                "\n".join([f"{len(self.failed)} of {self.rows} rows failed", *_failed_lines(self.failed)]),
                hint=f"{others}--json lists all, and the same command tries these again",
            )


def _failed_lines(failed: Sequence[FailedRow]) -> list[str]:
    """Return a line for each of the first failed rows, and one with the number of the others."""
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
        """Return the plans as lines of text. The plan that needs the most memory comes first."""
        shapes = "1 shape" if len(self.shapes) == 1 else f"{len(self.shapes)} shapes"
        head = f"rows      {self.rows} of {shapes}, and {len(self.failed)} that would be refused"
        largest_first = sorted(self.shapes, key=lambda shape: -shape.plan.peak_bytes)
        plans = (line for shape in largest_first for line in (*shape.plan.lines(), f"rows      {shape.rows}", ""))
        return [*plans, head, *_failed_lines(self.failed)]

    def raise_for_problems(self) -> None:
        """Raise HardwareError if a stage of a shape needs more memory than may be used."""
        for shape in self.shapes:
            shape.plan.raise_for_problems()


class _RowReporter(SilentReporter):
    """Reporter of saved videos, of warnings with the number of their row, and of notes about the machine, each once."""

    def __init__(self, reporter: Reporter) -> None:
        self.row = 0
        self._reporter = reporter
        self._shown: set[str] = set()

    def note(self, text: str) -> None:
        kind = text.partition(":")[0].partition(" ")[0]
        # The number of threads is chosen for a row, and then a setting of it.
        line = kind if kind == "threads" else text
        if kind in _MACHINE_NOTES and line not in self._shown:
            self._shown.add(line)
            self._reporter.note(text)

    def warn(self, text: str) -> None:
        if (line := f"row {self.row}: {text}") not in self._shown:
            self._shown.add(line)
            self._reporter.warn(line)


class _Part(Document):
    """Rows of one process."""

    made: int
    outputs: dict[int, tuple[Path, ...]]
    """Results of the finished rows, by row number."""
    failed: tuple[FailedRow, ...]


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
    _refuse_one_file(request)
    with LoadedModels(stay=True) as models:
        if context is None:
            own = _OwnRows(request, rows, models, reporter)
            if own.valid:
                first = own.valid[0][1]
                if first.parallel.world_size > 1:
                    require_devices(first)
                    start_ranks(first, "generate", rank_arguments, gives_settings=False)
                    return None
                require_weights_of(first)
            parts = [own.make(own.shown)]
            if not own.outputs and len({error.message for _, error in own.errors}) == 1:
                raise own.errors[0][1]  # What is wrong with every row is wrong with the request.
        else:
            own_rows = rows[context.rank :: context.world_size]
            with joined_for_rows(context) as group:
                own = _OwnRows(request_of_rank(request, context), own_rows, models, reporter)
                own.device = device_for_rows(own.valid[0][1], context) if own.valid else None
                part = own.make(watched(own.shown))
                beat("rows")  # The other ranks may take long.
                parts = [_Part.model_validate(each) for each in all_gather_json(part.to_json(), group)]
    outputs = {number: paths for part in parts for number, paths in part.outputs.items()}
    made = sum(part.made for part in parts)
    return BatchResult(
        rows=len(rows),
        made=made,
        kept=len(outputs) - made,
        failed=tuple(sorted((row for part in parts for row in part.failed), key=lambda failed: failed.row)),
        outputs=tuple(path for number in sorted(outputs) for path in outputs[number]),
    )


def plan_rows(request: GenerateRequest, rows: Sequence[Row], *, reporter: Reporter) -> BatchPlan:
    """Return a plan for each group of rows that differ only in prompts, seed, references and name."""
    _refuse_one_file(request)
    shown = _RowReporter(reporter)
    failed: list[FailedRow] = []
    plans: dict[str, PlanDocument] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        shown.row = row.number
        try:
            settings = _row_settings(row, request, shown)
            shape = settings.model_dump_json(exclude=_OF_A_ROW)
            if shape not in plans:
                plans[shape] = plan_generation(settings, reporter=shown, on=request.on)
            counts[shape] += 1
        except OsoraError as error:
            failed.append(FailedRow.of(row, error))
    shapes = tuple(PlannedShape(rows=counts[shape], plan=plan) for shape, plan in plans.items())
    return BatchPlan(rows=len(rows), failed=tuple(failed), shapes=shapes)


class _OwnRows:
    """Rows of this process, with models that stay loaded."""

    def __init__(self, request: GenerateRequest, rows: Sequence[Row], models: LoadedModels, reporter: Reporter) -> None:
        self._count, self._models, self._reporter = len(rows), models, reporter
        self.shown = _RowReporter(reporter)
        self.device: str | None = None
        """Device of this rank; None for the device of the settings."""
        self.valid: list[tuple[Row, GenerateSettings]] = []
        self.outputs: dict[int, tuple[Path, ...]] = {}
        self.errors: list[tuple[Row, OsoraError]] = []
        for row in rows:
            with self._failing(row):
                self.valid.append((row, _row_settings(row, request, self.shown)))
        for line in _failed_lines(self._failed) if self.valid else ():
            reporter.warn(f"{line}; the others are made")

    @property
    def _failed(self) -> tuple[FailedRow, ...]:
        return tuple(FailedRow.of(row, error) for row, error in self.errors)

    def make(self, reporter: Reporter) -> _Part:
        """Make the rows that are not finished; `reporter` is that of each row."""
        made, in_use = 0, list[tuple[Row, GenerateSettings]]()
        with self._reporter.stage("rows", total=self._count, unit="rows") as progress:

            def make(row: Row, settings: GenerateSettings) -> None:
                nonlocal made
                with self._failing(row, progress):
                    try:
                        result = generate(settings, reporter=reporter, models=self._models, device=self.device)
                    except InUseError:  # Another process makes it now.
                        in_use.append((row, settings))
                        return
                    assert result is not None
                    made += not all(video.made_before for video in result.videos)
                    self._finish(row, [video.path for video in result.videos], progress)

            progress.advance(len(self.errors))
            try:
                for start in range(0, len(self.valid), _ROWS_AHEAD):
                    rows = self.valid[start : start + _ROWS_AHEAD]
                    for left in [self._encode(*row, reporter, progress) for row in rows]:
                        if left is not None:
                            make(*left)
                while waiting := in_use[:]:
                    in_use.clear()
                    for each in waiting:
                        make(*each)
                    beat("rows")
                    if in_use:
                        time.sleep(_LOOK_S)
            except KeyboardInterrupt as interrupt:
                finished = f"{len(self.outputs)} of {self._count} rows are finished: the same command continues"
                raise KeyboardInterrupt(finished) from interrupt
        return _Part(made=made, outputs=self.outputs, failed=self._failed)

    def _encode(
        self, row: Row, settings: GenerateSettings, reporter: Reporter, progress: StageProgress
    ) -> tuple[Row, GenerateSettings] | None:
        """Encode the prompts of a row into the prompt cache; return what to make, None if it is finished or failed."""
        with self._failing(row, progress):
            chain = plan_here(settings, self._models, reporter=self.shown, device=self.device).with_threads()
            plan, files = chain.video, choose_outputs(chain)
            if all(sample.made_before for sample in files):
                # A run that was killed right after the result may have left temporary files.
                remove_left(files[0].media.parent)
                self._finish(row, [sample.media for sample in files], progress)
                return None
            if plan.settings.runtime.prompt_cache and self._models.prompts.is_writable and not plan.decodes_only:
                require_weights(chain, reporter)
                require_fit(chain)
                with computing(plan, reporter):
                    for each in chain.by_role.values():
                        text_embeds(each, self._models, Events(reporter))
            # These settings have the number of threads of a CPU, on which embeddings depend.
            return row, chain.settings
        return None

    def _finish(self, row: Row, paths: Sequence[Path], progress: StageProgress) -> None:
        self.outputs[row.number] = tuple(paths)
        progress.advance()

    @contextmanager
    def _failing(self, row: Row, progress: StageProgress | None = None) -> Iterator[None]:
        """Record an error of the block as the failure of a row."""
        self.shown.row = row.number
        try:
            yield
        except OsoraError as error:
            self.errors.append((row, error))
            if progress is not None:
                progress.advance()


def _row_settings(row: Row, request: GenerateRequest, reporter: Reporter) -> GenerateSettings:
    """Return the settings of a row."""
    if row.problem is not None:
        raise RequestError(row.problem)
    request = replace(request, overrides={**request.overrides, **row.given})
    settings = resolve(request, reporter=reporter, is_row=True)
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
    try:
        return settings.replace(changes)
    except ValidationError as error:
        raise RequestError("; ".join(explain(error))) from error


def _refuse_one_file(request: GenerateRequest) -> None:
    """Raise RequestError if the request names one file for the results of all rows."""
    path = request.text("output.path")
    if path is not None and named_format(path) is not None:
        raise RequestError(f"output.path={path} is one file: name a folder for the results of all rows")
