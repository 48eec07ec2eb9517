"""Several seeds to choose from: stopped early, not decoded, and shown on one sheet."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opensora_cli.core.exceptions import MediaError, OutputError
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.generate.documents import ExploredSeed
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.make import denoised_clips
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles, preview_path, sheet_path
from opensora_cli.engine.generate.work import Work
from opensora_cli.media.read import read_video
from opensora_cli.media.sheets import contact_sheet, film_strip
from opensora_cli.media.write import write_media


def explore(work: Work, models: LoadedModels, record: RunRecord, *, ranks: Ranks | None) -> None:
    """Denoise every sample until `sampling.stop_at`, where it is saved with a preview; what has come as far is kept.

    Arguments and errors are those of `make_videos`.
    """
    rest = [sample for sample in work.files if not is_made(work.plan, sample)]
    if rest:
        denoised_clips([replace(work, files=rest)], models, record, ranks=ranks)


def explored_of(plan: ExecutionPlan, files: Sequence[SampleFiles]) -> tuple[ExploredSeed, ...]:
    """Return what `explore` leaves of each sample."""
    explored = []
    for sample in files:
        assert sample.latents is not None
        steps = sample.saved_steps if is_made(plan, sample) else plan.settings.sampling.stop_at
        preview = preview_path(sample.target)
        there = preview if preview.is_file() else None
        command = sample.command(sample.latents, is_begun=steps is not None)
        explored.append(
            ExploredSeed(seed=sample.seed, state=sample.latents, steps=steps, preview=there, command=command)
        )
    return tuple(explored)


def is_made(plan: ExecutionPlan, sample: SampleFiles) -> bool:
    """Return whether the latents of a sample that are there have been through the steps that are asked for, or more."""
    stop = plan.settings.sampling.stop_at
    assert stop is not None
    return sample.saved is not None and (sample.saved_steps is None or sample.saved_steps >= stop)


def write_sheet(plan: ExecutionPlan, files: Sequence[SampleFiles], reporter: Reporter) -> Path | None:
    """Write the sheet with the last preview of each sample, finished ones too; None, with a warning, if that fails."""
    path = sheet_path(files[0].target)
    cells = []
    for sample in files:
        try:
            strip_HWC = film_strip(read_video(preview_path(sample.target)).frames_THWC)
        except MediaError:
            strip_HWC = None
        cells.append((f"seed {sample.seed}" + (" (finished)" if sample.made_before else ""), strip_HWC))
    try:
        return write_media([contact_sheet(cells)[None]], path, fps=1, format=MediaFormat.PNG)
    except OutputError as error:
        reporter.warn(f"there is no sheet of the seeds: {error.message}")
        return None
