"""Memory and work of an autoencoder: its largest tile is run once, and every other tile takes its share of that."""

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opensora_cli.core.device_names import GPU
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.engine.components.architectures import new_autoencoder, vae_tiling
from opensora_cli.engine.estimate.fake_tensors import (
    HOST,
    Counts,
    Need,
    Size,
    extrapolated,
    fake_device,
    fake_module,
    repeat_calls,
)
from opensora_cli.engine.estimate.work import Work, WorkCounter
from opensora_cli.media.resize import to_uint8
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder
from opensora_cli.models.vae.hunyuan import Decoder, Encoder
from opensora_cli.models.vae.tiles import TileGrid, Tiling
from opensora_cli.settings.components import VAESettings

_FEW_TILES = 30
"""Most tiles that are estimated one by one."""
_FEW_FRAMES = 4
"""Fewest frames between the two clips from which the memory of a longer one is extrapolated."""

TileShape = tuple[int, int, int, int]
"""Channels, frames, height and width of an input."""


class TileMemory(NamedTuple):
    """Memory of an encoder or decoder for its largest tile."""

    peak_bytes: int
    """Peak without the input."""
    channels: int
    """Channels of the result."""


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

        def run(size: Size) -> Counts:
            clip_1CTHW = torch.empty(1, channels, *size, height, width, dtype=dtype, device=device)
            with TensorBytes(device_type=device.type) as counter:
                out_1CTHW: Tensor = module(clip_1CTHW, **options)
            out_channels = out_1CTHW.shape[1]
            del out_1CTHW
            return counter.peak_bytes, out_channels

        chunk = chunk_frames
        if chunk is None and isinstance(module, (Encoder, Decoder)):
            chunk = module.chunk_frames_for(torch.empty(1, channels, frames, height, width, device=device))
        # In a shorter clip, kernels could need more than frames.
        step = frames if chunk is None else chunk * -(-_FEW_FRAMES // chunk)
        peak_bytes, channels = extrapolated(run, (frames,), steps=(step,), few=(step + 1,))
        return TileMemory(peak_bytes, channels)


def _coder(vae: Autoencoder, decodes: bool) -> nn.Module:
    return vae.decoder if decodes else vae.encoder


class _FakeCoder(nn.Module):
    """Stand-in for an encoder or decoder that takes the memory of the largest tile, or its share of that."""

    def __init__(self, tile: TileMemory, largest: TileShape, grid: LatentGrid, *, decodes: bool) -> None:
        super().__init__()
        self._tile, self._values, self._grid, self._decodes = tile, prod(largest[1:]), grid, decodes

    def forward(self, clip_BCTHW: Tensor, **_: object) -> Tensor:
        """Return the result for a tile. Options are ignored."""
        batch, _channels, frames, height, width = clip_BCTHW.shape
        share = frames * height * width / self._values
        clip_BCTHW.new_empty(round(self._tile.peak_bytes * share), dtype=torch.uint8)
        if self._decodes:
            space = self._grid.spatial_compression_ratio
            size = self._grid.num_frames(frames), height * space, width * space
            return torch.empty(batch, self._tile.channels, *size, dtype=clip_BCTHW.dtype, device=HOST)
        sides = self._grid.latent_size(height, width)
        return clip_BCTHW.new_empty(batch, self._tile.channels, self._grid.latent_frames(frames), *sides)


def _need(
    settings: VAESettings,
    coder: _FakeCoder,
    dtype: torch.dtype,
    device_type: str,
    run: Callable[[Autoencoder, Callable[..., Tensor]], object],
) -> Need:
    """Return the need of `run`, which returns its inputs and results, with `coder` as both encoder and decoder."""

    def without_coders() -> Autoencoder:
        vae = new_autoencoder(settings)
        vae.encoder, vae.decoder = nn.Identity(), nn.Identity()
        return vae

    with fake_device(device_type) as device:
        vae = fake_module(without_coders, device=device, dtype=dtype)
        vae.encoder = vae.decoder = coder
        with TensorBytes(device_type=device.type) as counter:
            data = run(vae, partial(torch.empty, dtype=dtype, device=device))
            need = Need.of(counter)
            del data
            return need


@lru_cache(maxsize=256)
def decoding_need(
    settings: VAESettings,
    tiling: Tiling,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    chunks: tuple[int | None, bool],
) -> Need:
    """Return the need of decoding; that of many tiles follows from smaller clips.

    `shown` are the height and width of the pixels that are kept, and `chunks` are frames and whether the host stores
    them, see `OffloadPlan`.
    """
    grid, (height, width) = settings.sizes.tile_grids()[1], shown
    largest = largest_tile(latent_shape, grid, tiling)
    tile = tile_memory(
        settings, largest, dtype, device_type, decodes=True, chunk_frames=chunks[0], store_on_host=chunks[1]
    )
    channels, *size = latent_shape

    def count(size: Size) -> Counts:
        def run(vae: Autoencoder, empty: Callable[..., Tensor]) -> Tensor:
            latents_1CTHW = empty(1, channels, *size)
            # The same steps as in `decode_latents` of generation.
            pieces_1CTHW = vae.decode_pieces(latents_1CTHW, tiling=tiling, canvas=HOST)
            deque(map(lambda piece_1CTHW: _shown(piece_1CTHW[0, :, :, :height, :width]), pieces_1CTHW), maxlen=0)
            return latents_1CTHW

        coder = _FakeCoder(tile, largest, settings.grid, decodes=True)
        return _need(settings, coder, dtype, device_type, run)

    if grid.count((size[0], size[1], size[2]), tiling) <= _FEW_TILES:
        return Need(*count(tuple(size)))
    axes = ((grid.time, tiling.temporal), (grid.space, tiling.spatial), (grid.space, tiling.spatial))
    found = extrapolated(
        count,
        tuple(size),
        steps=tuple(axis.stride if is_cut else length for (axis, is_cut), length in zip(axes, size, strict=True)),
        few=tuple(axis.size + 2 * axis.stride if is_cut else 0 for axis, is_cut in axes),
    )
    return Need(*found)


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
    largest = largest_tile((COLORS, max(num_frames), *sides), settings.sizes.tile_grids()[0], tiling)
    tile = tile_memory(settings, largest, dtype, device_type, decodes=False)

    def run(vae: Autoencoder, empty: Callable[..., Tensor]) -> list[Tensor]:
        latents: list[Tensor] = []
        for frames in num_frames:
            pixels_1CTHW = empty(1, COLORS, frames, *sides)
            latents.append(vae.encode(pixels_1CTHW, tiling=tiling)[0])
        return [*latents, pixels_1CTHW]

    coder = _FakeCoder(tile, largest, settings.grid, decodes=False)
    return _need(settings, coder, dtype, device_type, run)


@lru_cache(maxsize=64)
def decoding_work(settings: VAESettings, latent_shape: tuple[int, int, int, int], dtype: torch.dtype) -> Work:
    """Return the work of decoding the latents (C, T, H, W) of one clip, in the tiles of the settings."""
    return _work(
        settings,
        dtype,
        lambda vae, empty: deque(
            vae.decode_pieces(empty(1, *latent_shape), tiling=vae_tiling(settings), canvas=HOST), maxlen=0
        ),
    )


@lru_cache(maxsize=64)
def encoding_work(settings: VAESettings, num_frames: int, height: int, width: int, dtype: torch.dtype) -> Work:
    """Return the work of encoding one clip."""
    return _work(
        settings,
        dtype,
        lambda vae, empty: vae.encode(empty(1, COLORS, num_frames, height, width), tiling=vae_tiling(settings)),
    )


def _work(
    settings: VAESettings, dtype: torch.dtype, run: Callable[[Autoencoder, Callable[..., Tensor]], object]
) -> Work:
    counter = WorkCounter()
    with fake_device(GPU) as device, counter:
        vae = fake_module(lambda: new_autoencoder(settings), device=device, dtype=dtype)
        for coder in (vae.encoder, vae.decoder):
            repeat_calls(coder, work=counter)
        run(vae, partial(torch.empty, dtype=dtype, device=device))
        return counter.work
