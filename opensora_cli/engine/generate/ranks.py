"""The processes that make one video together, as the engine sees them."""

import socket
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.engine.launch.rank import agreed
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.parallel.lengths import SequenceLengths
from opensora_cli.parallel.mesh import MeshShape, ParallelMesh
from opensora_cli.parallel.sequence import SequenceParallel, sequence_attention
from opensora_cli.sampling.denoise import VelocityFn
from opensora_cli.sampling.guidance import Branch

_HOST = torch.device("cpu")
_TILES_AHEAD = 2
"""That a rank holds, decoded, until rank 0 takes them."""


def agreed_tensors(tensors: Sequence[Tensor] | None, *, device: torch.device) -> list[Tensor]:
    """Return rank 0's tensors, each on the device of its rank; what the others give does not matter."""
    is_main = dist.get_rank() == 0
    outlines = agreed([(tensor.shape, tensor.dtype) for tensor in tensors or ()] if is_main else [])
    if is_main:
        there = [tensor.to(device).contiguous() for tensor in tensors or ()]
    else:
        there = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outlines]
    for tensor in there:
        dist.broadcast(tensor, src=0)
    return there


def least(number: int) -> int:
    """Return the smallest of the numbers that the ranks give."""
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return min(numbers)


def _neighbours() -> dist.ProcessGroup:
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    own = dist.group.WORLD
    assert own is not None
    if len(set(hosts)) == 1:
        return own
    for host in dict.fromkeys(hosts):
        group = dist.new_group([rank for rank, name in enumerate(hosts) if name == host])
        own = group if host == socket.gethostname() else own
    return own


class Ranks:
    """All processes of a run, of which rank 0 alone reads references, prints and writes files.

    Args:
        shape: how they share the transformer's work.
        device: of this one.
    """

    def __init__(self, shape: MeshShape, device: torch.device) -> None:
        self.mesh = ParallelMesh(shape, device_type=device.type)
        self.device = device
        self.neighbours = _neighbours()
        """The ranks of this machine."""

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
        transformer.set_attention(sequence_attention(sdpa, self.mesh, lengths))
        return SequenceParallel(
            transformer,
            self.mesh.group("ring", "ulysses"),
            lengths,
            sequence_inputs=SEQUENCE_INPUTS,
            text_sequence_inputs=TEXT_SEQUENCE_INPUTS,
        )

    def share_branches(self, velocity: VelocityFn, *, on_evaluation: Callable[[], None]) -> VelocityFn:
        """Return the same velocity, of which this rank computes its share of the branches.

        Args:
            velocity: what one rank alone would use; calls `on_evaluation` itself.
            on_evaluation: called for each branch that another computes.
        """
        if self.mesh.shape.guidance == 1:
            return velocity
        return SharedBranches(velocity, self.mesh.group("guidance"), on_evaluation=on_evaluation)


class SharedBranches:
    """A velocity of which each rank of a group computes some branches, and gets the others' from them.

    Args:
        velocity: what one rank alone would use.
        group: the ranks; all ask for the same.
        on_evaluation: called for each branch that another computes.
    """

    def __init__(
        self, velocity: VelocityFn, group: dist.ProcessGroup, *, on_evaluation: Callable[[], None] = lambda: None
    ) -> None:
        self._velocity = velocity
        self._group = group
        self._on_evaluation = on_evaluation

    def __call__(self, packed_latents_1ND: Tensor, t: float, branches: tuple[Branch, ...], /) -> dict[Branch, Tensor]:
        """Return velocity_1ND of every one of `branches` at time `t`."""
        rank, count = dist.get_rank(self._group), dist.get_world_size(self._group)
        own = self._velocity(packed_latents_1ND, t, branches[rank::count])
        velocities = {}
        for index, branch in enumerate(branches):
            velocity_1ND = own[branch].contiguous() if branch in own else torch.empty_like(packed_latents_1ND)
            dist.broadcast(velocity_1ND, group=self._group, group_src=index % count)
            velocities[branch] = velocity_1ND
            if branch not in own:
                self._on_evaluation()
        return velocities


class SharedDecoder(nn.Module):
    """Takes the place of a decoder whose tiles the ranks decode in turn; rank 0 gets all of them.

    All ranks ask for the same tiles in the same order. One that is another's costs a rank nothing, so that it is ahead
    of rank 0 with the next of its own. What it gets itself are outlines without pixels.

    Args:
        vae: whose decoder it stands for.
    """

    def __init__(self, vae: HunyuanVAE) -> None:
        super().__init__()
        self._decoder, self._config = vae.decoder, vae.config
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
        """Return the pixels of a tile, in the host's memory; see `HunyuanVAE.decode`."""
        owner, rank = self._asked % dist.get_world_size(), dist.get_rank()
        self._asked += 1
        if owner == rank:
            pixels_BCTHW: Tensor = self._decoder(latents_BCTHW, chunk_frames=chunk_frames, store=store, canvas=_HOST)
            if rank == 0:
                return pixels_BCTHW
            self._send(pixels_BCTHW.contiguous())
        batch, _, frames, height, width = latents_BCTHW.shape
        time, space = self._config.time_compression_ratio, self._config.spatial_compression_ratio
        shape = batch, self._config.out_channels, (frames - 1) * time + 1, height * space, width * space
        if rank != 0:
            return torch.empty(shape, dtype=latents_BCTHW.dtype, device="meta")
        pixels_BCTHW = torch.empty(shape, dtype=latents_BCTHW.dtype)
        dist.recv(pixels_BCTHW, src=owner)
        return pixels_BCTHW

    def finish(self) -> None:
        """Wait until rank 0 has what this one sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, pixels_BCTHW: Tensor) -> None:
        if len(self._sent) == _TILES_AHEAD:
            self._sent.popleft()[0].wait()
        work = dist.isend(pixels_BCTHW, dst=0)
        assert work is not None
        self._sent.append((work, pixels_BCTHW))
