"""The Hunyuan causal video autoencoder."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.models.vae.autoencoder import PosteriorAutoencoder
from opensora_cli.models.vae.chunked import chunk_frames_for, records_no_gradient, run_in_chunks
from opensora_cli.models.vae.group_norm import GroupNorm
from opensora_cli.models.vae.hunyuan_blocks import NORM_EPS, CausalConv3d, DownBlock, MidBlock, UpBlock
from opensora_cli.models.vae.tiling import NO_TILING, TileGrid, Tiling, check_tiles, tile_axes, tiled_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanVAEConfig:
    """Sizes of the autoencoder; the defaults are those of the released `hunyuan_vae.safetensors`.

    Args:
        block_out_channels: width of every resolution level, finest first.
        layers_per_block: residual blocks of an encoder level; a decoder level has one more.
        norm_num_groups: groups of every group norm; must divide every width.
        sample_size: edge of a spatial tile in pixels.
        sample_tsize: length of a temporal tile in frames, not counting the first, causal one.
        tile_overlap_factor: share of a tile that overlaps with the next, in [0, 1).
        scale_factor: latents = scale_factor * (posterior - shift_factor).
        time_compression_ratio: frames to latent frames, a power of two.
        spatial_compression_ratio: pixels to latents along height and width, a power of two.

    Raises:
        RequestError: the sizes contradict each other.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 16
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    norm_num_groups: int = 32
    sample_size: int = 256
    sample_tsize: int = 64
    tile_overlap_factor: float = 0.25
    scale_factor: float = 0.476986
    shift_factor: float = 0.0
    time_compression_ratio: int = 4
    spatial_compression_ratio: int = 8

    def __post_init__(self) -> None:
        # A list is what JSON and YAML give; the configuration must be hashable.
        object.__setattr__(self, "block_out_channels", tuple(self.block_out_channels))
        self._check_levels()
        for size, ratio in (
            ("sample_size", "spatial_compression_ratio"),
            ("sample_tsize", "time_compression_ratio"),
        ):
            check_tiles(
                "vae",
                size,
                getattr(self, size),
                ratio=getattr(self, ratio),
                ratio_name=ratio,
                overlap=self.tile_overlap_factor,
            )

    def _check_levels(self) -> None:
        widths = self.block_out_channels
        if not widths:
            raise RequestError("vae.block_out_channels is empty: it names the width of every resolution level")
        if self.layers_per_block < 1:
            raise RequestError(f"vae.layers_per_block={self.layers_per_block} must be at least 1")
        if self.norm_num_groups < 1 or any(width < 1 or width % self.norm_num_groups for width in widths):
            raise RequestError(
                f"vae.norm_num_groups={self.norm_num_groups} must divide every width of vae.block_out_channels={widths}"
            )
        # The last level never halves time, but may halve space.
        highest_ratios = {
            "time_compression_ratio": 2 ** (len(widths) - 1),
            "spatial_compression_ratio": 2 ** len(widths),
        }
        for name, highest in highest_ratios.items():
            ratio = getattr(self, name)
            if ratio < 1 or ratio & (ratio - 1) or ratio > highest:
                allowed = ", ".join(str(2**power) for power in range(highest.bit_length()))
                raise RequestError(
                    f"vae.{name}={ratio} does not fit the {len(widths)} levels of vae.block_out_channels: use {allowed}"
                )

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents; the first latent frame is the first frame alone."""
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=self.time_compression_ratio,
            spatial_compression_ratio=self.spatial_compression_ratio,
            is_causal=True,
        )

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels that are encoded, and of latents that are decoded."""
        overlap = self.tile_overlap_factor
        space = tile_axes(self.sample_size, ratio=self.spatial_compression_ratio, overlap=overlap)
        time = tile_axes(self.sample_tsize, ratio=self.time_compression_ratio, overlap=overlap)
        return TileGrid(space[0], time[0]), TileGrid(space[1], time[1])

    @property
    def level_factors(self) -> tuple[tuple[int, int], ...]:
        """(time, space) factor between every level and the next, in the order of the blocks.

        Encoder and decoder share the order: the decoder is not the encoder's mirror image in this respect.
        """
        levels = len(self.block_out_channels)
        num_time = self.time_compression_ratio.bit_length() - 1
        num_space = self.spatial_compression_ratio.bit_length() - 1
        return tuple(
            (2 if levels - 1 - num_time <= level < levels - 1 else 1, 2 if level < num_space else 1)
            for level in range(levels)
        )


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
        self.conv_norm_out = GroupNorm(groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels)

    def forward(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the moments (B,2*latent_channels,t,h,w), before their projection."""
        device = pixels_BCTHW.device
        batch, _, _, height, width = pixels_BCTHW.shape
        frame = batch, self.conv_in.conv.out_channels, height, width
        chunk_frames = chunk_frames_for(frame, device=device)
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

    def layers(self) -> Iterator[nn.Module]:
        """Yield the layers between the first and the last convolution."""
        for block in self.down_blocks:
            for stack in block.children():
                yield from stack.children()
        first, last = self.mid_block.resnets
        yield from (first, *self.mid_block.attentions, last)


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
        self.conv_norm_out = GroupNorm(groups, widths[-1], eps=NORM_EPS)
        self.conv_out = CausalConv3d(widths[-1], config.out_channels)
        self._spatial_ratio = config.spatial_compression_ratio

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
        """Return how many frames are computed at a time where `chunk_frames` does not say it; None: all."""
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
    """Causal video autoencoder: 4k+1 frames become k+1 latent frames, the first of them a picture of its own.

    State-dict keys are those of the released `hunyuan_vae.safetensors`. Trainable: every method is differentiable and
    works under autocast. Architecture: HunyuanVideo (https://arxiv.org/abs/2412.03603), section 4.1.
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
        """The decoder's last convolution."""
        return self.decoder.conv_out.conv

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the moments of a clip that is not cut any more."""
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
        """Return the pixels of unscaled latents that are not cut any more; see `Autoencoder.decode`."""
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
        """Yield the frames of `decode` as they are finished; see `Autoencoder.decode`."""
        self.check_latents(latents_BCTHW)
        if chunk_frames is not None and chunk_frames < 1:
            raise RequestError(f"chunk_frames={chunk_frames} must be at least 1")
        return tiled_pieces(
            partial(self.decode_tile, canvas=canvas, chunk_frames=chunk_frames, store=store),
            self.unscale_latents(latents_BCTHW),
            grid=self.config.tile_grids()[1],
            tiling=tiling,
        )
