"""Video deep-compression autoencoder: clips (B,C,T,H,W), padded with zeros on all sides."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import cast

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder
from opensora_cli.models.vae.config import HEAD_DIM, BlockType, DCAEConfig
from opensora_cli.models.vae.resample import convolved, fast_layout, without_autocast

_NORM_EPS = 1e-5
_ATTENTION_EPS = 1e-15
_GLU_EXPANSION = 4

Factors = tuple[int, int, int]
"""Factors of time, height and width."""


class ChannelRMSNorm(nn.Module):
    """Divide every position by the root mean square of its channels, then scale and shift each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return the same shape and dtype; squares are summed in fp32 at least."""
        dtype = hidden_BCTHW.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        norm_B1THW = torch.linalg.vector_norm(hidden_BCTHW, dim=1, keepdim=True, dtype=sum_dtype)
        scale_B1THW = torch.rsqrt(norm_B1THW.square() / hidden_BCTHW.shape[1] + _NORM_EPS)
        # Under autocast the weights are in fp32, and would make the clip as large.
        weight, bias = (value.to(dtype).view(-1, 1, 1, 1) for value in (self.weight, self.bias))
        # One pass over the clip, and one clip in memory, less than with * and +.
        return torch.addcmul(bias, hidden_BCTHW * scale_B1THW.to(dtype), weight)


class ClipConv3d(nn.Conv3d):
    """`nn.Conv3d`, padded by half of its kernel, that is correct in bf16 on a CPU, too."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a clip (B,C,T,H,W)."""
        taps, frames = self.kernel_size[0], input.shape[2]
        if input.device.type != "cpu" or frames >= taps:
            return convolved(input, super().forward)
        # If a bf16 kernel is longer than the clip, oneDNN reads uninitialized memory for a part of its gradient, as
        # for a part of the output if the clip is a single frame of 1, 3 or 5 channels.
        side, weight = int(self.padding[0]), self.weight
        if frames == 1:  # All taps except one meet zeros.
            weight = weight[:, :, side : side + 1]
        else:
            input = functional.pad(input, (0, 0, 0, 0, side, side))
        padding = (0, *self.padding[1:])
        return convolved(
            input,
            lambda clip: functional.conv3d(clip, weight, self.bias, self.stride, padding, groups=self.groups),
        )


class ConvLayer(nn.Module):
    """Convolution with an odd kernel and padding of half the kernel, then an optional norm."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int = 3,
        stride: Factors = (1, 1, 1),
        groups: int = 1,
        bias: bool = True,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.conv = ClipConv3d(
            in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=bias
        )
        self.norm = ChannelRMSNorm(out_channels) if norm else None

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return (B,out_channels,T,H,W), T, H and W divided by the stride, rounded up."""
        out_BCTHW: Tensor = self.conv(fast_layout(hidden_BCTHW))
        return out_BCTHW if self.norm is None else self.norm(out_BCTHW)


