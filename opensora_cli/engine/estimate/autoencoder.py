"""Memory and work of an autoencoder: one tile of each length is run, and the others follow from it."""

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _pop_mode_temporarily

from opensora_cli.core.device_names import GPU
from opensora_cli.engine.components.architectures import new_autoencoder, vae_tiling
from opensora_cli.engine.estimate.fake_tensors import (
    Need,
    Work,
    WorkCounter,
    fake_device,
    fake_module,
    repeat_calls,
)
from opensora_cli.engine.estimate.outlines import HOST
from opensora_cli.media.resize import to_uint8
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder
from opensora_cli.models.vae.hunyuan import Decoder, Encoder
from opensora_cli.models.vae.hunyuan_blocks import CausalConv3d
from opensora_cli.settings.components import VAESettings

_FEW_FRAMES = 4
"""Fewest frames between the two clips from which the memory of a longer one is extrapolated."""
_FEW_POSITIONS = 8
"""Smallest side of a tile, in positions of latents or pixels, from which padding hardly counts."""


@lru_cache(maxsize=256)
def decoding_need(
    settings: VAESettings,
    latent_shape: tuple[int, int, int, int],
    shown: tuple[int, int],
    dtype: torch.dtype,
    device_type: str,
    *,
    chunk_frames: int | None,
    store_on_host: bool,
) -> Need:
    """Return the need of decoding.

    `shown` are the height and width of the pixels that are kept. `chunk_frames` and `store_on_host` are fields of
    `OffloadPlan`.
    """
    height, width = shown

    def decode(vae: Autoencoder, empty: Callable[..., Tensor]) -> Tensor:
        latents_1CTHW = empty(1, *latent_shape)
        store = HOST if store_on_host else latents_1CTHW.device
        # The same steps as in `decode_latents` of generation.
        pieces_1CTHW = vae.decode_pieces(
            latents_1CTHW, tiling=vae_tiling(settings), canvas=HOST, chunk_frames=chunk_frames, store=store
        )
        deque(map(lambda piece_1CTHW: to_uint8(piece_1CTHW[0, :, :, :height, :width]), pieces_1CTHW), maxlen=0)
        return latents_1CTHW

    return _need(settings, dtype, device_type, decode, decodes=True)


def encoding_need(
    settings: VAESettings, num_frames: tuple[int, ...], sides: tuple[int, int], dtype: torch.dtype, device_type: str
) -> Need:
    """Return the need of encoding clips of these lengths, one after the other; `sides` are height and width."""
    needs = [_encoding_need(settings, frames, sides, dtype, device_type) for frames in num_frames]
    pixels = [COLORS * frames * prod(sides) * dtype.itemsize for frames in num_frames]
    # The latents of each clip stay, and its pixels until the next clip.
    latents = [need.data - size for need, size in zip(needs, pixels, strict=True)]
    peak = max(before + sum(need) for before, need in zip(accumulate(latents, initial=0), needs, strict=False))
    data = sum(latents) + pixels[-1]
    return Need(data, peak - data)


