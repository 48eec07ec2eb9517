"""Video deep-compression autoencoder."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from opensora_cli.models.vae.autoencoder import COLORS, Autoencoder, Reconstruction
from opensora_cli.models.vae.config import BlockType, DCAEConfig
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
from opensora_cli.models.vae.tiles import NO_TILING, Tiling


class OpList(nn.Module):
    """Sequence of layers with the key names of the released file."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(layers)

    def forward(self, hidden_BCTHW: Tensor) -> Tensor:
        """Return the output of the last layer."""
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
        """Last convolution of the decoder."""
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

    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Return encoded / scaling_factor."""
        return encoded_BCTHW / self._scale

    def unscale_latents(self, latents_BCTHW: Tensor) -> Tensor:
        """Undo `scale_latents`."""
        return latents_BCTHW * self._scale


def _layers(stages: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers of all stages. Calling a whole stage would keep its input in memory."""
    return chain.from_iterable(cast(OpList, stage).op_list for stage in stages)


def _blocks(kind: BlockType, width: int, depth: int) -> list[nn.Module]:
    """Return the blocks of a stage."""
    if kind == "res":
        return [Residual(ConvPair(width)) for _ in range(depth)]
    return [EfficientViTBlock(width) for _ in range(depth)]
