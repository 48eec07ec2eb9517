"""Memory and work of an autoencoder: one tile of each shape is run, and every other tile takes the same."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from opensora_cli.core.device_names import GPU
from opensora_cli.engine.components.architectures import new_autoencoder, vae_tiling
from opensora_cli.engine.estimate.fake_tensors import (
    Need,
    Work,
    WorkCounter,
    extrapolated,
    fake_device,
    fake_module,
    repeat_calls,
)
from opensora_cli.engine.estimate.outlines import HOST
from opensora_cli.media.resize import to_uint8
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder
from opensora_cli.models.vae.hunyuan import Decoder, Encoder
from opensora_cli.settings.components import VAESettings

_FEW_FRAMES = 4
"""Fewest frames between the two clips from which the memory of a longer one is extrapolated."""


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
    """Return the need of decoding; that of a long clip follows from shorter ones.

    `shown` are the height and width of the pixels that are kept. `chunk_frames` and `store_on_host` are fields of
    `OffloadPlan`.
    """
    channels, _frames, *sides = latent_shape
    height, width = shown

    def count(frames: int) -> Need:
        with coder.counting() as counter:
            latents_1CTHW = torch.empty(1, channels, frames, *sides, dtype=dtype, device=coder.device)
            # The same steps as in `decode_latents` of generation.
            pieces_1CTHW = coder.vae.decode_pieces(
                latents_1CTHW, tiling=vae_tiling(settings), canvas=HOST, chunk_frames=chunk_frames, store=store
            )
            deque(map(lambda piece_1CTHW: _shown(piece_1CTHW[0, :, :, :height, :width]), pieces_1CTHW), maxlen=0)
            return Need.of(counter)

    with fake_device(device_type) as device:
        coder = _Coder(settings, device, dtype, decodes=True)
        store = HOST if store_on_host else device
        return coder.extrapolated(count, latent_shape, chunk_frames)


def _shown(pixels_CTHW: Tensor) -> Tensor:
    """Allocate like `to_uint8`. All frames need the same, so one represents all."""
    channels, frames, height, width = pixels_CTHW.shape
    _others_THWC = torch.empty(frames - 1, height, width, channels, dtype=torch.uint8)
    return to_uint8(pixels_CTHW[:, :1])


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
    settings: VAESettings, frames: int, sides: tuple[int, int], dtype: torch.dtype, device_type: str
) -> Need:
    def count(frames: int) -> Need:
        with coder.counting() as counter:
            pixels_1CTHW = torch.empty(1, COLORS, frames, *sides, dtype=dtype, device=coder.device)
            latents_1CTHW = coder.vae.encode(pixels_1CTHW, tiling=vae_tiling(settings))
            need = Need.of(counter)
            del latents_1CTHW
            return need

    with fake_device(device_type) as device:
        coder = _Coder(settings, device, dtype, decodes=False)
        return coder.extrapolated(count, (COLORS, frames, *sides), None)


class _Coder:
    """Fake autoencoder whose encoder or decoder runs once for each shape of a tile, and then takes the same memory.

    Blocks of a width are equal except the first, so that few represent all. Call it inside `fake_device`.
    """

    def __init__(self, settings: VAESettings, device: torch.device, dtype: torch.dtype, *, decodes: bool) -> None:
        few_layers = settings.replace({"layers_per_block": min(settings.layers_per_block, 1 if decodes else 2)})
        self.device = device
        self.vae = fake_module(lambda: new_autoencoder(few_layers), device=device, dtype=dtype)
        self._settings, self._decodes = settings, decodes
        self._part = self.vae.decoder if decodes else self.vae.encoder
        self._run = self._part.forward
        self._counter = TensorBytes(device_type=device.type)
        self._known: dict[torch.Size, tuple[int, int]] = {}
        """Peak of a tile and channels of its result, by the shape of the tile."""
        self._part.forward = self._forward

    @contextmanager
    def counting(self) -> Iterator[TensorBytes]:
        """Count the bytes of a call."""
        self._counter, self._known = TensorBytes(device_type=self.device.type), {}
        with self._counter:
            yield self._counter

    def extrapolated(
        self, count: Callable[[int], Need], shape: tuple[int, int, int, int], chunk_frames: int | None
    ) -> Need:
        """Return the need of a clip of `shape`, in which each further chunk or tile takes the same amount."""
        settings, (channels, frames, *sides) = self._settings, shape
        grid = settings.sizes.tile_grids()[self._decodes]
        if settings.temporal_tiling and frames > grid.time.size:
            return extrapolated(count, frames, step=grid.time.stride, few=grid.time.size + 2 * grid.time.stride)
        if settings.spatial_tiling and max(sides) > grid.space.size:
            sides = [min(side, grid.space.size) for side in sides]
        if chunk_frames is None and isinstance(self._part, (Encoder, Decoder)):
            chunk_frames = self._part.chunk_frames_for(torch.empty(1, channels, frames, *sides, device=self.device))
        # In a shorter clip, kernels could need more than frames.
        step = frames if chunk_frames is None else chunk_frames * -(-_FEW_FRAMES // chunk_frames)
        return extrapolated(count, frames, step=step, few=step + 1)

    def _forward(self, clip_1CTHW: Tensor, **options: Any) -> Tensor:
        counter, known = self._counter, self._known.get(clip_1CTHW.shape)
        if known is None:
            counter.mark("begin")
            out: Tensor = self._run(clip_1CTHW, **options)
            counter.mark("end")
            # The result stays.
            stays = counter.live_bytes - (out.nbytes if out.device == clip_1CTHW.device else 0)
            self._known[clip_1CTHW.shape] = counter.marks[-1].peak_bytes - stays, out.shape[1]
            return out
        peak_bytes, out_channels = known
        clip_1CTHW.new_empty(peak_bytes, dtype=torch.uint8)
        grid, (frames, height, width) = self._settings.grid, clip_1CTHW.shape[2:]
        if self._decodes:
            space = grid.spatial_compression_ratio
            size = grid.num_frames(frames), height * space, width * space
            return torch.empty(1, out_channels, *size, dtype=clip_1CTHW.dtype, device=HOST)
        size = grid.latent_frames(frames), *grid.latent_size(height, width)
        return clip_1CTHW.new_empty(1, out_channels, *size)


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
