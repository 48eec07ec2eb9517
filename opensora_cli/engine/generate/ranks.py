"""Several processes that make one video: how they are started, agree on a plan, and share the work."""

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_link import beat, device_is_gpu
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.hardware import UNKNOWN_BYTES, Hardware
from opensora_cli.engine.generate.plan import Chain
from opensora_cli.engine.generate.planning import make_chain, rank_hardware
from opensora_cli.engine.generate.references import with_mode
from opensora_cli.engine.generate.refinement import refined
from opensora_cli.engine.generate.targets import sample_files
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder, write_settings
from opensora_cli.engine.launch.rank import (
    DeviceType,
    agreed,
    device_type,
    joined,
    rank_device,
    settings_of_ranks,
)
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.parallel.all_to_all import ExchangePlan, open_route
from opensora_cli.parallel.mesh import MeshShape, ParallelMesh, new_group, use_mesh
from opensora_cli.parallel.sequence import SequenceParallel, sequence_attention
from opensora_cli.parallel.shares import SequenceLengths
from opensora_cli.parallel.watched_collectives import watched_collectives
from opensora_cli.sampling.denoise import VelocityFn
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.step_cache import CachedStep
from opensora_cli.settings.enums import DType
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import GpuSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA

_HOST = torch.device("cpu")
_LONGEST = timedelta(days=30)
"""Time that the first finished rank waits for the last."""
_TILES_AHEAD = 2
"""Decoded tiles that a rank holds until rank 0 takes them."""


def broadcast_tensors(tensors: Sequence[Tensor] | None, *, device: torch.device) -> list[Tensor]:
    """Return rank 0's tensors, each on the device of its rank; what the others give does not matter."""
    is_main = dist.get_rank() == 0
    outlines = broadcast_json([(tensor.shape, _dtype_name(tensor)) for tensor in tensors or ()] if is_main else [])
    if is_main:
        there = [tensor.to(device).contiguous() for tensor in tensors or ()]
    else:
        there = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in outlines]
    for tensor in there:
        dist.broadcast(tensor, src=0)
    return there


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def least(number: int) -> int:
    """Return the smallest of the numbers that the ranks give."""
    return int(min(all_gather_json(number)))


def _machine_group() -> dist.ProcessGroup:
    hosts = all_gather_json(socket.gethostname())
    own = dist.group.WORLD
    assert own is not None
    if len(set(hosts)) == 1:
        return own
    for host in dict.fromkeys(hosts):
        group = new_group([rank for rank, name in enumerate(hosts) if name == host])
        own = group if host == socket.gethostname() else own
    return own


class Ranks:
    """All processes of a run, of which rank 0 alone reads references, prints and writes files.

    `device` is that of this process.
    """

    def __init__(self, shape: MeshShape, device: torch.device, exchange: ExchangePlan | None = None) -> None:
        self.mesh = ParallelMesh(shape, device_type=device.type)
        use_mesh(self.mesh)
        self.device = device
        self._exchange = exchange or ExchangePlan()
        self._route = open_route(self.mesh, self._exchange)
        self.machine_group = _machine_group()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return dist.get_rank() == 0

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each block's heads and features; None: each has all of them."""
        return self.mesh.group("tensor") if self.mesh.shape.tensor > 1 else None

    def share_tokens(self, transformer: MMDiT) -> Callable[..., Tensor]:
        """Return what is called like the transformer, and computes with this rank's share of the tokens."""
        if self.mesh.shape.ring * self.mesh.shape.ulysses == 1:
            return transformer
        lengths = SequenceLengths.of_mesh(self.mesh)
        attention = sequence_attention(
            transformer.attention, self.mesh, lengths, plan=self._exchange, route=self._route
        )
        transformer.set_attention(attention)
        return SequenceParallel(
            transformer,
            self.mesh.group("ring", "ulysses"),
            lengths,
            sequence_inputs=SEQUENCE_INPUTS,
            text_sequence_inputs=TEXT_SEQUENCE_INPUTS,
        )

    def share_branches(self, velocity: VelocityFn, *, on_evaluation: Callable[[], None]) -> VelocityFn:
        """Return the same velocity, of which this rank computes its share of the branches; see `SharedBranches`."""
        if self.mesh.shape.guidance == 1:
            return velocity
        return SharedBranches(velocity, self.mesh.group("guidance"), on_evaluation=on_evaluation)


