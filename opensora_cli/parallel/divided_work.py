"""Work that ranks divide without dividing tensors: branches of guidance, and tiles of a decoder."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from opensora_cli.models.vae.autoencoder import Autoencoder
    from opensora_cli.sampling.denoise import VelocityFn
    from opensora_cli.sampling.guidance import Branch
    from opensora_cli.sampling.step_cache import CachedStep

_HOST = torch.device("cpu")
_TILES_AHEAD = 2
"""Decoded tiles that a rank holds until rank 0 receives them."""


class SharedBranches:
    """Velocity whose branches are divided among the ranks of a group; every rank asks for all of them, and gets them.

    `velocity` is the function of a single process, and calls `on_evaluation` for its own branches. This class calls
    `on_evaluation` for each branch that another rank evaluates.
    """

    def __init__(
        self, velocity: "VelocityFn", group: dist.ProcessGroup, *, on_evaluation: Callable[[], None] = lambda: None
    ) -> None:
        self._velocity, self._group, self._on_evaluation = velocity, group, on_evaluation

    def __call__(
        self,
        packed_latents_1ND: Tensor,
        t: float,
        branches: "tuple[Branch, ...]",
        /,
        cached: "CachedStep | None" = None,
    ) -> "dict[Branch, Tensor]":
        """Return velocity_1ND of each of `branches` at time `t`."""
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
    """Replaces a decoder whose tiles the ranks decode in turn; rank 0 gets all tiles.

    All ranks ask for the same tiles in the same order. A rank skips the tiles of others, and so runs ahead of rank 0
    with its own. Ranks other than 0 get tensors without pixels.
    """

    def __init__(self, vae: "Autoencoder") -> None:
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
        """Return the pixels of a tile, on the CPU; see `Autoencoder.decode`."""
        owner, rank = self._asked % dist.get_world_size(), dist.get_rank()
        self._asked += 1
        if owner == rank:
            chunks = {} if chunk_frames is None else {"chunk_frames": chunk_frames, "store": store}
            pixels_BCTHW: Tensor = self._decoder(latents_BCTHW, **chunks, canvas=_HOST)
            if rank == 0:
                return pixels_BCTHW
            if len(self._sent) == _TILES_AHEAD:
                self._sent.popleft()[0].wait()
            pixels_BCTHW = pixels_BCTHW.contiguous()
            work = dist.isend(pixels_BCTHW, dst=0)
            assert work is not None
            self._sent.append((work, pixels_BCTHW))
        batch, _, frames, height, width = latents_BCTHW.shape
        space = self._grid.spatial_compression_ratio
        shape = batch, self._channels, self._grid.num_frames(frames), height * space, width * space
        if rank != 0:
            return torch.empty(shape, dtype=latents_BCTHW.dtype, device="meta")
        pixels_BCTHW = torch.empty(shape, dtype=latents_BCTHW.dtype)
        dist.recv(pixels_BCTHW, src=owner)
        return pixels_BCTHW

    def wait(self) -> None:
        """Wait until rank 0 has received all tiles of this rank."""
        while self._sent:
            self._sent.popleft()[0].wait()


@contextmanager
def shared_tiles(vae: "Autoencoder") -> Iterator[SharedDecoder]:
    decoder = vae.decoder
    vae.decoder = shared = SharedDecoder(vae)
    try:
        yield shared
    finally:
        vae.decoder = decoder
