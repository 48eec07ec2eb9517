"""2D autoencoder of FLUX.1."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.vae.autoencoder import COLORS, PosteriorAutoencoder
from opensora_cli.models.vae.config import FLUX_NORM_GROUPS, FluxAEConfig
from opensora_cli.models.vae.resample import GroupNorm

_NORM_EPS = 1e-6


class ResnetBlock(nn.Module):
    """Group norm, SiLU and convolution, twice, with a shortcut. The shortcut is a 1x1 convolution if widths differ."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_channels)
        self.conv1 = _conv(in_channels, out_channels)
        self.norm2 = _norm(out_channels)
        self.conv2 = _conv(out_channels, out_channels)
        self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return (B,out_channels,H,W)."""
        residual_BCHW = self.conv1(functional.silu(self.norm1(hidden_BCHW)))
        residual_BCHW = self.conv2(functional.silu(self.norm2(residual_BCHW)))
        if self.nin_shortcut is not None:
            hidden_BCHW = self.nin_shortcut(hidden_BCHW)
        out_BCHW: Tensor = hidden_BCHW + residual_BCHW
        return out_BCHW


class Attention(nn.Module):
    """Self-attention of one full-width head over all positions of a frame; residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return the same shape."""
        normed_BCHW = self.norm(hidden_BCHW)
        q_B1NC, k_B1NC, v_B1NC = (
            rearrange(project(normed_BCHW), "b c h w -> b 1 (h w) c") for project in (self.q, self.k, self.v)
        )
        out_B1NC = functional.scaled_dot_product_attention(q_B1NC, k_B1NC, v_B1NC)
        height = hidden_BCHW.shape[2]
        out_BCHW: Tensor = self.proj_out(rearrange(out_B1NC, "b 1 (h w) c -> b c h w", h=height))
        return hidden_BCHW + out_BCHW


class Encoder(nn.Module):
    """Pixels (B,3,H,W) to moments (B,2*z_channels,h,w)."""

    def __init__(self, config: FluxAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = _conv(COLORS, config.ch)
        self.down = nn.Sequential()
        for before, after in pairwise((config.ch, *widths)):
            level = _level(before, after, num_blocks=config.num_res_blocks)
            if len(self.down) < len(widths) - 1:
                # Padded with zeros below and on the right.
                pad, conv = nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(after, after, 3, stride=2)
                level.add_module("downsample", nn.Sequential(OrderedDict(pad=pad, conv=conv)))
            self.down.append(level)
        self.mid = _mid_block(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = _conv(widths[-1], 2 * config.z_channels)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        hidden_BCHW = self.mid(self.down(self.conv_in(pixels_BCHW)))
        out: Tensor = self.conv_out(functional.silu(self.norm_out(hidden_BCHW)))
        return out


class Decoder(nn.Module):
    """Unscaled latents (B,z_channels,T,h,w) to pixels (B,3,T,H,W), frame by frame."""

    def __init__(self, config: FluxAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = _conv(config.z_channels, widths[-1])
        self.mid = _mid_block(widths[-1])
        # In the order of the encoder: the last and coarsest level runs first.
        self.up = nn.ModuleList()
        for before, after in zip((*widths[1:], widths[-1]), widths, strict=True):
            level = _level(before, after, num_blocks=config.num_res_blocks + 1)
            if len(self.up) > 0:
                upsample = OrderedDict(nearest=nn.Upsample(scale_factor=2.0, mode="nearest"), conv=_conv(after, after))
                level.add_module("upsample", nn.Sequential(upsample))
            self.up.append(level)
        self.norm_out = _norm(widths[0])
        self.conv_out = _conv(widths[0], COLORS)

    def forward(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return pixels in about [-1,1], see `Autoencoder.decode`."""
        return _by_frame(self._decode, latents_BCTHW).to(canvas or latents_BCTHW.device)

    def _decode(self, latents_BCHW: Tensor) -> Tensor:
        hidden_BCHW = self.mid(self.conv_in(latents_BCHW))
        for level in reversed(self.up):
            hidden_BCHW = level(hidden_BCHW)
        out: Tensor = self.conv_out(functional.silu(self.norm_out(hidden_BCHW)))
        return out


class FluxAE(PosteriorAutoencoder):
    """2D autoencoder: every frame becomes a latent frame, 8 times smaller.

    State-dict keys are those of the released `flux1-dev-ae.safetensors`. Frames are computed as a batch or, with
    temporal tiling, one at a time with the same result. Architecture: https://arxiv.org/abs/2112.10752, appendix E.1.
    """

    config: FluxAEConfig
    last_layer_path = "decoder.conv_out"

    def __init__(self, config: FluxAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        return _by_frame(self.encoder, pixels_BCTHW)


def _by_frame(run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor) -> Tensor:
    """Apply `run`, a function of pictures (B,C,H,W), to the frames of a clip (B,C,T,H,W)."""
    frames_NCHW = rearrange(clip_BCTHW, "b c t h w -> (b t) c h w")
    if clip_BCTHW.device.type == "cpu":
        frames_NCHW = frames_NCHW.contiguous(memory_format=torch.channels_last)
    return rearrange(run(frames_NCHW), "(b t) c h w -> b c t h w", b=len(clip_BCTHW))


def _level(in_channels: int, out_channels: int, *, num_blocks: int) -> nn.Sequential:
    """Return a level of resnets. The first changes the width."""
    widths = (in_channels, *[out_channels] * (num_blocks - 1))
    return nn.Sequential(OrderedDict(block=nn.Sequential(*(ResnetBlock(width, out_channels) for width in widths))))


def _mid_block(channels: int) -> nn.Sequential:
    """Return a resnet, attention and a resnet, for the lowest resolution."""
    first, last = ResnetBlock(channels, channels), ResnetBlock(channels, channels)
    return nn.Sequential(OrderedDict(block_1=first, attn_1=Attention(channels), block_2=last))


def _norm(channels: int) -> GroupNorm:
    return GroupNorm(FLUX_NORM_GROUPS, channels, eps=_NORM_EPS)


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)
