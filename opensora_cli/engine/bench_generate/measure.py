"""One run of a setting: the video in memory, and what it took."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from opensora_cli.core.progress import Reporter, StageProgress
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.engine.bench_generate.report import is_loading
from opensora_cli.engine.components.hardware import peak_memory_gib, start_peak_memory
from opensora_cli.engine.generate.decode import SampleFrames
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.make import computing, make_videos
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.references import Reference
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import sample_files
from opensora_cli.engine.generate.work import Work

_WARM_STEPS = 2
"""From the second on there are latents besides the noise."""
_EVALUATIONS = "evaluations"


@dataclass(frozen=True, slots=True)
class Video:
    """What a run has made."""

    latents: tuple[torch.Tensor, ...]
    """The latents_CTHW of each segment, on the CPU."""
    frames_THWC: torch.Tensor
    """uint8, on the CPU."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run took."""

    stages_s: dict[str, float]
    evaluations: int
    """Of the video, as they were done."""
    peak_gib: float | None
    """The most of all ranks; None where that cannot be watched."""

    @property
    def seconds(self) -> float:
        """Without loading."""
        return sum(seconds for name, seconds in self.stages_s.items() if not is_loading(name))


def run_once(
    plan: ExecutionPlan,
    references: Sequence[Reference],
    models: LoadedModels,
    reporter: Reporter,
    *,
    ranks: Ranks | None = None,
) -> tuple[Video | None, Figures]:
    """Make the first video of a plan, of which nothing is kept; on a rank other than 0 there is none.

    All `ranks` call it. Errors are those of `make_videos`.
    """

    def taken(decoding: SampleFrames) -> Video:
        frames_THWC = torch.cat([*decoding.pieces()])
        return Video(decoding.latents, frames_THWC)

    device = plan.hardware.device
    record = _CountedRecord(reporter)
    work = Work(plan, [sample_files(plan.settings, 0)], references)
    with computing(plan, reporter):
        is_watched = start_peak_memory(device)
        [videos] = make_videos([work], models, record, finish=taken, ranks=ranks)
        peaks = [*peak_memory_gib(device).values()] if is_watched else []
    if ranks is not None:
        peaks = [peak for of_rank in all_gather_json(peaks) for peak in of_rank]
    return (videos[0] if videos else None), Figures(record.timings_s, record.evaluations, max(peaks, default=None))


def warmed(plan: ExecutionPlan) -> ExecutionPlan:
    """Return a plan that loads and computes everything, in a few steps of each part."""
    return replace(
        plan,
        timesteps=plan.timesteps[: plan.start + _WARM_STEPS + 1],
        picture=plan.picture and warmed(plan.picture),
        draft=plan.draft and warmed(plan.draft),
        continuation=plan.continuation and warmed(plan.continuation),
    )


def kernels_of(plan: ExecutionPlan) -> str:
    """Return all of a plan's settings that decide what computes it: runs that differ in sampling alone share them."""
    return json.dumps(plan.settings.model_dump(mode="json", exclude={"sampling"}), sort_keys=True)


class _CountedRecord(RunRecord):
    """Counts the evaluations of the model, too."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(reporter, keeps_results=False)
        self.evaluations = 0

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        with super().stage(name, total=total, unit=unit) as progress:
            yield _Counting(self, progress) if unit == _EVALUATIONS else progress


@dataclass(frozen=True, slots=True)
class _Counting:
    record: _CountedRecord
    progress: StageProgress

    def advance(self, amount: int = 1) -> None:
        self.record.evaluations += amount
        self.progress.advance(amount)
