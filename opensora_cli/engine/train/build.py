"""Task and cache of a training run."""

from functools import partial
from pathlib import Path

import torch

from opensora_cli.core.device_names import type_of_ranks
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipSource
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.encode.datasets import open_table
from opensora_cli.engine.encode.fill_cache import fill_cache, require_same_settings
from opensora_cli.engine.train.activations import plan_activations
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives import TokenWeights, find_objective
from opensora_cli.engine.train.parallelize import parallelize
from opensora_cli.engine.train.trainer import Task
from opensora_cli.engine.train.transformer import fill_parts
from opensora_cli.settings.train import TrainSettings


def build_task(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None = None,
    token_weights: TokenWeights | None = None,
    reporter: Reporter,
) -> Task:
    """Return the task of the objective, ready for training: this rank's part, on its device."""
    # Layers take their first weights from torch's global generator, whose state is the caller's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        task = find_objective(settings).build(
            settings, distribution=distribution, clips=clips, token_weights=token_weights, reporter=reporter
        )
    plan = plan_activations(settings)
    recipe = partial(parallelize, activations=plan, compiles=settings.compile, warn=reporter.warn)
    task.shard(distribution, recipe=recipe)
    if distribution.divides:
        fill_parts(task.module, settings, distribution=distribution)
    return task


def open_clips_cache(
    settings: TrainSettings, *, distribution: Distribution, reporter: Reporter, source: ClipSource | None = None
) -> ClipCache | None:
    """Return the complete cache of encoded clips for a run, or None without a cache. All ranks must call this."""
    if settings.clip_cache is None:
        return None
    _, failed = fill_cache(
        settings,
        device=distribution.device,
        rank=distribution.rank,
        ranks=distribution.ranks,
        barrier=distribution.barrier,
        reporter=reporter,
        source=source,
    )
    if failed:
        others = f", and {len(failed) - 1} more clips" if len(failed) > 1 else ""
        reporter.warn(f"skipped: {failed[0].path} ({failed[0].reason}){others}")
    distribution.barrier()
    return ClipCache(Path(settings.clip_cache))


def refuse_before_ranks(settings: TrainSettings) -> None:
    """Raise errors before the ranks start for unreadable tables and for a cache of other settings."""
    for each in [settings, *([settings.held_out] if settings.validation.every is not None else [])]:
        open_table(each, fixed_starts=False)
    if settings.clip_cache is not None:
        require_same_settings(settings, device=torch.device(type_of_ranks(settings.device)))


def count_parameters(settings: TrainSettings) -> int:
    """Return the number of trained parameters, without allocating them."""
    outline = find_objective(settings).outline(settings)
    return sum(weight.numel() for weight in outline.parameters() if weight.requires_grad)
