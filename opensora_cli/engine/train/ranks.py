"""Ranks of a training run: starting them, agreeing on settings, and sharing the work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.components.parallelize import plan_exchange
from opensora_cli.engine.launch.launcher import LaunchRequest, Pace, launch, log_folder, write_settings
from opensora_cli.engine.launch.rank import DeviceType, agreed, device_type, joined, settings_of_ranks
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.precision import DTYPES
from opensora_cli.parallel.mesh import ParallelMesh, use_mesh
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.settings.devices import Strategy, TrainParallelSettings
from opensora_cli.settings.train import TrainSettings

# An interrupted rank finishes its step and a checkpoint first.
_SAVING_S = 1800.0


def start_ranks(settings: TrainSettings, *, flags: Sequence[str] = ()) -> None:
    """Train in one process per rank, and return when all are done. The first rank prints.

    The ranks read the settings from a file, and get `flags` on the command line. Raises the errors of `launch`.
    """
    with log_folder("train") as log_dir:
        parallel = settings.parallel
        # Devices by number are GPUs: processes on the CPU start only on request.
        kind: DeviceType = "cpu" if settings.device == "cpu" else "cuda"
        request = LaunchRequest.of(parallel, gpus=parallel.ranks_per_node, device_type=kind, log_dir=log_dir)
        saved = write_settings(log_dir, settings.model_dump(mode="json"))
        launch(request, ["train", "--from", str(saved), *flags], pace=Pace(finish_s=_SAVING_S))


@contextmanager
def joined_ranks(settings: TrainSettings, context: RankContext) -> Iterator[tuple[TrainSettings, Distribution]]:
    """Join the other ranks, and yield rank 0's settings and the distribution of work.

    Settings without a number of ranks get the number of `context`.
    Raises RequestError if the settings need another number of ranks, and HardwareError if the device is missing, or
    the ranks cannot connect.
    """
    settings = settings_of_ranks(settings, context)
    with joined(context, device_type=device_type(settings.device)) as device:
        settings = agreed(settings)
        yield settings, distribution_of(settings, device=device)


def gathered_dtype(settings: TrainSettings) -> torch.dtype | None:
    """Return the dtype of gathered weights and compute. None means the dtype of the weights."""
    dtype = DTYPES[settings.precision.compute]
    return None if dtype is torch.float32 else dtype


def training_exchange(settings: TrainSettings) -> ExchangePlan:
    """Return the plan for exchanging tokens for heads between the ranks of a run.
    Raises RequestError if a setting has no effect between these ranks, or is impossible.
    """
    return plan_exchange(
        settings.parallel,
        mesh_shape(settings.strategy, settings.parallel),
        num_heads=settings.model.num_heads,
        itemsize=DTYPES[settings.precision.compute].itemsize,
    )


def training_device(settings: TrainSettings) -> torch.device:
    """Return the device of a process that trains alone. Raises HardwareError if the device is missing."""
    return pick_hardware(settings.device_name, "float32").device


def mesh_shape(strategy: Strategy, parallel: TrainParallelSettings) -> MeshShape:
    """Return the mesh of valid settings."""
    return MeshShape(**parallel.axes(strategy))


def distribution_of(
    settings: TrainSettings, *, device: torch.device, kind: type[Distribution] = Distribution
) -> Distribution:
    """Return the distribution of a run. All ranks call this after `dist.init_process_group`.

    Raises RequestError if a setting of the exchange has no effect between these ranks, or is impossible.
    """
    return open_distribution(
        settings.strategy,
        settings.parallel,
        device=device,
        dtype=gathered_dtype(settings),
        exchange=training_exchange(settings),
        offload_states=settings.optimizer.offload_states,
        kind=kind,
    )


def open_distribution(
    strategy: Strategy,
    parallel: TrainParallelSettings,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    exchange: ExchangePlan | None = None,
    offload_states: bool = False,
    kind: type[Distribution] = Distribution,
) -> Distribution:
    """Return the distribution of this run's work. All ranks call this after `dist.init_process_group`.

    A single process needs no group, and ignores the strategy. `parallel` must be valid for the strategy. The other
    arguments are those of `Distribution`.
    """
    shape = mesh_shape(strategy, parallel)
    if shape.size == 1:
        return Distribution(device)
    mesh = ParallelMesh(shape, device_type=device.type)
    use_mesh(mesh)
    return kind(device, mesh, strategy=strategy, dtype=dtype, exchange=exchange, offload_states=offload_states)
