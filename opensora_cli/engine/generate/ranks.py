"""Ranks of a generation: how they start, agree on a plan, and share the work."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.device import use_device
from opensora_cli.core.device_names import type_of_ranks
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import Json, all_gather_json, broadcast_json, broadcast_tensors
from opensora_cli.core.ranks import RankContext, beat
from opensora_cli.engine.components.parallelize import share_tokens
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.request import refined_with_mode
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder, write_settings
from opensora_cli.engine.launch.rank import agreed, device_type, joined, rank_device, settings_of_ranks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.divided_work import SharedBranches
from opensora_cli.parallel.mesh import ParallelMesh, new_group, use_mesh
from opensora_cli.parallel.sequence import open_exchange
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.sampling.denoise import VelocityFn
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA

_LONGEST = timedelta(days=30)
"""Longest time that a finished rank waits for the others."""


class Ranks:
    """Processes of a run on a mesh. Only rank 0 reads references, prints and writes files.

    Without a mesh the processes only share prompts and messages; `of` returns them on the mesh of a plan.

    Args:
        device: device of this rank; None for a single process, which may choose.
        shape: degrees of the mesh.
        exchange: plan by which ranks exchange tokens for heads.
    """

    text_group: dist.ProcessGroup | None = None
    """Ranks that share the layers of T5; None for a single process."""
    tensor_group: dist.ProcessGroup | None = None
    """Ranks that share each block's heads and features; None if each rank has all of them."""
    machine_group: dist.ProcessGroup | None = None
    """Ranks of this machine, which share one copy of the weights that are offloaded to the CPU."""

    def __init__(
        self, device: torch.device | None = None, shape: MeshShape | None = None, exchange: ExchangePlan | None = None
    ) -> None:
        self.device = device
        self.count = 1 if device is None else dist.get_world_size()
        if device is None:
            return
        shape, exchange = shape or MeshShape(replicate=self.count), exchange or ExchangePlan()
        self.mesh = ParallelMesh(shape, device_type=device.type)
        use_mesh(self.mesh)
        self._exchange = open_exchange(self.mesh, exchange)
        self.text_group, self.machine_group = dist.group.WORLD, _machine_group()
        self.tensor_group = self.mesh.group("tensor") if shape.tensor > 1 else None
        self._meshes = {(shape, exchange): self}

    @property
    def is_main(self) -> bool:
        return self.device is None or dist.get_rank() == 0

    def of(self, plan: Plan) -> "Ranks":
        """Return the same processes on the mesh of a plan; all ranks call it."""
        if self.device is None:
            return self
        key = plan.mesh, plan.exchange
        if key not in self._meshes:
            self._meshes[key] = Ranks(self.device, plan.mesh, plan.exchange)
        return self._meshes[key]

    def same(self, value: Json) -> Json:
        """Return the value of rank 0; tuples arrive as lists on the others."""
        return value if self.device is None else broadcast_json(value)

    def least(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        return value if self.device is None else int(min(all_gather_json(value)))

    def same_tensors(self, tensors: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Return the tensors of rank 0, on the device of each of several ranks."""
        return tensors or () if self.device is None else broadcast_tensors(tensors, device=self.device)

    def share_tokens(self, transformer: MMDiT) -> Callable[..., Tensor]:
        """Return a function like the transformer that computes this rank's share of the tokens."""
        if self.device is None or self.mesh.shape.ring * self.mesh.shape.ulysses == 1:
            return transformer
        return share_tokens(transformer, self.mesh, self._exchange)

    def share_branches(self, velocity: VelocityFn, *, on_evaluation: Callable[[], None]) -> VelocityFn:
        """Return the same velocity, computed together: each rank evaluates its share of the branches."""
        if self.device is None or self.mesh.shape.guidance == 1:
            return velocity
        return SharedBranches(velocity, self.mesh.group("guidance"), on_evaluation=on_evaluation)


ALONE = Ranks()
"""The only process of a run."""


def _machine_group() -> dist.ProcessGroup:
    """Return the group of the ranks on this machine; all ranks call it."""
    hosts = all_gather_json(socket.gethostname())
    own = dist.group.WORLD
    assert own is not None
    if len(set(hosts)) == 1:
        return own
    for host in dict.fromkeys(hosts):
        group = new_group([rank for rank, name in enumerate(hosts) if name == host])
        own = group if host == socket.gethostname() else own
    return own


def start_ranks(
    settings: GenerateSettings, command: str, arguments: Sequence[str], *, gives_settings: bool = True
) -> None:
    """Run a command in ranks on this machine; with `gives_settings` they read these settings from a file."""
    with log_folder(command) as log_dir:
        request = _launch_request(settings, log_dir)
        if gives_settings:
            values = settings.model_dump(mode="json")
            saved = write_settings(log_dir, {"schema": SIDECAR_SCHEMA, "settings": values})
            arguments = ["--from", str(saved), *arguments]
        launch(request, [command, *arguments])


def require_devices(settings: GenerateSettings) -> None:
    """Raise RequestError if the settings are for several machines, and HardwareError if devices are too few."""
    _launch_request(settings, Path()).check()


def _launch_request(settings: GenerateSettings, log_dir: Path) -> LaunchRequest:
    return LaunchRequest(
        parallel=settings.parallel,
        gpus=settings.parallel.ranks_per_node,
        device_type=type_of_ranks(settings.runtime.device),
        log_dir=log_dir,
        output_dir=sample_files(settings, 0).media.parent,
    )


@contextmanager
def joined_ranks(
    settings: GenerateSettings, context: RankContext, reporter: Reporter
) -> Iterator[tuple[GenerateSettings, Ranks]]:
    """Join the other ranks, and yield the settings of rank 0 and the ranks."""
    settings = settings_of_ranks(settings, context)
    if context.is_main:
        settings = refined_with_mode(settings, reporter)
    with joined(context, device_type=device_type(settings.runtime.device)) as device:
        yield agreed(settings), Ranks(device)


@contextmanager
def joined_for_rows(context: RankContext) -> Iterator[dist.ProcessGroup]:
    """Join the other ranks on the CPU, and yield a group in which a rank may wait for days for the others."""
    with joined(context, device_type="cpu"):
        group = dist.new_group(backend="gloo", timeout=_LONGEST)
        assert group is not None
        beat("rows")
        yield group


def device_for_rows(settings: GenerateSettings, context: RankContext) -> str:
    """Return the device for a rank's own rows, and make it the current device."""
    settings = settings_of_ranks(settings, context)
    device = rank_device(context, device_type(settings.runtime.device))
    use_device(device)
    return str(device)
