"""Generation, rehearsed: the engine's own stages, from the plan of a rank to the frames that it decodes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from fake_cuda.collectives import World
from fake_cuda.device import GPU_BYTES
from fake_cuda.log import Log, Stage, lines_of
from fake_cuda.session import rehearsal
from torch.utils._python_dispatch import _disable_current_modes

from opensora_cli.core.progress import SilentReporter, StageProgress
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import denoise, pipeline
from opensora_cli.engine.generate import run as generation_run
from opensora_cli.engine.generate.chain import Chain, make_chain
from opensora_cli.engine.generate.decode import Clip
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.pipeline import computing, make
from opensora_cli.engine.generate.plan import SEGMENT, Plan
from opensora_cli.engine.generate.ranks import ALONE, Ranks, joined_ranks
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.sample import Sample
from opensora_cli.models.mmdit.model import _computed_where
from opensora_cli.settings.generate import GenerateSettings

MAY_WAIT = lines_of(denoise._Saver.step) | lines_of(denoise.denoise_samples) | lines_of(_computed_where)
"""Lines that may wait for the GPU. One of several ranks keeps the latents of each step on the host, because another
rank that ends would take its GPU along. The latents of a finished sample are copied to the host. The modulation layers
come from the host before the first step, one after the other.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    rank: int
    log: Log
    chain: Chain

    @property
    def device(self) -> torch.device:
        return self.chain.video.hardware.device

    @property
    def planned(self) -> dict[str, int]:
        """The bytes that each stage is planned to take, less those of models that rank 0 alone has by then."""
        planned: dict[str, int] = {}
        for stage in self.chain.stages:
            size = stage.total_bytes - sum(size for _, size in stage.kept if self.rank)
            # A run shows the stages of all segments as those of the first.
            name = stage.name.removeprefix(f"{SEGMENT} ")
            planned[name] = max(size, planned.get(name, 0))
        return planned


class LoggedReporter(SilentReporter):
    def __init__(self, log: Log) -> None:
        self._log = log
        self._stages: list[str] = []

    def advance(self, amount: int = 1) -> None:
        self._log.asked(Stage, self._stages[-1], "advanced")

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        self._stages.append(name)
        self._log.asked(Stage, name, "began")
        try:
            yield self
        finally:
            self._log.asked(Stage, self._stages.pop(), "ended")


def rehearse(
    settings: GenerateSettings,
    world: World | None = None,
    rank: int = 0,
    *,
    memory_bytes: int = GPU_BYTES,
    encodes: bool = False,
    decodes: bool = False,
) -> Turn:
    """Be one rank of a generation, from its plan to its latents; with `encodes` its prompts, too, which are given
    otherwise, and with `decodes` to its last frame.
    """
    world = world or World()
    with rehearsal(world, rank, memory_bytes=memory_bytes) as turn, ExitStack() as stack:
        reporter = LoggedReporter(turn.log)
        # Plans are made of numbers, some of them counted on tensors of another kind.
        stack.enter_context(mock.patch.object(generation_run, "make_chain", _planned))
        if not encodes:
            stack.enter_context(mock.patch.object(pipeline, "text_embeds", _text_embeds))
        # There are no numbers to write.
        stack.enter_context(mock.patch.object(denoise, "save_latents"))
        ranks: Ranks = ALONE
        if world.size > 1:
            settings, ranks = stack.enter_context(joined_ranks(settings, turn.context, reporter))
        chain = generation_run.plan_here(settings, LoadedModels(ranks=ranks), reporter=reporter)
        _make(chain, ranks, reporter, decodes=decodes)
        return Turn(rank, turn.log, chain)


def _planned(settings: GenerateSettings, **options: Any) -> Chain:
    with _disable_current_modes():
        # On tensors without numbers no kernel can be tried.
        return make_chain(settings, **options | {"tries_device": False}).with_threads()


def _make(chain: Chain, ranks: Ranks, reporter: LoggedReporter, *, decodes: bool) -> None:
    files = [sample_files(chain.settings, index) for index in range(chain.settings.num_samples)]
    with _disable_current_modes():
        references = references_of(chain.video, reporter) if ranks.is_main else []
    with computing(chain.video, reporter), LoadedModels(ranks=ranks) as models:
        samples = [Sample(chain, chain.video, each, references) for each in files]
        make(chain, samples, models, Events(reporter), finish=_watched if decodes else None)


def _text_embeds(plan: Plan, *_: object) -> tuple[PromptEmbeds, ...]:
    model, hardware = plan.settings.model, plan.hardware
    empty = partial(torch.empty, dtype=hardware.dtype, device=hardware.device)
    embeds = PromptEmbeds(empty(2, plan.settings.text.t5_max_length, model.context_in_dim), empty(2, model.vec_in_dim))
    return (embeds,) * len(plan.settings.segment_prompts)


def _watched(clip: Clip) -> int:
    return sum(len(piece_THWC) for piece_THWC in clip.pieces)
