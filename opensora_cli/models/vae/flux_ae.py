"""The 2D autoencoder of the text-to-image stage."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.models.vae.autoencoder import PosteriorAutoencoder
from opensora_cli.models.vae.group_norm import GroupNorm
from opensora_cli.models.vae.tiling import TileAxis, TileGrid, check_tiles, tile_axes

NORM_GROUPS = 32
_NORM_EPS = 1e-6
# Every frame is a tile of its own, which changes nothing but the memory that it takes.
_FRAME_BY_FRAME = TileAxis(size=1, stride=1, blend=0, kept=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxAEConfig:
    """Sizes of the autoencoder; the defaults are those of the released `flux1-dev-ae.safetensors`.

    Args:
        in_channels: colour channels that are encoded.
        out_ch: colour channels that are decoded.
        ch: base of the widths, a multiple of 32.
        ch_mult: width of every resolution level over `ch`, finest first. Between two levels height and width are
            halved.
        num_res_blocks: residual blocks of an encoder level; a decoder level has one more.
        z_channels: channels of the latents.
        scale_factor: latents = scale_factor * (posterior - shift_factor).
        tile_size: edge of a spatial tile in pixels.
        tile_overlap_factor: share of a tile that overlaps with the next, in [0, 1).

    Raises:
        RequestError: the sizes contradict each other.
    """

    in_channels: int = 3
    out_ch: int = 3
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    scale_factor: float = 0.3611
    shift_factor: float = 0.1159
    tile_size: int = 1024
    tile_overlap_factor: float = 0.25

    def __post_init__(self) -> None:
        # A list is what JSON and YAML give; the configuration must be hashable.
        object.__setattr__(self, "ch_mult", tuple(self.ch_mult))
        if not self.ch_mult or min(self.ch_mult) < 1:
            raise RequestError(f"vae.flux_ae.ch_mult={self.ch_mult} must name a factor, at least 1, for every level")
        if self.ch < 1 or self.ch % NORM_GROUPS:
            raise RequestError(f"vae.flux_ae.ch={self.ch} must be a multiple of {NORM_GROUPS}, the groups of the norms")
        if self.num_res_blocks < 1 or self.z_channels < 1:
            raise RequestError("vae.flux_ae.num_res_blocks and vae.flux_ae.z_channels must be at least 1")
        ratio, overlap = self.grid.spatial_compression_ratio, self.tile_overlap_factor
        check_tiles("vae.flux_ae", "tile_size", self.tile_size, ratio=ratio, overlap=overlap)

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every level, finest first."""
        return tuple(self.ch * factor for factor in self.ch_mult)

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents: every frame by itself."""
        return LatentGrid(
            latent_channels=self.z_channels,
            time_compression_ratio=1,
            spatial_compression_ratio=2 ** (len(self.ch_mult) - 1),
            is_causal=False,
        )

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels that are encoded, and of latents that are decoded."""
        axes = tile_axes(self.tile_size, ratio=self.grid.spatial_compression_ratio, overlap=self.tile_overlap_factor)
        encoded, decoded = (TileGrid(axis, _FRAME_BY_FRAME, is_causal=False) for axis in axes)
        return encoded, decoded


class ResnetBlock(nn.Module):
    """Group norm, SiLU and convolution, twice, beside a shortcut that is a 1x1 convolution where widths differ."""

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


class MidBlock(nn.Module):
    """Resnet, attention, resnet, at the lowest resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = Attention(channels)
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return the same shape."""
        out_BCHW: Tensor = self.block_2(self.attn_1(self.block_1(hidden_BCHW)))
        return out_BCHW


class Downsample(nn.Module):
    """Convolution with a stride of 2, padded with zeros below and on the right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return (B,C,H/2,W/2)."""
        out_BCHW: Tensor = self.conv(functional.pad(hidden_BCHW, (0, 1, 0, 1)))
        return out_BCHW


class Upsample(nn.Module):
    """Nearest upsampling by 2, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _conv(channels, channels)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return (B,C,2H,2W)."""
        out_BCHW: Tensor = self.conv(functional.interpolate(hidden_BCHW, scale_factor=2.0, mode="nearest"))
        return out_BCHW


