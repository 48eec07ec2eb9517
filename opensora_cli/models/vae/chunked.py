"""Encoder and decoder that compute some frames of a clip at a time, with the result of all at once.

A causal convolution needs the last frames of the previous chunk, and frame-causal attention the keys and values of all
earlier frames. A group norm needs the mean and variance of the whole clip. So layers run one after the other: the clip
is measured after a layer, normalized before the next one, and stored between them in separate chunks. Nothing is
approximated; results match up to rounding.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.device import is_gpu
from opensora_cli.models.vae.autoencoder import joined_in_time
from opensora_cli.models.vae.hunyuan_blocks import CausalConv3d, Downsample, FrameCausalAttention, ResnetBlock, Upsample
from opensora_cli.models.vae.resample import CarriedFrames

_FEW_FRAMES = 4
"""Frames per chunk at the highest resolution: a multiple of the factors of all levels that halve time."""
_LEAST_VALUES = 2**17
"""Smallest number of values in a chunk. Chunks of small frames have more frames to reach it."""


class StoredClip:
    """Clip between two layers: chunks (B,C,t,H,W) in order of time on `store`, and statistics for group norms."""

    def __init__(self, chunks: Iterable[Tensor], *, store: torch.device) -> None:
        self._chunks: deque[Tensor] = deque()
        # Number of frames of each measured part.
        self._frames: list[int] = []
        self._means_BC: list[Tensor] = []
        self._variances_BC: list[Tensor] = []
        for chunk_BCTHW in chunks:
            self._device = chunk_BCTHW.device
            self._measure(chunk_BCTHW)
            self._chunks.append(_moved(chunk_BCTHW, store))

    @property
    def num_frames(self) -> int:
        """Number of frames of the whole clip."""
        return sum(self._frames)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the chunks, back from the store."""
        return (_moved(chunk_BCTHW, self._device) for chunk_BCTHW in self._chunks)

    def drain(self) -> Iterator[Tensor]:
        """Yield the chunks, back from the store, and release each."""
        while self._chunks:
            yield _moved(self._chunks.popleft(), self._device)

    def group_norm(self, norm: nn.GroupNorm) -> Callable[[Tensor], Tensor]:
        """Return a function that normalizes a chunk with the statistics of the whole clip, like `norm` on the clip."""
        # The variance of a group is the variance within its parts, weighted by frames, plus that of their means.
        means_BCK, variances_BCK = (torch.stack(values, dim=-1) for values in (self._means_BC, self._variances_BC))
        shares_K: Tensor | float = 1 / len(self._frames)
        if len(set(self._frames)) > 1:  # not on a GPU, which would wait for these numbers
            shares_K = torch.tensor(self._frames, dtype=means_BCK.dtype, device=means_BCK.device) / self.num_frames

        def of_groups(values_BCK: Tensor) -> Tensor:
            groups_BGK = (values_BCK * shares_K).sum(dim=-1).view(len(values_BCK), norm.num_groups, -1)
            return groups_BGK.mean(dim=-1).repeat_interleave(norm.num_channels // norm.num_groups, dim=1)

        mean_BC = of_groups(means_BCK)
        variance_BC = of_groups(variances_BCK + (means_BCK - mean_BC.unsqueeze(-1)).square())
        weight, bias = norm.weight.to(mean_BC.dtype), norm.bias.to(mean_BC.dtype)

        def normalize(chunk_BCTHW: Tensor) -> Tensor:
            # torch's only kernel with a given mean and variance is batch norm. Here they belong to one sample.
            samples = [
                functional.batch_norm(sample_1CTHW, mean_C, variance_C, weight, bias, eps=norm.eps)
                for sample_1CTHW, mean_C, variance_C in zip(
                    torch.split(chunk_BCTHW, 1), mean_BC, variance_BC, strict=True
                )
            ]
            return samples[0] if len(samples) == 1 else torch.cat(samples)

        return normalize

    def _measure(self, chunk_BCTHW: Tensor) -> None:
        dtype = torch.promote_types(chunk_BCTHW.dtype, torch.float32)
        # If the chunk must be copied in fp32, frames are copied one by one to save memory.
        is_whole = chunk_BCTHW.device.type == "cpu" and chunk_BCTHW.dtype is dtype
        parts = (chunk_BCTHW,) if is_whole else torch.split(chunk_BCTHW, 1, dim=2)
        for part_BCTHW in parts:
            variance_BC, mean_BC = _var_mean(part_BCTHW.to(dtype))
            self._frames.append(part_BCTHW.shape[2])
            self._variances_BC.append(variance_BC)
            self._means_BC.append(mean_BC)


def _var_mean(clip_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    is_plain = type(clip_BCTHW) is Tensor and clip_BCTHW.device.type == "cpu"
    if not (is_plain and clip_BCTHW.is_contiguous(memory_format=torch.channels_last_3d)):
        return torch.var_mean(clip_BCTHW, dim=(2, 3, 4), correction=0)
    # For this layout var_mean is not vectorized, and takes ten times as long as the statistics of a batch norm.
    means, variances = zip(
        *(torch.batch_norm_update_stats(sample_1CTHW, None, None, 0.0) for sample_1CTHW in torch.split(clip_BCTHW, 1)),
        strict=True,
    )
    return torch.stack(variances), torch.stack(means)


def _moved(chunk_BCTHW: Tensor, device: torch.device) -> Tensor:
    if chunk_BCTHW.device == device:
        return chunk_BCTHW
    # One stream writes and reads the store, so no copy needs a wait. The allocator of page-locked memory reuses it only
    # after the copies are done.
    pinned = is_gpu(chunk_BCTHW.device) and device.type == "cpu"
    return torch.empty_like(chunk_BCTHW, device=device, pin_memory=pinned).copy_(chunk_BCTHW, non_blocking=True)


def chunk_frames_for(shape: tuple[int, int, int, int], *, device: torch.device) -> int | None:
    """Return the default number of frames to compute at a time, for frames (B, C, H, W) at the highest resolution.

    In chunks, a CPU is equally fast and needs half of the memory, unless chunks are very small. None means all.
    """
    if device.type != "cpu":
        return None
    return _FEW_FRAMES * max(1, math.ceil(_LEAST_VALUES / (_FEW_FRAMES * math.prod(shape))))


@torch.no_grad()
def run_in_chunks(
    clip_BCTHW: Tensor,
    *,
    conv_in: CausalConv3d,
    layers: Iterable[nn.Module],
    norm_out: nn.GroupNorm,
    conv_out: CausalConv3d,
    chunk_frames: int,
    store: torch.device,
    canvas: torch.device,
) -> Tensor:
    """Return a decoder's output for projected latents, or an encoder's for pixels, on the canvas, without gradients.

    Each of `layers` computes `chunk_frames` frames at a time, an even number if a layer halves time. Between layers,
    the clip is on `store`.
    """
    clip = StoredClip(convolve(torch.split(clip_BCTHW, chunk_frames, dim=2), conv_in), store=store)
    for stage in stages_of(layers):
        clip = StoredClip(run_stage(clip, stage, chunk_frames=chunk_frames, store=store), store=store)
    pixels = _norm_silu_conv(clip.drain(), clip.group_norm(norm_out), conv_out)
    return torch.cat([chunk_BCTHW.to(canvas) for chunk_BCTHW in pixels], dim=2)


def stages_of(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return the layers in stages, between which the clip is stored. Resampling layers use chunks as they arrive."""
    stages: list[list[nn.Module]] = []
    for layer in layers:
        if isinstance(layer, (Upsample, Downsample)):
            stages[-1].append(layer)
        else:
            stages.append([layer])
    return stages


def run_stage(
    clip: StoredClip, stage: Sequence[nn.Module], *, chunk_frames: int, store: torch.device
) -> Iterator[Tensor]:
    """Yield the output chunks of a stage for a clip, which is drained; see `run_in_chunks`."""
    layer, *resamplings = stage
    if isinstance(layer, ResnetBlock):
        chunks = _resnet(clip, layer, store=store)
    elif isinstance(layer, FrameCausalAttention):
        chunks = _attend(clip, layer)
    else:
        raise TypeError(f"{type(layer).__name__} is no layer of the autoencoder")
    for resampling in resamplings:
        if isinstance(resampling, Downsample):
            chunks = _joined(convolve(chunks, resampling.conv), chunk_frames)
        else:
            chunks = _upsample(chunks, cast(Upsample, resampling), chunk_frames)
    return chunks


def convolve(chunks: Iterable[Tensor], conv: CausalConv3d, *, silu: bool = False) -> Iterator[Tensor]:
    """Yield the results of a convolution for the chunks of a clip; with `silu`, after SiLU in place."""
    carried = CarriedFrames()
    # Unlike a loop, map keeps no reference to a chunk while its result is used.
    for padded_BCTHW in map(lambda chunk_BCTHW: conv.pad(chunk_BCTHW, carried, silu=silu), chunks):
        out_BCTHW = conv.convolve(padded_BCTHW)
        del padded_BCTHW
        yield out_BCTHW
        del out_BCTHW


def _norm_silu_conv(
    chunks: Iterable[Tensor], normalize: Callable[[Tensor], Tensor], conv: CausalConv3d
) -> Iterator[Tensor]:
    return convolve(map(normalize, chunks), conv, silu=True)


def _resnet(clip: StoredClip, block: ResnetBlock, *, store: torch.device) -> Iterator[Tensor]:
    inner = StoredClip(_norm_silu_conv(clip.chunks(), clip.group_norm(block.norm1), block.conv1), store=store)
    residuals = _norm_silu_conv(inner.drain(), inner.group_norm(block.norm2), block.conv2)

    def add(residual_BCTHW: Tensor, hidden_BCTHW: Tensor) -> Tensor:
        shortcut_BCTHW = hidden_BCTHW if block.conv_shortcut is None else block.conv_shortcut(hidden_BCTHW)
        return residual_BCTHW.add_(shortcut_BCTHW)

    # Unlike a loop over both, map keeps none of the chunks while the next layer computes.
    return map(add, residuals, clip.drain())


def _attend(clip: StoredClip, layer: FrameCausalAttention) -> Iterator[Tensor]:
    normalize = clip.group_norm(layer.group_norm)
    memory: list[Tensor] = []
    end = 0
    for hidden_BCTHW in clip.drain():
        normed_BCTHW = normalize(hidden_BCTHW)
        new = layer.keys_and_values(normed_BCTHW)
        if not memory:
            batch, heads, num_new, width = new[0].shape
            num_positions = num_new // hidden_BCTHW.shape[2] * clip.num_frames
            memory = [part.new_empty(batch, heads, num_positions, width) for part in new]
        begin, end = end, end + new[0].shape[2]
        for seen_B1MC, part_B1NC in zip(memory, new, strict=True):
            seen_B1MC[:, :, begin:end] = part_B1NC
        yield hidden_BCTHW + layer.attend(normed_BCTHW, *(seen_B1MC[:, :, :end] for seen_B1MC in memory))


def _upsample(chunks: Iterable[Tensor], layer: Upsample, chunk_frames: int) -> Iterator[Tensor]:
    carried = CarriedFrames()
    for chunk_BCTHW in chunks:
        for part_BCTHW in torch.split(chunk_BCTHW, max(1, chunk_frames // layer.time), dim=2):
            yield from torch.split(layer(part_BCTHW, carried), chunk_frames, dim=2)


def _joined(chunks: Iterable[Tensor], chunk_frames: int) -> Iterator[Tensor]:
    """Yield longer chunks of a clip, up to `chunk_frames`, because many short calls take longer."""
    waiting: list[Tensor] = []
    for chunk_BCTHW in chunks:
        if sum(each.shape[2] for each in waiting) + chunk_BCTHW.shape[2] > chunk_frames:
            yield joined_in_time(waiting)
            waiting.clear()
        waiting.append(chunk_BCTHW)
    yield joined_in_time(waiting)
