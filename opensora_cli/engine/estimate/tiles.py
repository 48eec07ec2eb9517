"""Memory of an autoencoder: its largest tile is run once, and every other tile takes its share of that."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.engine.components.autoencoders import new_autoencoder
from opensora_cli.engine.estimate.fake_tensors import HOST, Need, fake_device, fake_module
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.hunyuan import Decoder, Encoder
from opensora_cli.models.vae.tiles import TileGrid, Tiling
from opensora_cli.settings.components import VAESettings

DATA, JOINED = "data", "joined"
"""Inputs and results, and the rest of the peak while tiles are joined."""

_FEW_FRAMES = 4
"""Fewest frames between the two clips from which the memory of a longer one is extrapolated."""

TileShape = tuple[int, int, int, int]
"""Channels, frames, height and width of an input."""


@dataclass(frozen=True, slots=True)
class TileMemory:
    """Memory of an encoder or decoder for its largest tile."""

    shape: TileShape
    peak_bytes: int
    """Peak without the input and the kept kernels."""
    kept_bytes: int
    """Kernels that the module computes from its weights at the first call, and keeps."""
    channels: int
    """Channels of the result."""

    def need(self, sizes: Mapping[object, int]) -> Need:
        """Return the need of all tiles from the bytes of `DATA`, of `JOINED`, and of `FakeCoder.live_bytes`."""
        data = sizes[DATA]
        computing = (sizes[share] + round(self.peak_bytes * share) for share in sizes if isinstance(share, float))
        return Need(data + self.kept_bytes, max(sizes[JOINED], max(computing) - data))


def largest_tile(shape: TileShape, grid: TileGrid, tiling: Tiling) -> TileShape:
    """Return the shape of the first tile of a clip, which no other tile exceeds."""
    channels, frames, *sides = shape
    if tiling.temporal and frames > grid.time.size:
        frames = min(frames, grid.time.size + grid.is_causal)
    if tiling.spatial and max(sides) > grid.space.size:
        sides = [min(side, grid.space.size) for side in sides]
    return channels, frames, sides[0], sides[1]


@lru_cache(maxsize=256)
def tile_memory(
    settings: VAESettings,
    shape: TileShape,
    dtype: torch.dtype,
    device_type: str,
    *,
    decodes: bool,
    chunk_frames: int | None = None,
    store_on_host: bool = False,
) -> TileMemory:
    """Return the memory of the encoder or the decoder for one tile.

    A clip that is computed in chunks takes the same amount more for every chunk, so that two short clips give the
    memory of a long one. The blocks of a width are equal except the first.
    """
    few_layers = settings.replace({"layers_per_block": min(settings.layers_per_block, 1 if decodes else 2)})
    with fake_device(device_type) as device:
        module = fake_module(lambda: _coder(new_autoencoder(few_layers), decodes), device=device, dtype=dtype)
        options: dict[str, object] = {"canvas": HOST} if decodes else {}
        if chunk_frames is not None:
            options |= {"chunk_frames": chunk_frames, "store": HOST if store_on_host else device}
        channels, frames, height, width = shape

        def run(length: int) -> tuple[int, int, int]:
            """Return the peak for a clip, the bytes that the module keeps, and the channels of the result."""
            clip_1CTHW = torch.empty(1, channels, length, height, width, dtype=dtype, device=device)
            with TensorBytes(device_type=device.type) as counter:
                out_1CTHW: Tensor = module(clip_1CTHW, **options)
            out_channels = out_1CTHW.shape[1]
            del out_1CTHW
            # Kernels are there at the peak, which is at the highest resolution.
            return counter.peak_bytes - counter.live_bytes, counter.live_bytes, out_channels

        chunk = chunk_frames
        if chunk is None and isinstance(module, (Encoder, Decoder)):
            chunk = module.chunk_frames_for(torch.empty(1, channels, frames, height, width, device=device))
        if chunk is None:
            return TileMemory(shape, *run(frames))
        # In a shorter clip, kernels could need more than frames.
        step = chunk * -(-_FEW_FRAMES // chunk)
        short = step + (frames - 1) % step + 1
        more = (frames - short) // step
        if more < 2:
            return TileMemory(shape, *run(frames))
        peak_bytes, kept_bytes, out_channels = run(short)
        longer_bytes, *_ = run(short + step)
        return TileMemory(shape, peak_bytes + more * (longer_bytes - peak_bytes), kept_bytes, out_channels)


def _coder(vae: Autoencoder, decodes: bool) -> nn.Module:
    return vae.decoder if decodes else vae.encoder


class FakeCoder(nn.Module):
    """Stand-in for the encoder or decoder of an autoencoder that allocates only its results.

    `live_bytes` has the most live bytes of `counter` before a tile, by the tile's share of the largest one.
    """

    def __init__(self, tile: TileMemory, grid: LatentGrid, counter: TensorBytes, *, decodes: bool) -> None:
        super().__init__()
        self._tile, self._grid, self._counter, self._decodes = tile, grid, counter, decodes
        self.live_bytes: dict[object, int] = {}

    def forward(self, clip_BCTHW: Tensor, **_: object) -> Tensor:
        """Return the result for a tile. Options are ignored."""
        batch, _channels, frames, height, width = clip_BCTHW.shape
        share = frames * height * width / prod(self._tile.shape[1:])
        self.live_bytes[share] = max(self.live_bytes.get(share, 0), self._counter.live_bytes)
        if self._decodes:
            space = self._grid.spatial_compression_ratio
            size = self._grid.num_frames(frames), height * space, width * space
            return torch.empty(batch, self._tile.channels, *size, dtype=clip_BCTHW.dtype, device=HOST)
        sides = self._grid.latent_size(height, width)
        return clip_BCTHW.new_empty(batch, self._tile.channels, self._grid.latent_frames(frames), *sides)
