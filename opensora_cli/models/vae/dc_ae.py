"""The video deep-compression autoencoder."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain, pairwise
from typing import cast

import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.models.vae.autoencoder import Autoencoder, Reconstruction
from opensora_cli.models.vae.dc_ae_blocks import (
    HEAD_DIM,
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
from opensora_cli.models.vae.tiling import NO_TILING, TileGrid, Tiling, check_tiles, tile_axes


class StageKind(StrEnum):
    """What a stage is made of."""

    RES = "res"
    """Residual blocks of convolutions."""
    EFFICIENTVIT = "efficientvit"
    """Linear attention and gated convolutions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DCAEConfig:
    """Sizes of the autoencoder; the defaults are those of the released `F32T4C128_AE.safetensors`.

    The lists have an entry for each stage, finest first. Between two stages space is halved.

    Args:
        latent_channels: divides the last width.
        block_types: what the stages are made of.
        temporal: whether time is halved, too, after a stage.
        spatial_tile_size: edge of a spatial tile in pixels.
        temporal_tile_size: length of a temporal tile in frames.
        tile_overlap_factor: share of a tile that overlaps with the next, in [0, 1); over 0 by at least a latent frame.
        scaling_factor: latents = encoded / scaling_factor; None: latents are what is encoded.

    Raises:
        RequestError: the sizes contradict each other.
    """

    in_channels: int = 3
    latent_channels: int = 128
    block_types: tuple[StageKind, ...] = (StageKind.RES,) * 3 + (StageKind.EFFICIENTVIT,) * 3
    width_list: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    encoder_depth_list: tuple[int, ...] = (2, 2, 2, 3, 3, 3)
    decoder_depth_list: tuple[int, ...] = (3, 3, 3, 3, 3, 3)
    temporal: tuple[bool, ...] = (False, False, False, True, True, False)
    spatial_tile_size: int = 256
    temporal_tile_size: int = 32
    tile_overlap_factor: float = 0.25
    scaling_factor: float | None = None

    def __post_init__(self) -> None:
        # Lists are what JSON and YAML give; the configuration must be hashable.
        for name in ("width_list", "encoder_depth_list", "decoder_depth_list", "temporal"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "block_types", tuple(map(StageKind, self.block_types)))
        self._check_stages()
        self._check_widths()
        overlap, space, time = (
            self.tile_overlap_factor,
            self.grid.spatial_compression_ratio,
            self.grid.time_compression_ratio,
        )
        check_tiles("vae.dc_ae", "spatial_tile_size", self.spatial_tile_size, ratio=space, overlap=overlap)
        # A last tile of one latent frame is left to the tile before, which must have that frame.
        size = self.temporal_tile_size
        check_tiles("vae.dc_ae", "temporal_tile_size", size, ratio=time, overlap=overlap, shortest_overlap=1)
        if self.scaling_factor is not None and self.scaling_factor <= 0:
            raise RequestError(f"vae.dc_ae.scaling_factor={self.scaling_factor} must be over 0")

    def _check_stages(self) -> None:
        lists = ("block_types", "width_list", "encoder_depth_list", "decoder_depth_list", "temporal")
        lengths = {name: len(getattr(self, name)) for name in lists}
        if not self.width_list or len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise RequestError(f"the lists of vae.dc_ae must all have an entry for each stage, and have: {found}")
        if min(self.encoder_depth_list + self.decoder_depth_list) < 1:
            raise RequestError("every number in vae.dc_ae.encoder_depth_list and decoder_depth_list must be at least 1")
        if self.temporal[-1]:
            raise RequestError("vae.dc_ae.temporal must end with false: nothing is halved after the last stage")

    def _check_widths(self) -> None:
        """Refuse widths that the shortcuts, which average or repeat channels, cannot join."""
        widths = self.width_list
        for kind, width in zip(self.block_types, widths, strict=True):
            if width < 1 or (kind is StageKind.EFFICIENTVIT and width % HEAD_DIM):
                raise RequestError(
                    f"vae.dc_ae.width_list={widths} must be over 0, and multiples of {HEAD_DIM} in efficientvit stages"
                )
        for finer, coarser in pairwise(widths):
            # Four positions become one; eight where time is halved.
            if 4 * finer % coarser:
                raise RequestError(
                    f"vae.dc_ae.width_list={widths}: {coarser} must divide 4 times the width before it, {finer}"
                )
        if self.latent_channels < 1 or widths[-1] % self.latent_channels:
            raise RequestError(
                f"vae.dc_ae.latent_channels={self.latent_channels} must divide the last of "
                f"vae.dc_ae.width_list={widths}"
            )

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents; a single frame is a picture."""
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=2 ** sum(self.temporal),
            spatial_compression_ratio=2 ** (len(self.width_list) - 1),
            is_causal=False,
        )

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels that are encoded, and of latents that are decoded.

        A last tile of one latent frame would come out as a picture, and its other frames would be lost: it is left to
        the tile before, which has that frame at its end.
        """
        overlap = self.tile_overlap_factor
        space = tile_axes(self.spatial_tile_size, ratio=self.grid.spatial_compression_ratio, overlap=overlap)
        time = tile_axes(self.temporal_tile_size, ratio=self.grid.time_compression_ratio, overlap=overlap, shortest=2)
        return TileGrid(space[0], time[0], is_causal=False), TileGrid(space[1], time[1], is_causal=False)


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

    def forward(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return pixels, about in [-1,1]; see `Autoencoder.decode`."""
        hidden_BCTHW: Tensor = self.project_in(latents_BCTHW)
        for layer in _layers(reversed(self.stages)):
            hidden_BCTHW = layer(hidden_BCTHW)
        out: Tensor = self.project_out(hidden_BCTHW)
        return out.to(canvas or latents_BCTHW.device)


class DCAE(Autoencoder):
    """Video autoencoder of high compression: 4k frames become k latent frames, each 32 times smaller; not causal.

    A single frame is a picture, and a single latent frame becomes one: 4 frames can be encoded, but do not come back.
    State-dict keys are those of the released `F32T4C128_AE.safetensors`. Trainable: every method is differentiable and
    works under autocast. Architecture: https://arxiv.org/abs/2410.10733, and in time as in
    https://arxiv.org/abs/2503.09642, section 3.1.
    """

    config: DCAEConfig

    encoder: Encoder
    decoder: Decoder

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
        """Encode a clip or a picture to scaled latents; `generator` is ignored. See `Autoencoder.encode`."""
        return self.scale_latents(self.encode_tiles(pixels_BCTHW, tiling=tiling))

    def forward(self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None) -> Reconstruction:
        """Encode and decode; `generator` is ignored. See `Autoencoder.forward`."""
        latents_BCTHW = self.encode(pixels_BCTHW)
        return Reconstruction(self.decode(latents_BCTHW), latents_BCTHW, None)

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the unscaled latents of a clip that is not cut any more."""
        encoded_BCTHW: Tensor = self.encoder(pixels_BCTHW)
        return encoded_BCTHW

    def decode_tile(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return the pixels of unscaled latents that are not cut any more; see `Autoencoder.decode`."""
        pixels_BCTHW: Tensor = self.decoder(latents_BCTHW, canvas=canvas)
        return pixels_BCTHW

    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Return encoded / scaling_factor."""
        return encoded_BCTHW / self._scale

    def unscale_latents(self, latents_BCTHW: Tensor) -> Tensor:
        """Undo `scale_latents`."""
        return latents_BCTHW * self._scale


def _layers(stages: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers of all stages: one by one, because a call of a whole stage would keep its input in memory."""
    return chain.from_iterable(cast(OpList, stage).op_list for stage in stages)


def _blocks(kind: StageKind, width: int, depth: int) -> list[nn.Module]:
    """Return the blocks of a stage."""
    if kind is StageKind.RES:
        return [Residual(ConvPair(width)) for _ in range(depth)]
    return [EfficientViTBlock(width) for _ in range(depth)]
