"""Layers of the causal video autoencoder. Tensors are (B,C,T,H,W)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_cli.models.vae.resample import conv_of_upsampled, replicate_pad

NORM_EPS = 1e-6


class CausalConv3d(nn.Module):
    """3D convolution that sees no later frame: edges are replicated, in time only before the clip."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel_size: int = 3, stride: tuple[int, int, int] = (1, 1, 1)
    ) -> None:
        super().__init__()
        side = kernel_size // 2
        self._padding = (side, side, side, side, kernel_size - 1, 0)
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, stride)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        if any(self._padding):
            hidden_BCTHW = replicate_pad(hidden_BCTHW, self._padding)
        out: Tensor = self.conv(hidden_BCTHW)
        return out


class ResnetBlock(nn.Module):
    """Norm, SiLU, convolution, twice, beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, *, num_groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups, in_channels, eps=NORM_EPS)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = nn.GroupNorm(num_groups, out_channels, eps=NORM_EPS)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = CausalConv3d(in_channels, out_channels, kernel_size=1) if in_channels != out_channels else None

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        residual = self.conv1(F.silu(self.norm1(hidden_BCTHW)))
        residual = self.conv2(F.silu(self.norm2(residual)))
        if self.conv_shortcut is not None:
            hidden_BCTHW = self.conv_shortcut(hidden_BCTHW)
        return hidden_BCTHW + residual


class Downsample(nn.Module):
    def __init__(self, channels: int, *, time: int, space: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=(time, space, space))

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        out: Tensor = self.conv(hidden_BCTHW)
        return out


class Upsample(nn.Module):
    def __init__(self, channels: int, *, time: int, space: int) -> None:
        super().__init__()
        self._time = time
        self._space = space
        self.conv = CausalConv3d(channels, channels)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        conv = self.conv.conv
        return conv_of_upsampled(hidden_BCTHW, conv.weight, conv.bias, time=self._time, space=self._space)


class FrameCausalAttention(nn.Module):
    def __init__(self, channels: int, *, num_groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(num_groups, channels, eps=NORM_EPS)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        _, _, num_frames, height, width = hidden_BCTHW.shape
        tokens_BNC = self.group_norm(hidden_BCTHW).flatten(2).transpose(1, 2)
        q, k, v = (layer(tokens_BNC).unsqueeze(1) for layer in (self.to_q, self.to_k, self.to_v))
        size = height * width
        frames = [
            F.scaled_dot_product_attention(
                q[:, :, t * size : (t + 1) * size], k[:, :, : (t + 1) * size], v[:, :, : (t + 1) * size]
            )
            for t in range(num_frames)
        ]
        out_BNC = self.to_out[0](torch.cat(frames, dim=2).squeeze(1))
        return hidden_BCTHW + out_BNC.transpose(1, 2).unflatten(2, (num_frames, height, width))


class MidBlock(nn.Module):
    def __init__(self, channels: int, *, num_groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(channels, channels, num_groups=num_groups) for _ in range(2)])
        self.attentions = nn.ModuleList([FrameCausalAttention(channels, num_groups=num_groups)])

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        out: Tensor = self.resnets[1](self.attentions[0](self.resnets[0](hidden_BCTHW)))
        return out


class DownBlock(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, *, num_layers: int, num_groups: int, time: int, space: int
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResnetBlock(in_channels if layer == 0 else out_channels, out_channels, num_groups=num_groups)
            for layer in range(num_layers)
        )
        self.downsamplers = nn.ModuleList(
            [Downsample(out_channels, time=time, space=space)] if time * space > 1 else []
        )

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        for layer in (*self.resnets, *self.downsamplers):
            hidden_BCTHW = layer(hidden_BCTHW)
        return hidden_BCTHW


class UpBlock(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, *, num_layers: int, num_groups: int, time: int, space: int
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResnetBlock(in_channels if layer == 0 else out_channels, out_channels, num_groups=num_groups)
            for layer in range(num_layers)
        )
        self.upsamplers = nn.ModuleList([Upsample(out_channels, time=time, space=space)] if time * space > 1 else [])

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        for layer in (*self.resnets, *self.upsamplers):
            hidden_BCTHW = layer(hidden_BCTHW)
        return hidden_BCTHW
