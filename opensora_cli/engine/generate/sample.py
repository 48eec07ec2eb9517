"""One sample on its way from noise to a result."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opensora_cli.engine.generate.plan import Chain, Plan
from opensora_cli.engine.generate.references import Reference
from opensora_cli.engine.generate.targets import SampleFiles


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """Latents of one clip, complete or after some steps."""

    latents_CTHW: torch.Tensor
    """On the CPU."""
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
    """Latents from files: complete ones of each finished segment, and of the last one that was begun."""
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
