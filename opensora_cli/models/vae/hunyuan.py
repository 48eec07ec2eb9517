"""The Hunyuan causal video autoencoder."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.blocks import NORM_EPS, CausalConv3d, DownBlock, MidBlock, UpBlock
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.tiling import NO_TILING, TileGrid, Tiling, run_tiled


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

    def forward(self, latents_BCTHW: Tensor) -> Tensor:
        """Return pixels (B,out_channels,T,H,W), about in [-1,1]."""
        hidden_BCTHW = self.mid_block(self.conv_in(latents_BCTHW))
        for block in self.up_blocks:
            hidden_BCTHW = block(hidden_BCTHW)
        out: Tensor = self.conv_out(functional.silu(self.conv_norm_out(hidden_BCTHW)))
        return out


class HunyuanVAE(nn.Module):
    """Causal video autoencoder: 4k+1 frames become k+1 latent frames, the first of them a picture of its own.

    State-dict keys are those of the released `hunyuan_vae.safetensors`. Trainable: every method is differentiable and
    works under autocast. Architecture: HunyuanVideo (https://arxiv.org/abs/2412.03603), section 4.1.
    """

    def __init__(self, config: HunyuanVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self.post_quant_conv = nn.Conv3d(config.latent_channels, config.latent_channels, 1)

    def encode(
        self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None, tiling: Tiling = NO_TILING
    ) -> Tensor:
        """Encode a clip, or a picture as a clip of one frame, to scaled latents.

        Args:
            pixels_BCTHW: (B, in_channels, T, H, W) in [-1, 1]; T-1 must be a multiple of r = time_compression_ratio,
                H and W of s = spatial_compression_ratio.
            generator: draws the sample from the posterior, on the pixels' device; None takes the posterior's mode.
            tiling: the axes along which to encode tile by tile.

        Returns:
            (B, latent_channels, (T-1)/r + 1, H/s, W/s).

        Raises:
            RequestError: the clip has a shape that cannot be encoded.
        """
        mean_BCTHW, logvar_BCTHW = self.encode_moments(pixels_BCTHW, tiling=tiling)
        if generator is None:
            return self.scale_latents(mean_BCTHW)
        noise_BCTHW = torch.randn(
            mean_BCTHW.shape, generator=generator, device=mean_BCTHW.device, dtype=mean_BCTHW.dtype
        )
        return self.scale_latents(mean_BCTHW + torch.exp(0.5 * logvar_BCTHW) * noise_BCTHW)

    def encode_moments(self, pixels_BCTHW: Tensor, *, tiling: Tiling = NO_TILING) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the posterior, unscaled, each of the shape of the latents (see `encode`).

        Raises:
            RequestError: the clip has a shape that cannot be encoded.
        """
        self._check_pixels(pixels_BCTHW)
        moments_BCTHW = run_tiled(
            lambda tile_BCTHW: self.quant_conv(self.encoder(tile_BCTHW)),
            pixels_BCTHW,
            grid=TileGrid.of_encoder(self.config),
            tiling=tiling,
        )
        mean_BCTHW, logvar_BCTHW = moments_BCTHW.chunk(2, dim=1)
        # Beyond these limits the variance over- or underflows in half precision.
        return mean_BCTHW, logvar_BCTHW.clamp(-30.0, 20.0)

    def scale_latents(self, posterior_BCTHW: Tensor) -> Tensor:
        """Bring posterior values to about unit variance: scale_factor * (posterior - shift_factor)."""
        return self.config.scale_factor * (posterior_BCTHW - self.config.shift_factor)

    def decode(self, latents_BCTHW: Tensor, *, tiling: Tiling = NO_TILING) -> Tensor:
        """Decode scaled latents to pixels.

        Args:
            latents_BCTHW: (B, latent_channels, T, H, W), as `encode` returns them.
            tiling: the axes along which to decode tile by tile.

        Returns:
            (B, out_channels, (T-1)*r + 1, H*s, W*s) with r and s as in `encode`; about [-1, 1], not clamped.

        Raises:
            RequestError: the latents have a shape that cannot be decoded.
        """
        config = self.config
        if latents_BCTHW.dim() != 5 or latents_BCTHW.shape[1] != config.latent_channels or not latents_BCTHW.numel():
            raise RequestError(
                f"latents of shape {tuple(latents_BCTHW.shape)} cannot be decoded: expected "
                f"(batch, {config.latent_channels}, latent frames, latent height, latent width)"
            )
        return run_tiled(
            lambda tile_BCTHW: self.decoder(self.post_quant_conv(tile_BCTHW)),
            latents_BCTHW / config.scale_factor + config.shift_factor,
            grid=TileGrid.of_decoder(config),
            tiling=tiling,
        )

    def _check_pixels(self, pixels_BCTHW: Tensor) -> None:
        config, shape = self.config, tuple(pixels_BCTHW.shape)
        if len(shape) != 5 or shape[1] != config.in_channels or not pixels_BCTHW.numel():
            raise RequestError(
                f"pixels of shape {shape} cannot be encoded: "
                f"expected (batch, {config.in_channels}, frames, height, width)"
            )
        _, _, num_frames, height, width = shape
        time, space = config.time_compression_ratio, config.spatial_compression_ratio
        if (num_frames - 1) % time:
            below = (num_frames - 1) // time * time + 1
            raise RequestError(
                f"num_frames={num_frames} must be 1 more than a multiple of {time}: use {below} or {below + time}"
            )
        if height % space or width % space:
            raise RequestError(f"height={height} and width={width} must be multiples of {space}")