class Residual(nn.Module):
    """Sum of `main` and `shortcut`, a layer without weights. None means the identity."""

    def __init__(self, main: nn.Module, shortcut: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.main = main
        self.shortcut = shortcut

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        out_BCTHW: Tensor = self.main(hidden_BCTHW)
        return out_BCTHW + (hidden_BCTHW if self.shortcut is None else self.shortcut(hidden_BCTHW))


class LinearAttention(nn.Module):
    """Attention with ReLU instead of softmax over all positions of the clip, in linear time, with two scales.

    Beside queries, keys and values there are further heads, which a depthwise convolution gathers from 5 positions in
    each direction: https://arxiv.org/abs/2205.14756.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        parts = 3 * channels
        self.qkv = ConvLayer(channels, parts, kernel_size=1, bias=False)
        gather = ClipConv3d(parts, parts, 5, padding=2, groups=parts, bias=False)
        mix = nn.Conv3d(parts, parts, 1, groups=parts // HEAD_DIM, bias=False)
        self.aggreg = nn.ModuleList([nn.Sequential(gather, mix)])
        self.proj = ConvLayer(2 * channels, channels, kernel_size=1, bias=False, norm=True)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return the same shape."""
        qkv_BCTHW = self.qkv(hidden_BCTHW)
        both_BCTHW = torch.cat((qkv_BCTHW, self.aggreg[0](fast_layout(qkv_BCTHW))), dim=1)
        heads_BHCN = rearrange(both_BCTHW, "b (heads c) t h w -> b heads c (t h w)", c=3 * HEAD_DIM)
        attended_BHCN = relu_attention(*heads_BHCN.chunk(3, dim=2)).to(hidden_BCTHW.dtype)
        frames, height, width = hidden_BCTHW.shape[2:]
        attended_BCTHW = rearrange(attended_BHCN, "b heads c (t h w) -> b (heads c) t h w", t=frames, h=height, w=width)
        out_BCTHW: Tensor = self.proj(attended_BCTHW)
        return out_BCTHW


def relu_attention(q_BHCN: Tensor, k_BHCN: Tensor, v_BHCN: Tensor) -> Tensor:
    """Return for every query the mean of the values, weighted by relu(q)·relu(k): (B,H,C,N) in fp32 at least.

    The sums over positions run over thousands of terms, which half precision cannot add.
    """
    dtype = torch.promote_types(q_BHCN.dtype, torch.float32)
    with without_autocast(q_BHCN.device):
        q_BHCN, k_BHCN = (functional.relu(part).to(dtype) for part in (q_BHCN, k_BHCN))
        sums_BHCC = v_BHCN.to(dtype) @ k_BHCN.transpose(2, 3)
        weights_BH1C = k_BHCN.sum(dim=3).unsqueeze(2)
        return (sums_BHCC @ q_BHCN) / (weights_BH1C @ q_BHCN + _ATTENTION_EPS)


class GatedConv(nn.Module):
    """Expand, convolve every channel by itself, gate one half with the other, and project back; then a norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = _GLU_EXPANSION * channels
        self.inverted_conv = ConvLayer(channels, 2 * inner, kernel_size=1)
        self.depth_conv = ConvLayer(2 * inner, 2 * inner, groups=2 * inner)
        self.point_conv = ConvLayer(inner, channels, kernel_size=1, bias=False, norm=True)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return the same shape."""
        expanded_BCTHW = self.depth_conv(functional.silu(self.inverted_conv(hidden_BCTHW)))
        value_BCTHW, gate_BCTHW = expanded_BCTHW.chunk(2, dim=1)
        out_BCTHW: Tensor = self.point_conv(value_BCTHW * functional.silu(gate_BCTHW))
        return out_BCTHW


class Downsample(nn.Module):
    """Strided convolution beside a shortcut that averages channels of the unshuffled clip.

    Height and width are halved, and time with `halve_time` unless there is one frame.
    """

    def __init__(self, in_channels: int, out_channels: int, *, halve_time: bool) -> None:
        super().__init__()
        self._out_channels = out_channels
        self._time = 2 if halve_time else 1
        self.main = ConvLayer(in_channels, out_channels, stride=(self._time, 2, 2))

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return (B,out_channels,T,H/2,W/2), T halved or not."""
        # A stride in time keeps a single frame.
        out_BCTHW: Tensor = self.main(hidden_BCTHW)
        time = 1 if hidden_BCTHW.shape[2] == 1 else self._time
        unshuffled_BCTHW = rearrange(
            hidden_BCTHW, "b c (t rt) (h rh) (w rw) -> b (c rt rh rw) t h w", rt=time, rh=2, rw=2
        )
        return out_BCTHW + average_channels(unshuffled_BCTHW, self._out_channels)


class Upsample(nn.Module):
    """Nearest upsampling and convolution, beside a shortcut that shuffles repeated channels into positions.

    Height and width are doubled, and time with `double_time` unless there is one frame.
    """

    def __init__(self, in_channels: int, out_channels: int, *, double_time: bool) -> None:
        super().__init__()
        self._out_channels = out_channels
        self._time = 2 if double_time else 1
        # A dictionary because the released key is `main.conv`.
        self.main = nn.ModuleDict({"conv": ConvLayer(in_channels, out_channels)})

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return (B,out_channels,T,2H,2W), T doubled or not."""
        factors = (1 if hidden_BCTHW.shape[2] == 1 else self._time, 2, 2)
        # In one expression, since the upsampled clip is the largest tensor and not needed again.
        out_BCTHW: Tensor = self.main["conv"](
            functional.interpolate(hidden_BCTHW, scale_factor=factors, mode="nearest")
        )
        repeated_BCTHW = repeat_channels(hidden_BCTHW, self._out_channels * factors[0] * 4)
        return out_BCTHW + rearrange(
            repeated_BCTHW, "b (c rt rh rw) t h w -> b c (t rt) (h rh) (w rw)", rt=factors[0], rh=2, rw=2
        )


def average_channels(hidden_BCTHW: Tensor, out_channels: int) -> Tensor:
    """Return the means of `out_channels` groups of adjacent channels."""
    return reduce(hidden_BCTHW, "b (c group) t h w -> b c t h w", "mean", c=out_channels)


def repeat_channels(hidden_BCTHW: Tensor, out_channels: int) -> Tensor:
    """Repeat every channel, adjacently, to get `out_channels`."""
    return hidden_BCTHW.repeat_interleave(out_channels // hidden_BCTHW.shape[1], dim=1)


class OpList(nn.Module):
    """Sequence of layers with the key names of the released file."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(layers)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        for layer in self.op_list:
            hidden_BCTHW = layer(hidden_BCTHW)
        return hidden_BCTHW


class Encoder(nn.Module):
    """Pixels (B,3,T,H,W) to unscaled latents (B,latent_channels,t,h,w)."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.width_list
        self.project_in = ConvLayer(COLORS, widths[0])
        self.stages = nn.ModuleList()
        for index, (kind, width) in enumerate(zip(config.block_types, widths, strict=True)):
            layers = _blocks(kind, width, config.encoder_depth_list[index])
            if index + 1 < len(widths):
                layers.append(Downsample(width, widths[index + 1], halve_time=config.temporal[index]))
            self.stages.append(OpList(*layers))
        shortcut = partial(average_channels, out_channels=config.latent_channels)
        self.project_out = Residual(OpList(ConvLayer(widths[-1], config.latent_channels)), shortcut)

    def forward(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return unscaled latents."""
        hidden_BCTHW: Tensor = self.project_in(pixels_BCTHW)
        for layer in _layers(self.stages):
            hidden_BCTHW = layer(hidden_BCTHW)
        out: Tensor = self.project_out(hidden_BCTHW)
        return out


class Decoder(nn.Module):
    """Unscaled latents (B,latent_channels,t,h,w) to pixels (B,3,T,H,W)."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.width_list
        shortcut = partial(repeat_channels, out_channels=widths[-1])
        self.project_in = Residual(ConvLayer(config.latent_channels, widths[-1]), shortcut)
        # In the order of the encoder: the last stage runs first.
        self.stages = nn.ModuleList()
        for index, (kind, width) in enumerate(zip(config.block_types, widths, strict=True)):
            layers = _blocks(kind, width, config.decoder_depth_list[index])
            if index + 1 < len(widths):
                layers.insert(0, Upsample(widths[index + 1], width, double_time=config.temporal[index]))
            self.stages.append(OpList(*layers))
        self.project_out = OpList(ChannelRMSNorm(widths[0]), nn.ReLU(), ConvLayer(widths[0], COLORS))

    def forward(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return pixels in about [-1,1], see `Autoencoder.decode`."""
        hidden_BCTHW: Tensor = self.project_in(latents_BCTHW)
        for layer in _layers(reversed(self.stages)):
            hidden_BCTHW = layer(hidden_BCTHW)
        out: Tensor = self.project_out(hidden_BCTHW)
        return out.to(canvas or latents_BCTHW.device)


class DCAE(Autoencoder):
    """Video autoencoder with high compression: 4k frames become k latent frames, 32 times smaller. It is not causal.

    A single frame is a picture, and a single latent frame is decoded to one: 4 frames can be encoded, but not decoded.
    State-dict keys are those of the released `F32T4C128_AE.safetensors`. Architecture:
    https://arxiv.org/abs/2410.10733, and for time https://arxiv.org/abs/2503.09642, section 3.1.
    """

    config: DCAEConfig
    last_layer_path = "decoder.project_out.op_list.2.conv"

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        self.config = config
        self._scale = 1.0 if config.scaling_factor is None else config.scaling_factor
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Return encoded / scaling_factor."""
        return encoded_BCTHW / self._scale

    def unscale_latents(self, latents_BCTHW: Tensor) -> Tensor:
        return latents_BCTHW * self._scale


def _layers(stages: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers of all stages. Calling a whole stage would keep its input in memory."""
    return chain.from_iterable(cast(OpList, stage).op_list for stage in stages)


def _blocks(kind: BlockType, width: int, depth: int) -> list[nn.Module]:
    """Return the blocks of a stage: pairs of convolutions, or linear attention and then gated convolutions."""
    return [(_conv_pair if kind == "res" else _efficient_vit)(width) for _ in range(depth)]


def _conv_pair(width: int) -> nn.Module:
    first, second = ConvLayer(width, width), ConvLayer(width, width, bias=False, norm=True)
    return Residual(nn.Sequential(OrderedDict(conv1=first, silu=nn.SiLU(), conv2=second)))


def _efficient_vit(width: int) -> nn.Module:
    attention, convolutions = Residual(LinearAttention(width)), Residual(GatedConv(width))
    return nn.Sequential(OrderedDict(context_module=attention, local_module=convolutions))
