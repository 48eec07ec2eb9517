"""From settings to a distribution."""

import torch

from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.engine.train.strategy.replicated import ReplicatedDistribution
from opensora_cli.engine.train.strategy.sharded import ShardedDistribution
from opensora_cli.parallel.mesh import MeshShape, ParallelMesh
from opensora_cli.settings.strategy import Strategy, TrainParallelSettings


def mesh_shape(strategy: Strategy, parallel: TrainParallelSettings) -> MeshShape:
    """Return the mesh that settings without `strategy_problems` mean."""
    return MeshShape(**parallel.axes(strategy))


def open_distribution(
    strategy: Strategy, parallel: TrainParallelSettings, *, device: torch.device, dtype: torch.dtype | None
) -> Distribution:
    """Return how the ranks of this run share its work; all of them call it, after `dist.init_process_group`.

    One process alone needs no group, and trains as it is with any strategy.

    Args:
        strategy: what each rank holds.
        parallel: how many ranks there are, and what they share; without `strategy_problems`.
        device: of this process.
        dtype: what weights are computed with, where it is not their own; of use where they are gathered.
    """
    shape = mesh_shape(strategy, parallel)
    if shape.size == 1:
        return Distribution(device)
    mesh = ParallelMesh(shape, device_type=device.type)
    if not strategy.shards:
        return ReplicatedDistribution(device, mesh)
    return ShardedDistribution(
        device,
        mesh,
        dtype=dtype,
        gathers_twice=strategy in (Strategy.ZERO3, Strategy.HYBRID),
        exchanges_once=strategy is Strategy.ZERO1,
    )
