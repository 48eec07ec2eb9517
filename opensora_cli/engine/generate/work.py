"""What a run is to make, request by request and clip by clip, and how far it is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from opensora_cli.core.exceptions import OsoraError
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.references import Reference
from opensora_cli.engine.generate.targets import SampleFiles


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """The latents of one sample, and what sampling them took."""

    latents_CTHW: torch.Tensor
    """On the CPU."""
    denoise_s: float
    """Seconds, of a batch its share; 0 where they come from a file."""
    before: tuple[torch.Tensor, ...] = ()
    """The latents of the segments before, which are complete, of a video that is extended."""
    past: tuple[torch.Tensor, ...] = ()
    """What a solver or a step cache looks back at, shaped like latents, in the order of `last_times`."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The extended video that a segment is made for."""

    plan: ExecutionPlan
    before: tuple[torch.Tensor, ...]
    """The latents of the segments that are complete."""


@dataclass(slots=True, eq=False)
class Work:
    """What one request asks for. Several are made together if their plans differ in no more than prompts, seeds,
    references and names."""

    plan: ExecutionPlan
    files: Sequence[SampleFiles]
    """The samples that are to be made."""
    references: Sequence[Reference] = ()
    """What is given of files."""
    saved: Mapping[int, DenoisedSample] = field(default_factory=dict)
    """By index, the latents of samples whose `saved` is there: all steps or some are done already."""
    embeds: tuple[PromptEmbeds, ...] = ()
    """Of the prompt of each segment; none: they are encoded when it comes to that."""
    picture_embeds: tuple[PromptEmbeds, ...] = ()
    """Likewise, of the picture that is made first."""
    whole: Whole | None = None
    """The video of which this is a segment; None: it is all of it."""
    stops_all: bool = True
    """Whether an error ends all that is made together, and not this work alone."""
    error: OsoraError | None = None
    """That ended this work."""

    @contextmanager
    def trying(self, *, may_retry: bool = False) -> Iterator[None]:
        """Do a part of this work alone, whose error is this work's; with `may_retry` not one of too little memory."""
        try:
            yield
        except OsoraError as error:
            if self.stops_all or (may_retry and isinstance(error, OutOfMemoryError)):
                raise
            self.error = error


@dataclass(slots=True, eq=False)
class Clip:
    """One sample on its way from noise to a result."""

    work: Work
    sample: SampleFiles
    references: Sequence[Reference]
    """Of the work, or the picture that was made first."""
    reference_latents: Sequence[torch.Tensor] | None = None
    """The latents_CTHW of each reference; None where nothing is given."""
    draft_CTHW: torch.Tensor | None = None
    """Latents from which it starts, where `plan.start` is not 0."""
    denoised: DenoisedSample | None = None

    @property
    def plan(self) -> ExecutionPlan:
        """That of its request."""
        return self.work.plan

    @property
    def steps_done(self) -> int:
        """Steps that it has been through, or that are left out, when the run begins."""
        return self.sample.saved_steps or self.plan.start

    @property
    def is_begun(self) -> bool:
        """Whether latents of such a step are there."""
        return self.sample.saved_steps is not None


def unfinished(clips: Sequence[Clip]) -> list[Clip]:
    """Return the clips without latents, but for those whose work has ended."""
    return [clip for clip in clips if clip.denoised is None and clip.work.error is None]


@contextmanager
def trying_all(clips: Sequence[Clip]) -> Iterator[None]:
    """Do what is done for several clips together, whose error is that of the works of all."""
    try:
        yield
    except OsoraError as error:
        if any(clip.work.stops_all for clip in clips):
            raise
        for clip in clips:
            clip.work.error = clip.work.error or error
