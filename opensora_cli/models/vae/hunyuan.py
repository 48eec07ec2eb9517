"""Hunyuan causal video autoencoder."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.vae.autoencoder import COLORS, PosteriorAutoencoder
from opensora_cli.models.vae.chunked import chunk_frames_for, run_in_chunks
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan_blocks import NORM_EPS, CausalConv3d, Downsample, Level, MidBlock, Upsample
from opensora_cli.models.vae.resample import GroupNorm


class _Coder(nn.Module, ABC):
    """Layers between two convolutions, which compute all frames of a clip or some at a time."""

    conv_in: CausalConv3d
    conv_norm_out: GroupNorm
    conv_out: CausalConv3d
    largest: tuple[int, int]
    """Channels between layers at the highest resolution, and its spatial factor relative to the input."""

    def forward(
        self,
        clip_BCTHW: Tensor,
        *,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Tensor:
        """Return the result for a clip, see `Autoencoder.decode`."""
        device = clip_BCTHW.device
        records_gradients = clip_BCTHW.requires_grad or self.conv_in.conv.weight.requires_grad
        if chunk_frames is None and not records_gradients:
            chunk_frames = self.chunk_frames_for(clip_BCTHW)
        if chunk_frames is not None:
            return run_in_chunks(
                clip_BCTHW,
                conv_in=self.conv_in,
                layers=self.layers(),
                norm_out=self.conv_norm_out,
                conv_out=self.conv_out,
                chunk_frames=chunk_frames,
                store=store or device,
                canvas=canvas or device,
            )
        hidden_BCTHW = self.conv_in(clip_BCTHW)
        for layer in self.layers():
            hidden_BCTHW = layer(hidden_BCTHW)
        out: Tensor = self.conv_out(functional.silu(self.conv_norm_out(hidden_BCTHW)))
        return out.to(canvas or device)

    @abstractmethod
    def layers(self) -> Iterable[nn.Module]:
        """Return the layers between the first and the last convolution, in the order in which they run."""

    def chunk_frames_for(self, clip_BCTHW: Tensor) -> int | None:
        """Return the default of `chunk_frames`. None means all frames."""
        batch, _, _, height, width = clip_BCTHW.shape
        channels, space = self.largest
        return chunk_frames_for((batch, channels, height * space, width * space), device=clip_BCTHW.device)


class Encoder(_Coder):
    """Pixels (B,3,T,H,W) to unprojected moments (B,2*latent_channels,t,h,w)."""

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        widths = config.block_out_channels
        self.conv_in = CausalConv3d(COLORS, widths[0])
        self.down_blocks = _levels(config, widths, Downsample, num_layers=config.layers_per_block)
        self.mid_block = MidBlock(widths[-1], num_groups=config.norm_num_groups)
        self.conv_norm_out = GroupNorm(config.norm_num_groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)
        self.largest = widths[0], 1

    def layers(self) -> Iterable[nn.Module]:
        """Return the layers of the levels, then those of the middle."""
        return chain(_layers(self.down_blocks), self.mid_block.layers())


class Decoder(_Coder):
    """Projected latents (B,latent_channels,t,h,w) to pixels (B,3,T,H,W) in about [-1,1]."""

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        widths = config.block_out_channels[::-1]
        self.conv_in = CausalConv3d(config.latent_channels, widths[0])
        self.mid_block = MidBlock(widths[0], num_groups=config.norm_num_groups)
        self.up_blocks = _levels(config, widths, Upsample, num_layers=config.layers_per_block + 1)
        self.conv_norm_out = GroupNorm(config.norm_num_groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], COLORS)
        self.largest = widths[-1], config.spatial_compression_ratio

    def layers(self) -> Iterable[nn.Module]:
        """Return the layers of the middle, then those of the levels."""
        return chain(self.mid_block.layers(), _layers(self.up_blocks))


def _levels(
    config: HunyuanVAEConfig, widths: tuple[int, ...], resampling: type[Downsample | Upsample], *, num_layers: int
) -> nn.ModuleList:
    groups = config.norm_num_groups
    return nn.ModuleList(
        Level(before, after, resampling, num_layers=num_layers, num_groups=groups, time=time, space=space)
        for before, after, (time, space) in zip((widths[0], *widths), widths, config.level_factors, strict=False)
    )


def _layers(levels: nn.ModuleList) -> Iterator[nn.Module]:
    return (layer for level in levels for stack in level.children() for layer in stack.children())


class HunyuanVAE(PosteriorAutoencoder):
    """Causal video autoencoder: 4k+1 frames become k+1 latent frames. The first latent frame is a picture.

    State-dict keys are those of the released `hunyuan_vae.safetensors`. Architecture: HunyuanVideo
    (https://arxiv.org/abs/2412.03603), section 4.1.
    """

    config: HunyuanVAEConfig

    encoder: Encoder
    decoder: Decoder
    decodes_in_chunks = True
    last_layer_path = "decoder.conv_out.conv"

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        moments_BCTHW: Tensor = self.quant_conv(self.encoder(pixels_BCTHW))
        return moments_BCTHW

    def decode_tile(self, latents_BCTHW: Tensor, options: Mapping[str, object]) -> Tensor:
        """Return the pixels of a tile of unscaled latents; `options` are those of the decoder."""
        return super().decode_tile(self.post_quant_conv(latents_BCTHW), options)
