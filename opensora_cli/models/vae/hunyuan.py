"""Hunyuan causal video autoencoder."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.autoencoder import COLORS, PosteriorAutoencoder
from opensora_cli.models.vae.chunked import chunk_frames_for, records_no_gradient, run_in_chunks
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.group_norm import GroupNorm
from opensora_cli.models.vae.hunyuan_blocks import NORM_EPS, CausalConv3d, DownBlock, MidBlock, UpBlock
from opensora_cli.models.vae.tiles import NO_TILING, Tiling
from opensora_cli.models.vae.tiling import tiled_pieces


class Encoder(nn.Module):
    """Pixels (B,3,T,H,W) to unprojected moments (B,2*latent_channels,t,h,w)."""

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels, config.norm_num_groups
        self.conv_in = CausalConv3d(COLORS, widths[0])
        self.down_blocks = nn.ModuleList(
            DownBlock(before, after, num_layers=config.layers_per_block, num_groups=groups, time=time, space=space)
            for before, after, (time, space) in zip((widths[0], *widths), widths, config.level_factors, strict=False)
        )
        self.mid_block = MidBlock(widths[-1], num_groups=groups)
        self.conv_norm_out = GroupNorm(groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)

    def forward(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the moments (B,2*latent_channels,t,h,w), before their projection."""
        device = pixels_BCTHW.device
        chunk_frames = self.chunk_frames_for(pixels_BCTHW)
        if chunk_frames is not None and records_no_gradient(pixels_BCTHW, self.conv_in):
            return run_in_chunks(
                pixels_BCTHW,
                conv_in=self.conv_in,
                layers=self.layers(),
                norm_out=self.conv_norm_out,
                conv_out=self.conv_out,
                chunk_frames=chunk_frames,
                store=device,
                canvas=device,
            )
        hidden_BCTHW = self.conv_in(pixels_BCTHW)
        for block in self.down_blocks:
            hidden_BCTHW = block(hidden_BCTHW)
        hidden_BCTHW = self.mid_block(hidden_BCTHW)
        out: Tensor = self.conv_out(functional.silu(self.conv_norm_out(hidden_BCTHW)))
        return out

    def chunk_frames_for(self, pixels_BCTHW: Tensor) -> int | None:
        """Return the number of frames that each layer computes at a time. None means all frames."""
        batch, _, _, height, width = pixels_BCTHW.shape
        frame = batch, self.conv_in.conv.out_channels, height, width
        return chunk_frames_for(frame, device=pixels_BCTHW.device)

    def layers(self) -> Iterator[nn.Module]:
        """Yield the layers between the first and the last convolution."""
        for block in self.down_blocks:
            for stack in block.children():
                yield from stack.children()
        first, last = self.mid_block.resnets
        yield from (first, *self.mid_block.attentions, last)


class Decoder(nn.Module):
    """Projected latents (B,latent_channels,t,h,w) to pixels (B,3,T,H,W)."""

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels[::-1], config.norm_num_groups
        self.conv_in = CausalConv3d(config.latent_channels, widths[0])
        self.mid_block = MidBlock(widths[0], num_groups=groups)
        self.up_blocks = nn.ModuleList(
            UpBlock(before, after, num_layers=config.layers_per_block + 1, num_groups=groups, time=time, space=space)
            for before, after, (time, space) in zip((widths[0], *widths), widths, config.level_factors, strict=False)
        )
        self.conv_norm_out = GroupNorm(groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], COLORS)
        self._spatial_ratio = config.spatial_compression_ratio

    def forward(
        self,
        latents_BCTHW: Tensor,
        *,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Tensor:
        """Return pixels (B,3,T,H,W) in about [-1,1], see `HunyuanVAE.decode`."""
        device = latents_BCTHW.device
        if chunk_frames is None and records_no_gradient(latents_BCTHW, self.conv_in):
            chunk_frames = self.chunk_frames_for(latents_BCTHW)
        if chunk_frames is not None:
            return run_in_chunks(
                latents_BCTHW,
                conv_in=self.conv_in,
                layers=self.layers(),
                norm_out=self.conv_norm_out,
                conv_out=self.conv_out,
                chunk_frames=chunk_frames,
                store=store or device,
                canvas=canvas or device,
            )
        hidden_BCTHW = self.mid_block(self.conv_in(latents_BCTHW))
        for block in self.up_blocks:
            hidden_BCTHW = block(hidden_BCTHW)
        out: Tensor = self.conv_out(functional.silu(self.conv_norm_out(hidden_BCTHW)))
        return out.to(canvas or device)

    def chunk_frames_for(self, latents_BCTHW: Tensor) -> int | None:
        """Return the default of `chunk_frames`. None means all frames."""
        batch, _, _, height, width = latents_BCTHW.shape
        space = self._spatial_ratio
        frame = batch, self.conv_out.conv.in_channels, height * space, width * space
        return chunk_frames_for(frame, device=latents_BCTHW.device)

    def layers(self) -> Iterator[nn.Module]:
        """Yield the layers between the first and the last convolution."""
        first, last = self.mid_block.resnets
        yield from (first, *self.mid_block.attentions, last)
        for block in self.up_blocks:
            for stack in block.children():
                yield from stack.children()


class HunyuanVAE(PosteriorAutoencoder):
    """Causal video autoencoder: 4k+1 frames become k+1 latent frames. The first latent frame is a picture.

    State-dict keys are those of the released `hunyuan_vae.safetensors`. Architecture: HunyuanVideo
    (https://arxiv.org/abs/2412.03603), section 4.1.
    """

    config: HunyuanVAEConfig

    encoder: Encoder
    decoder: Decoder
    decodes_in_chunks = True

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)

    @property
    def last_layer(self) -> nn.Conv3d:
        """Last convolution of the decoder."""
        return self.decoder.conv_out.conv

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the moments of a tile."""
        moments_BCTHW: Tensor = self.quant_conv(self.encoder(pixels_BCTHW))
        return moments_BCTHW

    def decode_tile(
        self,
        latents_BCTHW: Tensor,
        *,
        canvas: torch.device | None = None,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
    ) -> Tensor:
        """Return the pixels of a tile of unscaled latents, see `Autoencoder.decode`."""
        projected_BCTHW = self.post_quant_conv(latents_BCTHW)
        pixels_BCTHW: Tensor = self.decoder(projected_BCTHW, chunk_frames=chunk_frames, store=store, canvas=canvas)
        return pixels_BCTHW

    def decode_pieces(
        self,
        latents_BCTHW: Tensor,
        *,
        tiling: Tiling = NO_TILING,
        canvas: torch.device | None = None,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
    ) -> Iterator[Tensor]:
        """Yield the result of `decode` in pieces along time, see `Autoencoder.decode_pieces`."""
        self.check_latents(latents_BCTHW)
        if chunk_frames is not None and chunk_frames < 1:
            raise RequestError(f"chunk_frames={chunk_frames} must be at least 1")
        return tiled_pieces(
            partial(self.decode_tile, canvas=canvas, chunk_frames=chunk_frames, store=store),
            self.unscale_latents(latents_BCTHW),
            grid=self.config.tile_grids()[1],
            tiling=tiling,
        )
