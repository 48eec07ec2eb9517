"""Efficient norms, padding and upsampling convolution, for training on a CPU and for decoding many pixels."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def fast_layout(hidden_BCTHW: Tensor) -> Tensor:
    """Return the clip in the memory layout with the fastest convolutions. Most layers preserve it, some do not."""
    if hidden_BCTHW.device.type == "cpu":
        # This takes half the time of the default layout, in fp32 and bf16, forward and backward.
        return hidden_BCTHW.contiguous(memory_format=torch.channels_last_3d)
    return hidden_BCTHW


def lay_out_kernels(module: nn.Module, device: torch.device) -> None:
    """Change the memory layout of kernels on a CPU to that of their input clips, once instead of at each call."""
    if device.type == "cpu":
        for conv in module.modules():
            if isinstance(conv, nn.Conv3d):
                conv.weight.data = fast_layout(conv.weight.data)


def runs_in_onednn(clip_BCTHW: Tensor, weight: Tensor) -> bool:
    """Return whether to use `onednn_conv3d`: kernel and clip are in fp32 on a CPU, and no gradient is recorded."""
    if clip_BCTHW.device.type != "cpu" or clip_BCTHW.dtype is not torch.float32:
        return False
    is_recorded = torch.is_grad_enabled() and (clip_BCTHW.requires_grad or weight.requires_grad)
    has_onednn: bool = torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()
    return has_onednn and weight.dtype is torch.float32 and not (is_recorded or torch.is_autocast_enabled("cpu"))


def onednn_conv3d(clip_BCTHW: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int] = (1, 1, 1)) -> Tensor:
    """Convolve without padding; torch's own function would copy every neighborhood of a small clip."""
    out: Tensor = torch.mkldnn_convolution(clip_BCTHW, weight, bias, (0, 0, 0), stride, (1, 1, 1), 1)
    return out


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that computes in the dtypes of the tensors."""
    # The meta device has no autocast.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that keeps the dtype under autocast; kernels sum in fp32 for any dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized activations in their own dtype and shape."""
        # On a GPU, but not on a CPU, autocast would return twice the bytes, in fp32.
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        with without_autocast(input.device):
            return functional.group_norm(input, self.num_groups, weight, bias, self.eps)


