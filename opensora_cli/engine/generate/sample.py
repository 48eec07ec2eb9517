"""State of one sample from noise to a result, and its latents from an earlier run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.generate.chain import Chain
from opensora_cli.engine.generate.outputs import SampleFiles
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.process import OneProcess
from opensora_cli.engine.generate.references import Reference
from opensora_cli.engine.generate.saved_latents import open_latents


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """Latents of one clip, complete or after some steps."""

    latents_CTHW: torch.Tensor
    """Latents on the CPU."""
    denoise_s: float = 0.0
    """Seconds of sampling; 0 for latents from a file."""
    steps: int | None = None
    """Steps done; None for all steps."""
    past: tuple[torch.Tensor, ...] = ()
    """Earlier velocities of the solver or the step cache, shaped like latents, in the order of `last_times`."""


@dataclass(slots=True, eq=False)
class Sample:
    """One clip of a job: a sample of the request, or the picture, the draft or a segment of one."""

    chain: Chain
    """Request that the files belong to."""
    plan: Plan
    """Plan of the job."""
    files: SampleFiles
    references: Sequence[Reference] = ()
    saved: Sequence[DenoisedSample] = ()
    """Latents from a file: of each finished segment in order, then of the segment in progress."""
    earlier: tuple[torch.Tensor, ...] = ()
    """latents_CTHW of the segments of an extended video before this one."""
    reference_latents: Sequence[torch.Tensor] | None = None
    """latents_CTHW of each reference; None without references."""
    draft_CTHW: torch.Tensor | None = None
    """Latents of the draft, for a plan with a `start`."""
    denoised: DenoisedSample | None = None
    """Complete latents; None before all steps are done."""

    def __post_init__(self) -> None:
        if self.saved and self.files.saved_steps is None:
            self.denoised = self.saved[-1]

    @property
    def begun(self) -> DenoisedSample | None:
        """Latents from a file that still need some steps; None without."""
        return self.saved[-1] if self.saved and self.denoised is None else None

    @property
    def steps_done(self) -> int:
        """Steps of the job that are computed, or skipped, when the run begins."""
        return self.plan.start if self.begun is None else self.begun.steps or 0


def unfinished(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without complete latents."""
    return [sample for sample in samples if sample.denoised is None]


def read_saved(chain: Chain, files: SampleFiles, ranks: OneProcess) -> tuple[DenoisedSample, ...]:
    """Return the saved latents of each begun segment of a sample; empty without a file.

    Rank 0 reads the files.
    """
    if files.saved is None:
        return ()
    plan = chain.video
    stop, of_segment = plan.settings.sampling.stop_at, plan.num_steps
    keeps = plan.decodes_only or plan.settings.output.explore
    if stop is not None and not keeps and (files.saved_steps is None or files.saved_steps >= stop):
        after = "all steps" if files.saved_steps is None else f"step {files.saved_steps}"
        raise RequestError(
            f"sampling.stop_at={stop} is over: {files.saved} was saved after {after}",
            hint="continue without --stop-at, or stop later",
        )
    steps = chain.num_steps if files.saved_steps is None else files.saved_steps
    is_begun = 0 < steps < chain.num_steps
    finished, begun_steps = divmod(steps, of_segment)
    past = chain.segments[finished].past_times(begun_steps) if is_begun else {}
    count = finished + bool(begun_steps)
    tensors: list[torch.Tensor] = []
    if ranks.is_main and is_begun is not (files.saved_steps is None):
        tensors = open_latents(files.saved).read()
    tensors = [tensor.cpu() for tensor in ranks.same_tensors(tensors)]
    if any(tuple(each.shape) != plan.latent_shape for each in tensors):
        raise RequestError(
            f"{files.saved} holds latents of {tuple(tensors[-1].shape)}, and the settings ask for {plan.latent_shape}",
            hint="change neither size, length nor model when continuing from latents",
        )
    if not tensors or len(tensors) != count + len(past):
        raise CheckpointError(
            f"{files.saved} was saved after step {steps} of {chain.num_steps}"
            + (f", and has {len(tensors)} latents, with those of earlier steps" if len(tensors) > 1 else ""),
            hint="remove it, and start again",
        )
    *complete, last = tensors[:count]
    return (
        *(DenoisedSample(latents_CTHW) for latents_CTHW in complete),
        DenoisedSample(last, steps=begun_steps or None, past=tuple(tensors[count:])),
    )