@lru_cache(maxsize=64)
def _encoding_need(
    settings: VAESettings, num_frames: int, sides: tuple[int, int], dtype: torch.dtype, device_type: str
) -> Need:
    def encode(vae: Autoencoder, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        pixels_1CTHW = empty(1, COLORS, num_frames, *sides)
        return pixels_1CTHW, vae.encode(pixels_1CTHW, tiling=vae_tiling(settings))

    return _need(settings, dtype, device_type, encode, decodes=False)


def _need(
    settings: VAESettings,
    dtype: torch.dtype,
    device_type: str,
    run: Callable[[Autoencoder, Callable[..., Tensor]], object],
    *,
    decodes: bool,
) -> Need:
    """Return the need of `run`, which returns inputs and outputs."""
    with fake_device(device_type) as device:
        vae = _fake_coder(settings, device, dtype, decodes=decodes)
        with TensorBytes(device_type=device.type) as counter:
            kept = run(vae, partial(torch.empty, dtype=dtype, device=device))
            need = Need.of(counter)
            del kept
    return need


def _fake_coder(settings: VAESettings, device: torch.device, dtype: torch.dtype, *, decodes: bool) -> Autoencoder:
    """Return an autoencoder whose encoder or decoder allocates the peak of each tile at once.

    Blocks of a width are equal except the first, so that few represent all. Call it inside `fake_device`.
    """
    few_layers = settings.replace({"layers_per_block": min(settings.layers_per_block, 1 if decodes else 2)})
    vae = fake_module(lambda: new_autoencoder(few_layers), device=device, dtype=dtype)
    part, grid = vae.decoder if decodes else vae.encoder, settings.grid
    run = part.forward
    known: dict[tuple[int, ...], tuple[int, int, int]] = {}
    """Area of a tile that was run, bytes at its peak, and channels of its result."""

    def forward(clip_1CTHW: Tensor, **options: Any) -> Tensor:
        frames, height, width = sizes = tuple(clip_1CTHW.shape[2:])
        # The first tile is the largest. The memory of others is in proportion to their area, unless padding counts.
        tile = (frames,) if min(height, width) >= _FEW_POSITIONS else sizes
        if tile not in known:
            chunk_frames = options.get("chunk_frames")
            if chunk_frames is None and isinstance(part, (Encoder, Decoder)):
                chunk_frames = part.chunk_frames_for(clip_1CTHW)
            peak = _tile_peak(part, partial(run, **options), clip_1CTHW, chunk_frames)
            known[tile] = height * width, *peak
        area, peak_bytes, channels = known[tile]
        clip_1CTHW.new_empty(peak_bytes * height * width // area, dtype=torch.uint8)
        if decodes:
            space = grid.spatial_compression_ratio
            size = grid.num_frames(frames), height * space, width * space
            return torch.empty(1, channels, *size, dtype=clip_1CTHW.dtype, device=HOST)
        return clip_1CTHW.new_empty(1, channels, grid.latent_frames(frames), *grid.latent_size(height, width))

    part.forward = forward
    return vae


def _tile_peak(
    part: nn.Module, run: Callable[[Tensor], Tensor], clip_1CTHW: Tensor, chunk_frames: int | None
) -> tuple[int, int]:
    """Return the bytes at the peak of a tile, extrapolated from few frames, and the channels of its result.

    Layers run one after the other, each for all chunks. The peak of each layer grows at a rate of its own.
    """
    _, _, num_frames, *sides = clip_1CTHW.shape
    convolutions = [module for module in part.modules() if isinstance(module, CausalConv3d)]
    channels: list[int] = []

    def count(frames: int) -> list[int]:
        piece_1CTHW = clip_1CTHW
        if frames < num_frames:
            piece_1CTHW = clip_1CTHW.new_empty(1, clip_1CTHW.shape[1], frames, *sides)
        # The counter of the clip would count each operation a second time.
        with _pop_mode_temporarily(), TensorBytes(device_type=clip_1CTHW.device.type) as counter:
            for each in convolutions:
                _mark_first_call(each, counter)
            channels.append(run(piece_1CTHW).shape[1])
        counter.mark("end")
        return [mark.peak_bytes for mark in counter.marks]

    # In a shorter clip, kernels could need more than frames.
    step = num_frames if chunk_frames is None else chunk_frames * -(-_FEW_FRAMES // chunk_frames)
    more = (num_frames - 1) // step - 1
    if more <= 1:
        return max(count(num_frames)), channels[0]
    near, far = count(num_frames - more * step), count(num_frames - (more - 1) * step)
    return max(first + more * (second - first) for first, second in zip(near, far, strict=True)), channels[0]


def _mark_first_call(convolution: CausalConv3d, counter: TensorBytes) -> None:
    def pad(*inputs: Any, **options: Any) -> Tensor:
        counter.mark("convolution")
        convolution.__dict__.pop("pad")
        return convolution.pad(*inputs, **options)

    convolution.pad = pad  # type: ignore[method-assign]


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
    with fake_device(GPU) as device:
        vae = fake_module(lambda: new_autoencoder(settings), device=device, dtype=dtype)
        for coder in (vae.encoder, vae.decoder):
            repeat_calls(coder, work=counter)
        with counter:
            run(vae, partial(torch.empty, dtype=dtype, device=device))
    return counter.work
