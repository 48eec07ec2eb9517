"""Generation, rehearsed: the engine's own stages, from the plan of a rank to the frames that it decodes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_cuda.collectives import World
from fake_cuda.device import GPU
from fake_cuda.log import Advanced, Began, Ended, Log, lines_of
from fake_cuda.session import Rehearsal, rehearsal
from sparse_weights import save_sparse
from torch.utils._python_dispatch import _disable_current_modes

from opensora_cli.core.progress import SilentReporter, StageProgress
from opensora_cli.engine.components.autoencoders import autoencoder_on_meta
from opensora_cli.engine.components.configs import transformer_on_meta
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import denoise, resolve
from opensora_cli.engine.generate import ranks as generation_ranks
from opensora_cli.engine.generate.decode import SampleFrames
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.make import computing, denoised_clips, make_videos
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.ranks import Ranks, planned_on_ranks
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.run import Run
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import sample_files
from opensora_cli.engine.generate.work import Work
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

MAY_WAIT = lines_of(denoise._Saver.step)
"""Of several ranks one keeps the latents of each step on the host: another that ends would take its GPU along."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one rank did."""

    rehearsal: Rehearsal
    plan: ExecutionPlan

    @property
    def log(self) -> Log:
        """All that it asked of its device."""
        return self.rehearsal.log

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.rehearsal.device


class LoggedReporter(SilentReporter):
    """Writes the stages of a run into the log, and keeps what is shown."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._stages: list[str] = []
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, amount: int = 1) -> None:
        self._log.add(Advanced(*self._log.asking, self._stages[-1]))

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        self._stages.append(name)
        self._log.add(Began(*self._log.asking, name))
        try:
            yield self
        finally:
            self._log.add(Ended(*self._log.asking, self._stages.pop()))


def full_size(folder: Path, preset: str, **changes: object) -> GenerateSettings:
    """Return a preset with weights of its size in sparse files, which take no disk; `section__key=value` changes it."""
    settings = load_preset(preset, prompt="raining, sea").replace(
        {
            "sampling.num_inference_steps": 1,
            "output.path": str(folder / "out.mp4"),
            "runtime.threads": 1,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
    )
    models = {"transformer": transformer_on_meta(settings.model), "vae": autoencoder_on_meta(settings.vae)}
    files: dict[str, object] = {}
    for name, model in models.items():
        weights = model.state_dict()
        size = sum(weight.nbytes for weight in weights.values())
        path = folder / f"{name}-{len(weights)}-{size}.safetensors"
        if not path.exists():
            save_sparse(path, weights, dtype=torch.bfloat16)
        files[f"files.{name}"] = str(path)
    return settings.replace(files)


def rehearse(
    settings: GenerateSettings,
    world: World | None = None,
    rank: int = 0,
    *,
    gpu: GPU | None = None,
    decodes: bool = False,
) -> Turn:
    """Be one rank of a generation, from its plan to its latents, or with `decodes` to its last frame."""
    world = world or World()
    with rehearsal(world, rank, gpu=gpu) as turn, ExitStack() as stack:
        reporter = LoggedReporter(turn.log)
        # Plans are made of numbers, some of them counted on tensors of another kind.
        for module in (generation_ranks, resolve):
            stack.enter_context(mock.patch.object(module, "make_plan", _planned))
        # There are no numbers to write.
        stack.enter_context(mock.patch.object(denoise, "save_latents"))
        ranks: Ranks | None = None
        if world.size == 1:
            plan = resolve.plan_here(resolve.completed(settings, reporter), None)
        else:
            plan, ranks = stack.enter_context(planned_on_ranks(settings, turn.context, reporter))
        run = Run(reporter=reporter, context=turn.context if ranks else None, ranks=ranks)
        _make(plan, run, turn, decodes)
        return Turn(turn, plan)


def _planned(settings: GenerateSettings, **options: Any) -> ExecutionPlan:
    with _disable_current_modes():
        return make_plan(settings, **options).with_threads(by=None)


def _make(plan: ExecutionPlan, run: Run, turn: Rehearsal, decodes: bool) -> None:
    files = [sample_files(plan.settings, index) for index in range(plan.num_samples)]
    references = references_of(plan, run.reporter) if run.is_main else []
    with computing(plan, run.reporter), run.lending() as models:
        work = Work(plan, files, references, embeds=(_embeds(plan, turn.device),))
        record = RunRecord(run.reporter)
        if decodes:
            make_videos([work], models, record, finish=_watched, ranks=run.ranks)
        else:
            denoised_clips([work], models, record, ranks=run.ranks)


def _embeds(plan: ExecutionPlan, device: torch.device) -> PromptEmbeds:
    model, empty = plan.settings.model, partial(torch.empty, dtype=plan.hardware.dtype, device=device)
    return PromptEmbeds(empty(2, plan.settings.text.t5_max_length, model.context_in_dim), empty(2, model.vec_in_dim))


def _watched(decoding: SampleFrames) -> int:
    """Take the frames of a video, and return how many there are."""
    return sum(len(piece_THWC) for piece_THWC in decoding.pieces())