class SharedBranches:
    """A velocity of which each rank of a group computes some branches, and gets the others' from them.

    All ranks ask for the same. `velocity` is what one rank alone would use, and calls `on_evaluation` itself; here it
    is called for each branch that another rank computes.
    """

    def __init__(
        self, velocity: VelocityFn, group: dist.ProcessGroup, *, on_evaluation: Callable[[], None] = lambda: None
    ) -> None:
        self._velocity = velocity
        self._group = group
        self._on_evaluation = on_evaluation

    def __call__(
        self, packed_latents_1ND: Tensor, t: float, branches: tuple[Branch, ...], /, cached: CachedStep | None = None
    ) -> dict[Branch, Tensor]:
        """Return velocity_1ND of every one of `branches` at time `t`."""
        rank, count = dist.get_rank(self._group), dist.get_world_size(self._group)
        asked = packed_latents_1ND, t, branches[rank::count]
        own = self._velocity(*asked) if cached is None else self._velocity(*asked, cached)
        velocities = {}
        for index, branch in enumerate(branches):
            velocity_1ND = own[branch].contiguous() if branch in own else torch.empty_like(packed_latents_1ND)
            dist.broadcast(velocity_1ND, group=self._group, group_src=index % count)
            velocities[branch] = velocity_1ND
            if branch not in own and (cached is None or not cached.is_reused):
                self._on_evaluation()
        return velocities


