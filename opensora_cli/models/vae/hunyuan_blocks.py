"""Layers of the causal video autoencoder: clips (B,C,T,H,W) in and out."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.vae.resample import (
    CarriedFrames,
    GroupNorm,
    conv_of_upsampled,
    convolved,
    fast_layout,
    onednn_conv3d,
    replicate_pad,
    runs_in_onednn,
)

NORM_EPS = 1e-6
"""Epsilon of the released group norms. A group norm spans all frames and positions of the clip."""


class CausalConv3d(nn.Module):
    """3D convolution in which no frame sees a later one: edges are replicated, in time only before the clip.

    A (B, C_in, T, H, W) clip becomes (B, C_out, (T-1)//stride[0] + 1, H/stride[1], W/stride[2]).
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel_size: int = 3, stride: tuple[int, int, int] = (1, 1, 1)
    ) -> None:
        super().__init__()
        side = kernel_size // 2
        self._padding = (side, side, side, side, kernel_size - 1, 0)
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, stride)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return (B,out_channels,T,H,W), T, H and W divided by the stride, rounded up."""
        return self.convolve(self.pad(hidden_BCTHW))

    def pad(self, hidden_BCTHW: Tensor, carried: CarriedFrames | None = None, *, silu: bool = False) -> Tensor:
        """Return the clip with its edges; see `replicate_pad`. A stride in time must divide all chunks but the last."""
        return replicate_pad(fast_layout(hidden_BCTHW), self._padding, carried=carried, silu=silu)

    def convolve(self, padded_BCTHW: Tensor) -> Tensor:
        """Return the result of `forward` for a clip that `pad` has padded."""
        if runs_in_onednn(padded_BCTHW, self.conv.weight):
            return onednn_conv3d(padded_BCTHW, self.conv.weight, self.conv.bias, self.conv.stride)
        return convolved(padded_BCTHW, self.conv)


class ResnetBlock(nn.Module):
    """Group norm, SiLU and convolution, twice, beside a shortcut that is a 1x1x1 convolution where widths differ."""

    def __init__(self, in_channels: int, out_channels: int, *, num_groups: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(num_groups, in_channels, eps=NORM_EPS)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = GroupNorm(num_groups, out_channels, eps=NORM_EPS)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut: CausalConv3d | None = None
        if in_channels != out_channels:
            self.conv_shortcut = CausalConv3d(in_channels, out_channels, kernel_size=1)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return (B,out_channels,T,H,W)."""
        residual_BCTHW: Tensor = self.conv1(functional.silu(self.norm1(hidden_BCTHW)))
        residual_BCTHW = self.conv2(functional.silu(self.norm2(residual_BCTHW)))
        if self.conv_shortcut is not None:
            hidden_BCTHW = self.conv_shortcut(hidden_BCTHW)
        return hidden_BCTHW + residual_BCTHW


class FrameCausalAttention(nn.Module):
    """Self-attention of one full-width head over all positions, in which a frame sees itself and the past; residual.

    The queries of one frame all see the same keys. So frame by frame no mask is needed, which would take 4.6 GB at 33
    frames of 32x32, half of the products are never computed, and torch's fused kernels keep no scores.
    """

    def __init__(self, channels: int, *, num_groups: int) -> None:
        super().__init__()
        self.group_norm = GroupNorm(num_groups, channels, eps=NORM_EPS)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        # A list because the released key is `to_out.0`.
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return the same shape."""
        normed_BCTHW = self.group_norm(hidden_BCTHW)
        k_B1NC, v_B1NC = self.keys_and_values(normed_BCTHW)
        return hidden_BCTHW + self.attend(normed_BCTHW, k_B1NC, v_B1NC)

    def keys_and_values(self, normed_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all positions, frame by frame, each (B,1,T*H*W,C)."""
        tokens_BNC = _tokens(normed_BCTHW)
        return self.to_k(tokens_BNC).unsqueeze(1), self.to_v(tokens_BNC).unsqueeze(1)

    def attend(self, normed_BCTHW: Tensor, k_B1MC: Tensor, v_B1MC: Tensor) -> Tensor:
        """Return the attention of the frames, in their shape. They are the last frames of the keys and values."""
        frames: list[Tensor] = []
        # Queries and outputs are projected frame by frame too: a clip's worth of each would double the memory.
        frame_size = normed_BCTHW.shape[3] * normed_BCTHW.shape[4]
        end = k_B1MC.shape[2] - normed_BCTHW.shape[2] * frame_size
        for frame_BCTHW in torch.split(normed_BCTHW, 1, dim=2):
            end += frame_size
            q_B1NC = self.to_q(_tokens(frame_BCTHW)).unsqueeze(1)
            out_B1NC = functional.scaled_dot_product_attention(q_B1NC, k_B1MC[:, :, :end], v_B1MC[:, :, :end])
            frames.append(self.to_out[0](out_B1NC.squeeze(1)))
        return torch.cat(frames, dim=1).transpose(1, 2).view(normed_BCTHW.shape)


class MidBlock(nn.Module):
    """Resnet, attention, resnet, at the lowest resolution."""

    def __init__(self, channels: int, *, num_groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(channels, channels, num_groups=num_groups) for _ in range(2))
        self.attentions = nn.ModuleList([FrameCausalAttention(channels, num_groups=num_groups)])

    def layers(self) -> Iterable[nn.Module]:
        """Return the layers in the order in which they run."""
        first, last = self.resnets
        return first, *self.attentions, last


class Downsample(nn.Module):
    """Strided convolution by a factor of 1 or 2 in time and in space."""

    def __init__(self, channels: int, *, time: int, space: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=(time, space, space))

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return the same channels, T, H and W divided by the factors, rounded up."""
        out_BCTHW: Tensor = self.conv(hidden_BCTHW)
        return out_BCTHW


class Upsample(nn.Module):
    """Nearest upsampling by a factor of 1 or 2 in time (except the first frame) and in space, then a convolution."""

    def __init__(self, channels: int, *, time: int, space: int) -> None:
        super().__init__()
        self.time = time
        self.space = space
        # Only its weights are used; the nesting is that of the released keys.
        self.conv = CausalConv3d(channels, channels)

    def forward(self, hidden_BCTHW: Tensor, carried: CarriedFrames | None = None) -> Tensor:
        """Return 1 + (T-1)·`time` frames, or T·`time` for a later chunk, with H and W times `space`."""
        return conv_of_upsampled(hidden_BCTHW, self.conv.conv, time=self.time, space=self.space, carried=carried)


class Level(nn.Module):
    """Level of the encoder or decoder: resnets, then a resampling layer where `time` or `space` is 2."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        resampling: type[Downsample | Upsample],
        *,
        num_layers: int,
        num_groups: int,
        time: int,
        space: int,
    ) -> None:
        super().__init__()
        widths = (in_channels, *[out_channels] * (num_layers - 1))
        self.resnets = nn.ModuleList(ResnetBlock(width, out_channels, num_groups=num_groups) for width in widths)
        resamplings = [resampling(out_channels, time=time, space=space)] if time * space > 1 else []
        self.add_module("downsamplers" if resampling is Downsample else "upsamplers", nn.ModuleList(resamplings))


def _tokens(hidden_BCTHW: Tensor) -> Tensor:
    """(B,C,T,H,W) -> (B,T*H*W,C)."""
    return hidden_BCTHW.flatten(2).transpose(1, 2).contiguous()