def convolved(clip_BCTHW: Tensor, convolve: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `convolve(clip_BCTHW)`, computed in float32 if training in bfloat16 would crash the process.

    On CPUs with AMX, oneDNN 3.12 writes outside its memory in the gradient of a kernel for a few large frames.
    """
    is_trained_in_bf16 = (
        torch.is_grad_enabled()
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
    )
    if not (clip_BCTHW.device.type == "cpu" and is_trained_in_bf16 and torch.cpu._is_amx_tile_supported()):
        return convolve(clip_BCTHW)
    frames, height, width = clip_BCTHW.shape[2:]
    if frames > _MOST_FRAMES_AT_RISK or height * width < _FEWEST_PIXELS_AT_RISK:
        return convolve(clip_BCTHW)
    with without_autocast(clip_BCTHW.device):
        return convolve(clip_BCTHW.float()).to(torch.bfloat16)


# The crash was seen with up to 9 frames, including padding, and from 90 x 90 pixels.
_MOST_FRAMES_AT_RISK = 12
_FEWEST_PIXELS_AT_RISK = 8_000


class CarriedFrames:
    """Last input frames of a causal convolution in the previous chunk of a clip. Each convolution has its own."""

    def __init__(self) -> None:
        self._padded_BCTHW: Tensor | None = None
        self.kernels: tuple[Tensor, Tensor | None] | None = None
        """Folded kernels of an upsampling convolution, the same for all chunks."""

    @property
    def is_empty(self) -> bool:
        """Whether there was no chunk yet."""
        return self._padded_BCTHW is None

    def exchange(self, padded_BCTHW: Tensor, num_frames: int) -> None:
        """Replace the first frames, the padding, with the last of the previous chunk, and keep those of this one."""
        if self._padded_BCTHW is not None:
            padded_BCTHW[:, :, :num_frames] = self._padded_BCTHW
        # Copy because a view would keep the whole chunk.
        self._padded_BCTHW = padded_BCTHW[:, :, padded_BCTHW.shape[2] - num_frames :].clone()


def replicate_pad(
    hidden_BCTHW: Tensor,
    padding: tuple[int, int, int, int, int, int],
    *,
    carried: CarriedFrames | None = None,
    silu: bool = False,
) -> Tensor:
    """Pad a clip by repeating its edges; `padding` is that of `torch.nn.functional.pad`, last axis first.

    With `carried`, the clip is a chunk, and the previous chunk, if there is one, provides the frames before it.
    With `silu`, SiLU is applied first, perhaps in place: nothing else may use the clip, and no gradient may need it.
    """
    if not any(padding):
        return functional.silu(hidden_BCTHW, inplace=True) if silu else hidden_BCTHW
    # Autocast on a CPU would run this plain copy in fp32 and cast forth and back.
    with without_autocast(hidden_BCTHW.device):
        padded_BCTHW = _copied_with_edges(hidden_BCTHW, padding, silu=silu)
    if carried is not None:
        carried.exchange(padded_BCTHW, padding[4])
    return padded_BCTHW


def _copied_with_edges(hidden_BCTHW: Tensor, padding: tuple[int, int, int, int, int, int], *, silu: bool) -> Tensor:
    is_recorded = torch.is_grad_enabled() and hidden_BCTHW.requires_grad
    channels_last = hidden_BCTHW.is_contiguous(memory_format=torch.channels_last_3d)
    if type(hidden_BCTHW) is not Tensor or hidden_BCTHW.device.type != "cpu" or is_recorded or not channels_last:
        if silu:
            functional.silu(hidden_BCTHW, inplace=True)
        return functional.pad(hidden_BCTHW, padding, mode="replicate")
    # Plain copies of rows take half the time of the kernel, which looks up the source of each value.
    sides = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
    shape = (size + sum(side) for size, side in zip(hidden_BCTHW.shape[2:], sides, strict=True))
    padded_BCTHW = _empty((*hidden_BCTHW.shape[:2], *shape), like=hidden_BCTHW)
    inner_BCTHW = padded_BCTHW
    for axis, (before, _) in enumerate(sides, start=2):
        inner_BCTHW = inner_BCTHW.narrow(axis, before, hidden_BCTHW.shape[axis])
    if silu:
        torch.ops.aten.silu.out(hidden_BCTHW, out=inner_BCTHW)
    else:
        inner_BCTHW.copy_(hidden_BCTHW)
    # Go from the last axis to the first: each step copies edges that earlier steps have filled.
    for axis, (before, after) in reversed(list(enumerate(sides, start=2))):
        end = before + hidden_BCTHW.shape[axis]
        if before:
            padded_BCTHW.narrow(axis, 0, before).copy_(padded_BCTHW.narrow(axis, before, 1))
        if after:
            padded_BCTHW.narrow(axis, end, after).copy_(padded_BCTHW.narrow(axis, end - 1, 1))
    return padded_BCTHW


def conv_of_upsampled(
    hidden_BCTHW: Tensor, conv: nn.Conv3d, *, time: int, space: int, carried: CarriedFrames | None = None
) -> Tensor:
    """Return the causal 3x3x3 convolution of the nearest-upsampled clip, without building the upsampled clip.

    Factors are 1 or 2; the first frame is not repeated in time. The result is (B, C_out, 1 + (T-1)*time, H*space,
    W*space); a chunk that is not the first has T*time frames.

    On a doubled axis, two of the three taps of the kernel always multiply the same low-resolution value. So two kernels
    of two taps on the low-resolution clip, for even and for odd positions, give the same sums. With all axes doubled,
    this takes 8 products instead of 27 per output value, and no padded copy of the large clip. It is the sub-pixel
    convolution of https://arxiv.org/abs/1609.05158 with kernels that are folded from a full one.
    """
    factors = (time, space, space)
    is_start = carried is None or carried.is_empty
    padded_BCTHW = replicate_pad(fast_layout(hidden_BCTHW), (1, 1, 1, 1, 2 // time, 0), carried=carried)
    if carried is None:
        kernels, bias = folded_kernels(conv, factors)
    else:
        kernels, bias = carried.kernels = carried.kernels or folded_kernels(conv, factors)
    convolve = onednn_conv3d if runs_in_onednn(padded_BCTHW, kernels) else functional.conv3d
    phases_BPTHW = convolved(padded_BCTHW, lambda clip_BCTHW: convolve(clip_BCTHW, kernels, bias))
    del padded_BCTHW
    out: Tensor = _InterleavePhases.apply(phases_BPTHW, factors, is_start)  # type: ignore[no-untyped-call]
    return out


def folded_kernels(conv: nn.Conv3d, factors: tuple[int, int, int]) -> tuple[Tensor, Tensor | None]:
    """Return the kernels of all phases and their bias."""
    weight = conv.weight
    # Sums of taps are rounded to the weight's dtype once, not at every addition.
    sum_dtype = torch.promote_types(weight.dtype, torch.float32)
    kernels = fast_layout(_phase_kernels(weight.to(sum_dtype), factors).to(weight.dtype))
    return kernels, None if conv.bias is None else conv.bias.repeat(math.prod(factors))


def _phase_kernels(weight: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """Fold a (C_out, C, 3, 3, 3) kernel to (phases * C_out, C, 2 or 3, ...). Phases of the last axis change fastest."""
    kernels = [weight]
    for axis, factor in enumerate(factors, start=2):
        if factor == 2:
            # Three taps become two, for the odd positions before each low-resolution value, and for the even ones.
            taps = [kernel.chunk(3, dim=axis) for kernel in kernels]
            pairs = [((first + middle, last), (first, middle + last)) for first, middle, last in taps]
            kernels = [torch.cat(each, dim=axis) for pair in pairs for each in pair]
    return torch.cat(kernels)


class _InterleavePhases(torch.autograd.Function):
    """Move phases from channels to positions: (B, phases*C, T', H', W') -> (B, C, T, H, W).

    Positions outside the clip are dropped. Autograd of strided writes would copy the whole output once per phase.
    """

    @staticmethod
    def forward(ctx: Any, phases_BPTHW: Tensor, factors: tuple[int, int, int], is_start: bool) -> Tensor:
        ctx.factors, ctx.is_start, ctx.shape = factors, is_start, phases_BPTHW.shape
        time, space, _ = factors
        num_frames, height, width = phases_BPTHW.shape[2:]
        num_phases = time * space * space
        shape = (
            phases_BPTHW.shape[0],
            phases_BPTHW.shape[1] // num_phases,
            num_frames * time - (time - 1 if is_start else 0),
            height * space - 2 * (space - 1),
            width * space - 2 * (space - 1),
        )
        out_BCTHW = _empty(shape, like=phases_BPTHW)
        pieces = zip(phases_BPTHW.chunk(num_phases, dim=1), _phase_positions(factors, is_start), strict=True)
        for phase_BCTHW, (positions, source) in pieces:
            out_BCTHW[positions] = phase_BCTHW[source]
        return out_BCTHW

    @staticmethod
    def backward(ctx: Any, grad_BCTHW: Tensor) -> tuple[Tensor, None, None]:
        grad_BPTHW = _empty(ctx.shape, like=grad_BCTHW).zero_()
        num_phases = math.prod(ctx.factors)
        positions_of_phases = _phase_positions(ctx.factors, ctx.is_start)
        pieces = zip(grad_BPTHW.chunk(num_phases, dim=1), positions_of_phases, strict=True)
        for phase_BCTHW, (positions, source) in pieces:
            phase_BCTHW[source] = grad_BCTHW[positions]
        return grad_BPTHW, None, None


def _phase_positions(
    factors: tuple[int, int, int], is_start: bool
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the positions of each phase in the output, and of its values. Phases of the last axis change fastest."""
    whole = (slice(None), slice(None))
    odd = (slice(1, None, 2), slice(1, None))
    time, space, _ = factors
    inner = [(slice(0, None, 2), slice(None)), (slice(1, None, 2), slice(None))]
    at_start = [odd, (slice(0, None, 2), slice(None))]
    along_time = [whole] if time == 1 else at_start if is_start else inner
    along_space = [whole] if space == 1 else [odd, (slice(0, None, 2), slice(None, -1))]
    for axes in itertools.product(along_time, along_space, along_space):
        targets, sources = zip(*axes, strict=True)
        yield (slice(None), slice(None), *targets), (slice(None), slice(None), *sources)


def _empty(shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Return an empty tensor in the layout of `like`; in another layout, every later layer would make a copy."""
    channels_last = like.is_contiguous(memory_format=torch.channels_last_3d)
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)