class SharedDecoder(nn.Module):
    """Takes the place of a decoder whose tiles the ranks decode in turn; rank 0 gets all of them.

    All ranks ask for the same tiles in the same order. One that is another's costs a rank nothing, so that it is ahead
    of rank 0 with the next of its own. What it gets itself are outlines without pixels.
    """

    def __init__(self, vae: Autoencoder) -> None:
        super().__init__()
        self._decoder, self._grid, self._channels = vae.decoder, vae.grid, vae.last_layer.out_channels
        self._asked = 0
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def forward(
        self,
        latents_BCTHW: Tensor,
        *,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Tensor:
        """Return the pixels of a tile, in the host's memory; see `Autoencoder.decode`."""
        owner, rank = self._asked % dist.get_world_size(), dist.get_rank()
        self._asked += 1
        if owner == rank:
            chunks = {} if chunk_frames is None else {"chunk_frames": chunk_frames, "store": store}
            pixels_BCTHW: Tensor = self._decoder(latents_BCTHW, **chunks, canvas=_HOST)
            if rank == 0:
                return pixels_BCTHW
            self._send(pixels_BCTHW.contiguous())
        batch, _, frames, height, width = latents_BCTHW.shape
        space = self._grid.spatial_compression_ratio
        shape = batch, self._channels, self._grid.num_frames(frames), height * space, width * space
        if rank != 0:
            return torch.empty(shape, dtype=latents_BCTHW.dtype, device="meta")
        pixels_BCTHW = torch.empty(shape, dtype=latents_BCTHW.dtype)
        dist.recv(pixels_BCTHW, src=owner)
        return pixels_BCTHW

    def wait(self) -> None:
        """Wait until rank 0 has what this one sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, pixels_BCTHW: Tensor) -> None:
        if len(self._sent) == _TILES_AHEAD:
            self._sent.popleft()[0].wait()
        work = dist.isend(pixels_BCTHW, dst=0)
        assert work is not None
        self._sent.append((work, pixels_BCTHW))


@contextmanager
def shared_tiles(vae: Autoencoder) -> Iterator[SharedDecoder]:
    """Let the ranks share the tiles of an autoencoder inside the block."""
    decoder = vae.decoder
    shared = SharedDecoder(vae)
    vae.decoder = shared
    try:
        yield shared
    finally:
        vae.decoder = decoder


def start_ranks(settings: GenerateSettings, *, flags: Sequence[str] = (), command: str = "generate") -> None:
    """Run a command in processes of their own, of which the first prints; return when all are done.

    The ranks read the validated settings from a file, and get the `flags` of the command line. Errors as `launch`.
    """
    with log_folder(command) as log_dir:
        request = _ranks_to_start(settings, log_dir)
        values = settings.model_dump(mode="json")
        saved = write_settings(log_dir, {"schema": SIDECAR_SCHEMA, "settings": values})
        launch(request, [command, "--from", str(saved), *flags])


def start_ranks_of_rows(settings: GenerateSettings, arguments: Sequence[str]) -> None:
    """Run a command line in processes of their own, which find out that they are ranks; errors as `launch`."""
    with log_folder("generate") as log_dir:
        launch(_ranks_to_start(settings, log_dir), arguments)


@contextmanager
def joined_for_rows(context: RankContext) -> Iterator[dist.ProcessGroup]:
    """Join the other ranks on the CPU, and yield a group in which one may wait for days until the others are done."""
    with joined(context, device_type="cpu"):
        group = dist.new_group(backend="gloo", timeout=_LONGEST)
        assert group is not None
        beat("rows")
        yield group


def device_for_rows(settings: GenerateSettings, context: RankContext) -> str:
    """Return the device on which a rank makes rows of its own, the current one from here on; errors as `joined`."""
    settings = settings_of_ranks(settings, context)
    device = rank_device(context, device_type(settings.runtime.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_is_gpu()
    return str(device)


def require_devices(settings: GenerateSettings) -> None:
    """Raise a RequestError if the settings are for several machines, a HardwareError if devices are too few."""
    _ranks_to_start(settings, Path()).check()


def planned_hardware(settings: GenerateSettings, reporter: Reporter) -> Hardware | None:
    """Return the kind of device that ranks are planned on where this machine has none, with a warning; None: it has."""
    if settings.parallel.world_size == 1:
        return None
    try:
        require_devices(settings)
    except HardwareError as error:
        there = torch.cuda.is_available()
        on = "the GPU that is here" if there else "CUDA GPUs, whose free memory is not known"
        reporter.warn(f"this machine could not run it: {error.message}; planned on {on}")
        return None if there else hardware_of_ranks(settings)
    return None


def hardware_of_ranks(settings: GenerateSettings, *, gpu: GpuSettings | None = None) -> Hardware:
    """Return the kind of device that ranks start on, none of which is asked; `gpu`: of a machine that is not here."""
    kind = "cpu" if settings.runtime.device == "cpu" else "cuda"
    dtype = torch_dtype(settings.runtime.dtype) if settings.runtime.dtype is not DType.AUTO else None
    dtype = dtype or (torch.float32 if kind == "cpu" else torch.bfloat16)
    if gpu is not None:
        return Hardware(torch.device("cuda"), gpu.cuda_name, dtype, gpu.free_bytes, gpu.memory, gpu.host_memory)
    return Hardware(torch.device(kind), kind, dtype, free_bytes=UNKNOWN_BYTES, total_bytes=UNKNOWN_BYTES)


def _ranks_to_start(settings: GenerateSettings, log_dir: Path) -> LaunchRequest:
    parallel = settings.parallel
    # Devices by number are GPUs: processes on a CPU are started only where the CPU is asked for.
    kind: DeviceType = "cpu" if settings.runtime.device == "cpu" else "cuda"
    return LaunchRequest.of(
        parallel,
        gpus=parallel.ranks_per_node,
        device_type=kind,
        log_dir=log_dir,
        output_dir=sample_files(settings, 0).media.parent,
    )


@contextmanager
def planned_on_ranks(
    settings: GenerateSettings, context: RankContext, reporter: Reporter
) -> Iterator[tuple[Chain, Ranks]]:
    """Join the other ranks, and yield the jobs on which all have agreed, for this rank's device.

    Errors are those of `joined_to_generate` and of `chain_of_rank`.
    """
    with joined_to_generate(settings, context, reporter) as (agreed_settings, device):
        chain = chain_of_rank(agreed_settings, device)
        yield chain, Ranks(chain.video.mesh, device, chain.video.exchange)


@contextmanager
def joined_to_generate(
    settings: GenerateSettings, context: RankContext, reporter: Reporter
) -> Iterator[tuple[GenerateSettings, torch.device]]:
    """Join the other ranks, and yield the settings on which all have agreed, and this rank's device.

    Rank 0's settings count; where they are not set, those of `context`.

    Raises:
        RequestError: the settings ask for another number of ranks, or contradict themselves.
        HardwareError: there is no such device, or the ranks don't find each other.
    """
    settings = settings_of_ranks(settings, context)
    if context.is_main:
        settings = refined(settings, reporter=reporter)
    with joined(context, device_type=device_type(settings.runtime.device)) as device:
        settings = agreed(with_mode(settings, reporter) if context.is_main else settings)
        parallel = settings.parallel
        with watched_collectives(limit_s=parallel.watch_limit_s) if parallel.watch else nullcontext():
            yield settings, device


def chain_of_rank(settings: GenerateSettings, device: torch.device) -> Chain:
    """Return the jobs of a request for this rank's device, planned for the GPU with the least free memory.

    All ranks call it. Errors are those of `make_chain`.
    """
    hardware = rank_hardware(settings, device=str(device))
    return make_chain(settings, hardware=replace(hardware, free_bytes=least(hardware.free_bytes)))
