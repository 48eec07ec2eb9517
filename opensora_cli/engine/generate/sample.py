"""One sample on its way from noise to a result."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opensora_cli.engine.generate.plan import Chain, Plan
from opensora_cli.engine.generate.references import Reference
from opensora_cli.engine.generate.targets import SampleFiles


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """Latents of one sample, and the time that sampling them took."""

    latents_CTHW: torch.Tensor
    """On the CPU."""
    denoise_s: float
    """Seconds; 0 for latents from a file."""
    before: tuple[torch.Tensor, ...] = ()
    """Latents of the complete segments of an extended video."""
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
    saved: DenoisedSample | None = None
    """Latents from a file, complete or after `files.saved_steps`; None where there are none."""
    before: tuple[torch.Tensor, ...] = ()
    """Latents of the complete segments of an extended video."""
    reference_latents: Sequence[torch.Tensor] | None = None
    """latents_CTHW of each reference; None without references."""
    draft_CTHW: torch.Tensor | None = None
    """Latents of the draft, for a plan with a `start`."""
    denoised: DenoisedSample | None = None

    def __post_init__(self) -> None:
        if self.saved is not None and not self.is_begun:
            self.denoised = self.saved

    @property
    def steps_done(self) -> int:
        """Steps that are computed, or skipped, when the run begins."""
        return self.files.saved_steps or self.plan.start

    @property
    def is_begun(self) -> bool:
        """Whether the saved latents still need some steps."""
        return self.files.saved_steps is not None


def unfinished(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without complete latents."""
    return [sample for sample in samples if sample.denoised is None]
