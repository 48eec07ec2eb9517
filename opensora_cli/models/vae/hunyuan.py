"""The Hunyuan causal video autoencoder."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.autoencoder import PosteriorAutoencoder, split_moments
from opensora_cli.models.vae.blocks import NORM_EPS, CausalConv3d, DownBlock, MidBlock, UpBlock
from opensora_cli.models.vae.chunked import decode_in_chunks
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.tiling import NO_TILING, TileGrid, Tiling, joined_in_time, run_tiled, tiled_pieces


class Encoder(nn.Module):
    """Pixels (B,in_channels,T,H,W) to unprojected moments (B,2*latent_channels,t,h,w)."""

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels, config.norm_num_groups
        self.conv_in = CausalConv3d(config.in_channels, widths[0])
        self.down_blocks = nn.ModuleList(
            DownBlock(before, after, num_layers=config.layers_per_block, num_groups=groups, time=time, space=space)
            for before, after, (time, space) in zip((widths[0], *widths), widths, config.level_factors, strict=False)
        )
        self.mid_block = MidBlock(widths[-1], num_groups=groups)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)

    def forward(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the moments (B,2*latent_channels,t,h,w), before their projection."""
        hidden_BCTHW = self.conv_in(pixels_BCTHW)
        for block in self.down_blocks:
            hidden_BCTHW = block(hidden_BCTHW)
        hidden_BCTHW = self.mid_block(hidden_BCTHW)
        out: Tensor = self.conv_out(functional.silu(self.conv_norm_out(hidden_BCTHW)))
        return out


class Decoder(nn.Module):
    """Projected latents (B,latent_channels,t,h,w) to pixels (B,out_channels,T,H,W)."""

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels[::-1], config.norm_num_groups
        self.conv_in = CausalConv3d(config.latent_channels, widths[0])
        self.mid_block = MidBlock(widths[0], num_groups=groups)
        self.up_blocks = nn.ModuleList(
            UpBlock(before, after, num_layers=config.layers_per_block + 1, num_groups=groups, time=time, space=space)
            for before, after, (time, space) in zip((widths[0], *widths), widths, config.level_factors, strict=False)
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], config.out_channels)

    def forward(
        self,
        latents_BCTHW: Tensor,
        *,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Tensor:
        """Return pixels (B,out_channels,T,H,W), about in [-1,1]; see `HunyuanVAE.decode`."""
        device = latents_BCTHW.device
        if chunk_frames is not None:
            return decode_in_chunks(
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

    def layers(self) -> Iterator[nn.Module]:
        """Yield what stands between the first and the last convolution, one by one."""
        first, last = self.mid_block.resnets
        yield from (first, *self.mid_block.attentions, last)
        for block in self.up_blocks:
            for stack in block.children():
                yield from stack.children()


class HunyuanVAE(PosteriorAutoencoder):
    """Causal video autoencoder: 4k+1 frames become k+1 latent frames, the first of them a picture of its own.

    State-dict keys are those of the released `hunyuan_vae.safetensors`. Trainable: every method is differentiable and
    works under autocast. Architecture: HunyuanVideo (https://arxiv.org/abs/2412.03603), section 4.1.
    """

    config: HunyuanVAEConfig

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)

    @property
    def last_layer(self) -> nn.Conv3d:
        """The decoder's last convolution."""
        return self.decoder.conv_out.conv

    def encode_moments(self, pixels_BCTHW: Tensor, *, tiling: Tiling = NO_TILING) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the posterior, unscaled; see `PosteriorAutoencoder.encode_moments`."""
        self.check_pixels(pixels_BCTHW)
        moments_BCTHW = run_tiled(
            lambda tile_BCTHW: self.quant_conv(self.encoder(tile_BCTHW)),
            pixels_BCTHW,
            grid=TileGrid.of_encoder(self.config),
            tiling=tiling,
        )
        return split_moments(moments_BCTHW)

    def scale_latents(self, posterior_BCTHW: Tensor) -> Tensor:
        """Bring posterior values to about unit variance: scale_factor * (posterior - shift_factor)."""
        return self.config.scale_factor * (posterior_BCTHW - self.config.shift_factor)

    def decode(
        self,
        latents_BCTHW: Tensor,
        *,
        tiling: Tiling = NO_TILING,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Tensor:
        """Decode scaled latents to pixels.

        Args:
            latents_BCTHW: (B, latent_channels, T, H, W), as `encode` returns them.
            tiling: the axes along which to decode tile by tile, which changes the result.
            chunk_frames: frames that each layer computes at a time, at whatever resolution it works; None is all. The
                result is the same but for rounding, and no gradient is recorded.
            store: where, with `chunk_frames`, the frames wait between two layers; None is the device of the latents.
            canvas: where pixels are gathered, so that the device of the latents, which is the default, only holds those
                of one tile, or with `chunk_frames` those of one chunk.

        Returns:
            (B, out_channels, (T-1)*r + 1, H*s, W*s) with r and s as in `encode`, on the canvas; about [-1, 1], not
            clamped.

        Raises:
            RequestError: the latents have a shape that cannot be decoded, or `chunk_frames` is below 1.
        """
        return joined_in_time(
            self.decode_pieces(latents_BCTHW, tiling=tiling, chunk_frames=chunk_frames, store=store, canvas=canvas)
        )

    def decode_pieces(
        self,
        latents_BCTHW: Tensor,
        *,
        tiling: Tiling = NO_TILING,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Iterator[Tensor]:
        """Decode as `decode` does, and yield frames as they are finished: a piece for each tile in time.

        Raises:
            RequestError: see `decode`; before anything is computed.
        """
        config = self.config
        self.check_latents(latents_BCTHW)
        if chunk_frames is not None and chunk_frames < 1:
            raise RequestError(f"chunk_frames={chunk_frames} must be at least 1")
        decoder = partial(self.decoder, chunk_frames=chunk_frames, store=store, canvas=canvas)
        return tiled_pieces(
            lambda tile_BCTHW: decoder(self.post_quant_conv(tile_BCTHW)),
            latents_BCTHW / config.scale_factor + config.shift_factor,
            grid=TileGrid.of_decoder(config),
            tiling=tiling,
        )
