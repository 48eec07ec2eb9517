"""Memory of an autoencoder: its largest tile is run once, and every other tile takes its share of that."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.engine.components.autoencoders import new_autoencoder, vae_tiling
from opensora_cli.engine.estimate.fake_tensors import HOST, Counts, Need, Size, extrapolated, fake_device, fake_module
from opensora_cli.media.resize import to_uint8
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder
from opensora_cli.models.vae.hunyuan import Decoder, Encoder
from opensora_cli.models.vae.tiles import TileGrid, Tiling
from opensora_cli.settings.components import VAESettings

DATA, JOINED = "data", "joined"
"""Inputs and results, and the rest of the peak while tiles are joined."""

_FEW_TILES = 30
"""Most tiles that are estimated one by one."""
_FEW_FRAMES = 4
"""Fewest frames between the two clips from which the memory of a longer one is extrapolated."""

_PEAK, _CHANNELS = "peak", "channels"

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
        kept: list[int] = []

        def run(size: Size) -> Counts:
            """Return the peak for a clip of some frames, and the channels of the result."""
            clip_1CTHW = torch.empty(1, channels, *size, height, width, dtype=dtype, device=device)
            with TensorBytes(device_type=device.type) as counter:
                out_1CTHW: Tensor = module(clip_1CTHW, **options)
            out_channels = out_1CTHW.shape[1]
            del out_1CTHW
            # Kernels are there at the peak, which is at the highest resolution.
            kept.append(counter.live_bytes)
            return {_PEAK: counter.peak_bytes - counter.live_bytes, _CHANNELS: out_channels}

        chunk = chunk_frames
        if chunk is None and isinstance(module, (Encoder, Decoder)):
            chunk = module.chunk_frames_for(torch.empty(1, channels, frames, height, width, device=device))
        # In a shorter clip, kernels could need more than frames.
        step = frames if chunk is None else chunk * -(-_FEW_FRAMES // chunk)
        found = extrapolated(run, (frames,), steps=(step,), few=(step + 1,))
        # The first call computes the kernels that the module keeps.
        return TileMemory(shape, found[_PEAK], kept[0], found[_CHANNELS])


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


def decoding_need(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    chunks: tuple[int | None, bool],
) -> Need:
    """Return the need of decoding; that of many tiles follows from smaller clips."""
    chunk_frames, store_on_host = chunks
    grid = settings.sizes.tile_grids()[1]
    tile = tile_memory(
        settings,
        largest_tile(latent_shape, grid, tiling),
        dtype,
        device_type,
        decodes=True,
        chunk_frames=chunk_frames,
        store_on_host=store_on_host,
    )
    channels, *size = latent_shape
    axes = ((grid.time, tiling.temporal), (grid.space, tiling.spatial), (grid.space, tiling.spatial))

    def count(smaller: Size) -> Counts:
        frames, rows, columns = smaller
        return dict(_join_tiles(settings, tiling, (channels, frames, rows, columns), shown, dtype, device_type))

    if grid.count((size[0], size[1], size[2]), tiling) <= _FEW_TILES:
        return tile.need(count(tuple(size)))
    return tile.need(
        extrapolated(
            count,
            tuple(size),
            steps=tuple(axis.stride if is_cut else length for (axis, is_cut), length in zip(axes, size, strict=True)),
            few=tuple(axis.size + 2 * axis.stride if is_cut else 0 for axis, is_cut in axes),
        )
    )


def _without_coders(settings: VAESettings) -> Autoencoder:
    """Return an autoencoder whose encoder and decoder are missing."""
    vae = new_autoencoder(settings)
    vae.encoder, vae.decoder = nn.Identity(), nn.Identity()
    return vae


@lru_cache(maxsize=256)
def _join_tiles(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
) -> Mapping[object, int]:
    """Return the bytes of everything in decoding except the decoder itself; see `TileMemory.need`."""
    height, width = shown
    tile = TileMemory(largest_tile(latent_shape, settings.sizes.tile_grids()[1], tiling), 0, 0, COLORS)
    with fake_device(device_type) as device:
        vae = fake_module(lambda: _without_coders(settings), device=device, dtype=dtype)
        with TensorBytes(device_type=device.type) as counter:
            decoder = FakeCoder(tile, settings.grid, counter, decodes=True)
            vae.decoder = cast(Any, decoder)
            latents_1CTHW = torch.empty(1, *latent_shape, dtype=dtype, device=device)
            # The same steps as in `decode_latents` of generation.
            pieces_1CTHW = vae.decode_pieces(latents_1CTHW, tiling=tiling, canvas=HOST)
            deque(map(lambda piece_1CTHW: _shown(piece_1CTHW[0, :, :, :height, :width]), pieces_1CTHW), maxlen=0)
            need = Need.of(counter)
            del latents_1CTHW
            return {DATA: need.data, JOINED: need.activations, **decoder.live_bytes}


def _shown(pixels_CTHW: Tensor) -> Tensor:
    """Allocate like `to_uint8`. All frames need the same, so one represents all."""
    channels, frames, height, width = pixels_CTHW.shape
    _others_THWC = torch.empty(frames - 1, height, width, channels, dtype=torch.uint8)
    return to_uint8(pixels_CTHW[:, :1])


@lru_cache(maxsize=64)
def encoding_need(
    settings: VAESettings, num_frames: tuple[int, ...], sides: tuple[int, int], dtype: torch.dtype, device_type: str
) -> Need:
    """Return the need of encoding clips of these lengths, one after the other; `sides` are height and width."""
    tiling = vae_tiling(settings)
    grid = settings.sizes.tile_grids()[0]
    tile = tile_memory(
        settings,
        largest_tile((COLORS, max(num_frames), *sides), grid, tiling),
        dtype,
        device_type,
        decodes=False,
    )
    with fake_device(device_type) as device:
        empty = partial(torch.empty, dtype=dtype, device=device)
        vae = fake_module(lambda: _without_coders(settings), device=device, dtype=dtype)
        with TensorBytes(device_type=device.type) as counter:
            encoder = FakeCoder(tile, settings.grid, counter, decodes=False)
            vae.encoder = cast(Any, encoder)
            latents: list[Tensor] = []
            for frames in num_frames:
                pixels_1CTHW = empty(1, COLORS, frames, *sides)
                latents.append(vae.encode(pixels_1CTHW, tiling=tiling)[0])
            need = Need.of(counter)
            latents.clear()
            return tile.need({DATA: need.data, JOINED: need.activations, **encoder.live_bytes})
