"""The video deep-compression autoencoder."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from opensora_cli.models.vae.autoencoder import Autoencoder, Reconstruction
from opensora_cli.models.vae.dc_ae_blocks import (
    ChannelRMSNorm,
    ConvLayer,
    ConvPair,
    Downsample,
    EfficientViTBlock,
    Residual,
    Upsample,
    average_channels,
    repeat_channels,
)
from opensora_cli.models.vae.dc_ae_config import DCAEConfig, StageKind
from opensora_cli.models.vae.tiling import NO_TILING, TileAxis, TileGrid, Tiling, run_tiled, tiled_pieces


class OpList(nn.Module):
    """Layers one after the other, under the name that the released keys have."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(layers)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return what the last layer returns."""
        for layer in self.op_list:
            hidden_BCTHW = layer(hidden_BCTHW)
        return hidden_BCTHW


class Encoder(nn.Module):
    """Pixels (B,in_channels,T,H,W) to unscaled latents (B,latent_channels,t,h,w)."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.width_list
        self.project_in = ConvLayer(config.in_channels, widths[0])
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
    """Unscaled latents (B,latent_channels,t,h,w) to pixels (B,in_channels,T,H,W)."""

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        widths = config.width_list
        shortcut = partial(repeat_channels, out_channels=widths[-1])
        self.project_in = Residual(ConvLayer(config.latent_channels, widths[-1]), shortcut)
        # In the order of the encoder's: the last runs first.
        self.stages = nn.ModuleList()
        for index, (kind, width) in enumerate(zip(config.block_types, widths, strict=True)):
            layers = _blocks(kind, width, config.decoder_depth_list[index])
            if index + 1 < len(widths):
                layers.insert(0, Upsample(widths[index + 1], width, double_time=config.temporal[index]))
            self.stages.append(OpList(*layers))
        self.project_out = OpList(ChannelRMSNorm(widths[0]), nn.ReLU(), ConvLayer(widths[0], config.in_channels))

    def forward(self, latents_BCTHW: Tensor) -> Tensor:
        """Return pixels, about in [-1,1]."""
        hidden_BCTHW: Tensor = self.project_in(latents_BCTHW)
        for layer in _layers(reversed(self.stages)):
            hidden_BCTHW = layer(hidden_BCTHW)
        out: Tensor = self.project_out(hidden_BCTHW)
        return out


class DCAE(Autoencoder):
    """Video autoencoder of high compression: 4k frames become k latent frames, each 32 times smaller; not causal.

    A single frame is a picture, and a single latent frame becomes one: 4 frames can be encoded, but do not come back.
    State-dict keys are those of the released `F32T4C128_AE.safetensors`. Trainable: every method is differentiable and
    works under autocast. Architecture: https://arxiv.org/abs/2410.10733, and in time as in
    https://arxiv.org/abs/2503.09642, section 3.1.
    """

    config: DCAEConfig

    def __init__(self, config: DCAEConfig) -> None:
        super().__init__()
        self.config = config
        self._scale = 1.0 if config.scaling_factor is None else config.scaling_factor
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    @property
    def last_layer(self) -> nn.Conv3d:
        """The decoder's last convolution."""
        return cast(ConvLayer, self.decoder.project_out.op_list[-1]).conv

    def encode(
        self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None, tiling: Tiling = NO_TILING
    ) -> Tensor:
        """Encode a clip or a picture to scaled latents; `generator` draws nothing. See `Autoencoder.encode`."""
        self.check_pixels(pixels_BCTHW)
        latents_BCTHW = run_tiled(self.encoder, pixels_BCTHW, grid=encoder_grid(self.config), tiling=tiling)
        return latents_BCTHW / self._scale

    def forward(self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None) -> Reconstruction:
        """Encode and decode; `generator` draws nothing. See `Autoencoder.forward`."""
        latents_BCTHW = self.encode(pixels_BCTHW)
        return Reconstruction(self.decode(latents_BCTHW), latents_BCTHW, None)

    def decode_pieces(
        self, latents_BCTHW: Tensor, *, tiling: Tiling = NO_TILING, canvas: torch.device | None = None
    ) -> Iterator[Tensor]:
        """Decode as `decode` does, and yield frames as they are finished; see `Autoencoder.decode_pieces`."""
        self.check_latents(latents_BCTHW)
        place = canvas or latents_BCTHW.device
        return tiled_pieces(
            lambda tile_BCTHW: self.decoder(tile_BCTHW).to(place),
            latents_BCTHW * self._scale,
            grid=decoder_grid(self.config),
            tiling=tiling,
        )


def encoder_grid(config: DCAEConfig) -> TileGrid:
    """Return the cut of pixels into tiles that become latents."""
    overlap, space, time = config.tile_overlap_factor, config.spatial_tile_size, config.temporal_tile_size
    return TileGrid(
        space=TileAxis.from_sizes(space, output_size=space // config.spatial_compression_ratio, overlap=overlap),
        time=TileAxis.from_sizes(time, output_size=time // config.time_compression_ratio, overlap=overlap),
        is_causal=False,
    )


def decoder_grid(config: DCAEConfig) -> TileGrid:
    """Return the cut of latents into tiles that become pixels.

    A last tile of one latent frame would come out as a picture, and its other frames would be lost: it is left to the
    tile before, which has that frame at its end.
    """
    overlap, space, time = config.tile_overlap_factor, config.spatial_tile_size, config.temporal_tile_size
    latent_space, latent_time = space // config.spatial_compression_ratio, time // config.time_compression_ratio
    return TileGrid(
        space=TileAxis.from_sizes(latent_space, output_size=space, overlap=overlap),
        time=TileAxis.from_sizes(latent_time, output_size=time, overlap=overlap, shortest=2),
        is_causal=False,
    )


def _layers(stages: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers of all stages: one by one, since who calls a whole stage keeps its input in memory meanwhile."""
    return chain.from_iterable(cast(OpList, stage).op_list for stage in stages)


def _blocks(kind: StageKind, width: int, depth: int) -> list[nn.Module]:
    """Return the blocks of a stage."""
    if kind is StageKind.RES:
        return [Residual(ConvPair(width)) for _ in range(depth)]
    return [EfficientViTBlock(width) for _ in range(depth)]
