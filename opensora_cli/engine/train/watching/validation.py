"""The loss on held-out clips, with the same timesteps and noise every time and in every run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_link import beat
from opensora_cli.engine.encode.datasets import open_dataset, pixel_multiple
from opensora_cli.engine.encode.fill_cache import prepare_cache
from opensora_cli.engine.encode.loading import ClipLoader, ReadingNotes, ReplacementWarnings
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives.task import Batch, SampleRng
from opensora_cli.engine.train.objectives.text import sample_captions
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train import TrainSettings, TrainTarget
from opensora_cli.settings.watching import ValidationSettings

# Captions are random: above the seeds of training, so that no caption is trained on.
_SEEDS_OF_CAPTIONS = 2**40
_SAMPLES = "number of samples"


class HeldOutLoss:
    """Measures the loss with the weights that will be exported: the average, if there is one.

    Each rank computes every R-th micro-batch; the mean is over the samples of all of them, so that it does not depend
    on the number of ranks. The random state and the weights of training are not changed. `read` returns one of the
    `count` micro-batches, the same every time. After `last_step` of the run, the loss is measured in any case.
    """

    def __init__(
        self, read: Callable[[int], Batch], *, count: int, settings: ValidationSettings, last_step: int
    ) -> None:
        self._read = read
        self._count = count
        self._settings = settings
        self._last_step = last_step

    def is_due(self, step: int) -> bool:
        """Whether it is due after so many steps; 0: before the first."""
        every = self._settings.every
        return every is not None and (step % every == 0 or step == self._last_step)

    def run(self, step: int, trainer: Trainer[Any]) -> Mapping[str, float]:
        """Return `loss` and the task's other figures, the same on all ranks, of which all call this.
        Raises OsoraError if a clip cannot be read.
        """
        distribution = trainer.distribution
        sums: dict[str, float] = {}
        samples = 0
        with evaluating(trainer):
            for first in range(0, self._count, distribution.data_ranks):
                beat("validate")
                index = first + distribution.data_rank
                # A rank without a batch of its own computes one that does not count: forward passes may be collective.
                batch = self._read(min(index, self._count - 1))
                # The same for every batch, so that what is sampled for a clip depends on its path alone.
                loss, figures = trainer.task.loss(batch, SampleRng.of(self._settings.seed, 0))
                weight = trainer.task.samples(batch) if index < self._count else 0
                samples += weight
                for name, value in {"loss": loss, **figures}.items():
                    sums[name] = sums.get(name, 0.0) + (weight * float(value) if weight else 0.0)
        means = distribution.mean({**sums, _SAMPLES: samples})
        return {name: means[name] / means[_SAMPLES] for name in sums}


@contextmanager
def evaluating(trainer: Trainer[Any]) -> Iterator[None]:
    """Let the module compute as it will after training, inside the block.

    It has the averaged weights, if there are any, no dropout and no gradients; torch's global generators are restored.
    """
    modes = {module: module.training for module in trainer.task.module.modules()}
    device = trainer.distribution.device
    trainer.task.module.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            trainer.averaged(),
            trainer.distribution.evaluating(),
            torch.no_grad(),
            trainer.autocast(),
        ):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def open_validation(settings: TrainSettings, *, distribution: Distribution, reporter: Reporter) -> HeldOutLoss | None:
    """Return what validates a run; None: nothing does.

    With a cache of encoded clips, held-out ones are added to it first, by all ranks. Raises FileProblem if the table is
    missing or broken, or fills no micro-batch, and what `open_batches` and `prepare_cache` raise.
    """
    if settings.validation.every is None:
        return None
    if settings.target is TrainTarget.TEXT:
        read, count = _captions(settings), settings.validation.batches
    else:
        read, count = _clips(settings, distribution, reporter)
    return HeldOutLoss(read, count=count, settings=settings.validation, last_step=settings.loop.steps)


def _captions(settings: TrainSettings) -> Callable[[int], Batch]:
    seed, batch_size = _SEEDS_OF_CAPTIONS + settings.validation.seed, settings.text.batch_size
    return lambda index: sample_captions(SampleRng.of_data(seed, index), index, batch_size=batch_size)


def _clips(
    settings: TrainSettings, distribution: Distribution, reporter: Reporter
) -> tuple[Callable[[int], Batch], int]:
    data, seed = settings.validation.data(settings.data), settings.validation.seed
    cache = None
    if settings.target is TrainTarget.MMDIT:
        cache = prepare_cache(
            settings.replace({"data": data.model_dump(), "loop.seed": seed, "validation.every": None}),
            device=distribution.device,
            rank=distribution.rank,
            ranks=distribution.ranks,
            barrier=distribution.barrier,
            reporter=reporter,
        )
    dataset = open_dataset(data, seed=seed, multiple=pixel_multiple(settings), fixed_starts=cache is not None)
    plan = dataset.plan_epoch(0)
    count = min(len(plan), settings.validation.batches)
    if not count:
        raise FileProblem(
            f"{data.table} fills no micro-batch to validate on", hint="give validation.table more clips of each size"
        )
    loader = ClipLoader(
        requests=dataset.requests, fit=data.fit, load=None if cache is None else cache.clip, notes=ReadingNotes(0)
    )
    replaced = ReplacementWarnings(reporter, where=" in validation")

    def read(index: int) -> Batch:
        batch = loader(plan.batch(index, number=index, epoch=0))
        replaced.warn(batch)
        return batch

    return read, count