class DownLevel(nn.Module):
    """A level of the encoder: resnets, then a downsampling unless it is the last."""

    def __init__(self, in_channels: int, out_channels: int, *, num_blocks: int, is_last: bool) -> None:
        super().__init__()
        self.block = _resnets(in_channels, out_channels, num_blocks=num_blocks)
        self.downsample = None if is_last else Downsample(out_channels)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return (B,out_channels,H/2,W/2); of the last level (B,out_channels,H,W)."""
        for block in self.block:
            hidden_BCHW = block(hidden_BCHW)
        return hidden_BCHW if self.downsample is None else self.downsample(hidden_BCHW)


class UpLevel(nn.Module):
    """A level of the decoder: resnets, then an upsampling unless it is the finest."""

    def __init__(self, in_channels: int, out_channels: int, *, num_blocks: int, is_last: bool) -> None:
        super().__init__()
        self.block = _resnets(in_channels, out_channels, num_blocks=num_blocks)
        self.upsample = None if is_last else Upsample(out_channels)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        """Return (B,out_channels,2H,2W); of the last level (B,out_channels,H,W)."""
        for block in self.block:
            hidden_BCHW = block(hidden_BCHW)
        return hidden_BCHW if self.upsample is None else self.upsample(hidden_BCHW)


class Encoder(nn.Module):
    """Pixels (B,in_channels,H,W) to moments (B,2*z_channels,h,w)."""

    def __init__(self, config: FluxAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = _conv(config.in_channels, config.ch)
        self.down = nn.ModuleList(
            DownLevel(before, after, num_blocks=config.num_res_blocks, is_last=level == len(widths) - 1)
            for level, (before, after) in enumerate(zip((config.ch, *widths), widths, strict=False))
        )
        self.mid = MidBlock(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = _conv(widths[-1], 2 * config.z_channels)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the moments."""
        hidden_BCHW = self.conv_in(pixels_BCHW)
        for level in self.down:
            hidden_BCHW = level(hidden_BCHW)
        out: Tensor = self.conv_out(functional.silu(self.norm_out(self.mid(hidden_BCHW))))
        return out


class Decoder(nn.Module):
    """Unscaled latents (B,z_channels,T,h,w) to pixels (B,out_ch,T,H,W), frame by frame."""

    def __init__(self, config: FluxAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = _conv(config.z_channels, widths[-1])
        self.mid = MidBlock(widths[-1])
        # In the order of the encoder's: the coarsest, which is the last, runs first.
        self.up = nn.ModuleList(
            UpLevel(before, after, num_blocks=config.num_res_blocks + 1, is_last=level == 0)
            for level, (before, after) in enumerate(zip((*widths[1:], widths[-1]), widths, strict=True))
        )
        self.norm_out = _norm(widths[0])
        self.conv_out = _conv(widths[0], config.out_ch)

    def forward(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return pixels, about in [-1,1]; see `Autoencoder.decode`."""
        return _by_frame(self._decode, latents_BCTHW).to(canvas or latents_BCTHW.device)

    def _decode(self, latents_BCHW: Tensor) -> Tensor:
        hidden_BCHW = self.mid(self.conv_in(latents_BCHW))
        for level in reversed(self.up):
            hidden_BCHW = level(hidden_BCHW)
        out: Tensor = self.conv_out(functional.silu(self.norm_out(hidden_BCHW)))
        return out


class FluxAE(PosteriorAutoencoder):
    """2D autoencoder: every frame of a clip becomes a latent frame of its own, 8 times smaller.

    State-dict keys are those of the released `flux1-dev-ae.safetensors`. Trainable: every method is differentiable and
    works under autocast. Frames are computed as a batch; with temporal tiling one by one, with the same result.
    Architecture: https://arxiv.org/abs/2112.10752, appendix E.1.
    """

    config: FluxAEConfig

    encoder: Encoder
    decoder: Decoder

    def __init__(self, config: FluxAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    @property
    def last_layer(self) -> nn.Conv2d:
        """The decoder's last convolution."""
        return self.decoder.conv_out

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the moments of a clip, frame by frame."""
        return _by_frame(self.encoder, pixels_BCTHW)

    def decode_tile(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return the pixels of unscaled latents, frame by frame; see `Autoencoder.decode`."""
        out: Tensor = self.decoder(latents_BCTHW, canvas=canvas)
        return out


def _by_frame(run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor) -> Tensor:
    """Do to the frames of a clip (B,C,T,H,W) what `run` does to pictures (B,C,H,W)."""
    frames_NCHW = rearrange(clip_BCTHW, "b c t h w -> (b t) c h w")
    if clip_BCTHW.device.type == "cpu":
        frames_NCHW = frames_NCHW.contiguous(memory_format=torch.channels_last)
    return rearrange(run(frames_NCHW), "(b t) c h w -> b c t h w", b=len(clip_BCTHW))


def _resnets(in_channels: int, out_channels: int, *, num_blocks: int) -> nn.ModuleList:
    """Return the resnets of a level, of which the first changes the width."""
    widths = (in_channels, *[out_channels] * (num_blocks - 1))
    return nn.ModuleList(ResnetBlock(width, out_channels) for width in widths)


def _norm(channels: int) -> GroupNorm:
    return GroupNorm(NORM_GROUPS, channels, eps=_NORM_EPS)


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)
