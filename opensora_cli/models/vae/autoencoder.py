"""Base classes of the autoencoders: pixels to scaled latents, and back, whole or in overlapping tiles.

A tile starts at every stride, even if the previous tile reached the end. Its beginning is blended linearly with the end
of the blended previous tile, and its part before the start of the next tile is kept, as in the reference
implementation. Group norms span a tile, so that a tiled result differs from the whole one and depends on the tile size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import LatentGrid
from opensora_cli.core.device import queued_copy
from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.config import (
    NO_TILING,
    AutoencoderConfig,
    FluxAEConfig,
    HunyuanVAEConfig,
    TileAxis,
    TileGrid,
    Tiling,
)

COLORS = 3
"""Channels of pixels."""


class Reconstruction(NamedTuple):
    """Reconstructed pixels, and the posterior of their latents."""

    pixels_BCTHW: Tensor
    mean_BCTHW: Tensor
    """Mean of the posterior, or the latents if there is no posterior."""
    logvar_BCTHW: Tensor | None
    """Log variance of the posterior, or None."""


class Autoencoder(nn.Module, ABC):
    """Pixels (B,3,T,H,W) in [-1,1] to scaled latents (B,latent_channels,t,h,w), and back.

    All methods are differentiable and work under autocast.
    """

    config: AutoencoderConfig
    encoder: nn.Module
    decoder: nn.Module
    """Decoder of one tile. It takes the `canvas` of `decode`, and `chunk_frames` and `store` if it has chunks."""
    decodes_in_chunks: ClassVar[bool] = False
    """Whether `decode` takes `chunk_frames`."""
    last_layer_path: ClassVar[str]
    """Path of `last_layer` in the module."""

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents."""
        return self.config.grid

    @property
    def last_layer(self) -> nn.Conv2d | nn.Conv3d:
        """Last convolution of the decoder, where adaptive loss weights are measured. A 2D batch is all frames."""
        return cast(nn.Conv3d, self.get_submodule(self.last_layer_path))

    def forward(self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None) -> Reconstruction:
        """Encode and decode without tiling, for training. `generator` samples the posterior; None takes its mean."""
        latents_BCTHW = self.encode(pixels_BCTHW)
        return Reconstruction(self.decode(latents_BCTHW), latents_BCTHW, None)

    def encode(
        self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None, tiling: Tiling = NO_TILING
    ) -> Tensor:
        """Encode a clip in [-1, 1], or a picture as a clip of one frame, to scaled latents. `grid` gives their size.

        `generator`, on the pixels' device, samples the posterior, if there is one. None takes its mode. Tiling changes
        the result. Raises RequestError if the shape cannot be encoded.
        """
        return self.scale_latents(self.encode_tiles(pixels_BCTHW, tiling=tiling))

    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return the encoder's output for a tile: latents, or the means and then the log variances of a posterior."""
        encoded_BCTHW: Tensor = self.encoder(pixels_BCTHW)
        return encoded_BCTHW

    def decode_tile(self, latents_BCTHW: Tensor, options: Mapping[str, object]) -> Tensor:
        """Return the pixels of a tile of unscaled latents; `options` are those of the decoder."""
        pixels_BCTHW: Tensor = self.decoder(latents_BCTHW, **options)
        return pixels_BCTHW

    @abstractmethod
    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Scale encoded values to about unit variance."""

    @abstractmethod
    def unscale_latents(self, latents_BCTHW: Tensor) -> Tensor:
        """Undo `scale_latents`."""

    def decode_pieces(
        self,
        latents_BCTHW: Tensor,
        *,
        tiling: Tiling = NO_TILING,
        canvas: torch.device | None = None,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
    ) -> Iterator[Tensor]:
        """Yield the result of `decode` in pieces, one for each temporal tile. Errors precede any computation."""
        self.check_latents(latents_BCTHW)
        options: dict[str, object] = {"canvas": canvas}
        if chunk_frames is not None:
            if not self.decodes_in_chunks:
                raise RequestError(f"{type(self).__name__} decodes all frames of a tile at once: drop chunk_frames")
            options |= {"chunk_frames": chunk_frames, "store": store}
        return tiled_pieces(
            partial(self.decode_tile, options=options),
            self.unscale_latents(latents_BCTHW),
            grid=self.config.tile_grids()[1],
            tiling=tiling,
        )

    def decode(
        self,
        latents_BCTHW: Tensor,
        *,
        tiling: Tiling = NO_TILING,
        canvas: torch.device | None = None,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
    ) -> Tensor:
        """Decode scaled latents to pixels of the size that `grid` returns, in about [-1, 1] and not clamped.

        Raises RequestError if the shape cannot be decoded, or the autoencoder does not decode in chunks.

        Args:
            tiling: axes that are cut. Tiling changes the result.
            canvas: device of the joined pixels. None means the device of the latents.
            chunk_frames: frames that each layer computes at a time, without gradients. None means all. Results match
                up to rounding.
            store: device of frames between two layers with `chunk_frames`. None means the device of the latents.
        """
        return joined_in_time(
            self.decode_pieces(latents_BCTHW, tiling=tiling, canvas=canvas, chunk_frames=chunk_frames, store=store)
        )

    def encode_tiles(self, pixels_BCTHW: Tensor, *, tiling: Tiling) -> Tensor:
        """Return the joined results of `encode_tile`, unscaled. Raises RequestError as `encode` does."""
        self.check_pixels(pixels_BCTHW)
        return run_tiled(self.encode_tile, pixels_BCTHW, grid=self.config.tile_grids()[0], tiling=tiling)

    def check_pixels(self, pixels_BCTHW: Tensor) -> None:
        """Raise RequestError if the shape of a clip cannot be encoded."""
        shape, channels = tuple(pixels_BCTHW.shape), COLORS
        if len(shape) != 5 or shape[1] != channels or not pixels_BCTHW.numel():
            raise RequestError(
                f"pixels of shape {shape} cannot be encoded: expected (batch, {channels}, frames, height, width)"
            )
        self.grid.latent_frames(shape[2])
        self.grid.latent_size(shape[3], shape[4])

    def check_latents(self, latents_BCTHW: Tensor) -> None:
        """Raise RequestError if the shape of latents cannot be decoded."""
        shape, channels = tuple(latents_BCTHW.shape), self.grid.latent_channels
        if len(shape) != 5 or shape[1] != channels or not latents_BCTHW.numel():
            raise RequestError(
                f"latents of shape {shape} cannot be decoded: expected "
                f"(batch, {channels}, latent frames, latent height, latent width)"
            )


class PosteriorAutoencoder(Autoencoder):
    """Autoencoder whose encoder returns the mean and log variance of a normal distribution for every latent value."""

    config: HunyuanVAEConfig | FluxAEConfig

    def encode_moments(self, pixels_BCTHW: Tensor, *, tiling: Tiling = NO_TILING) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the posterior, unscaled, each of the shape of the latents."""
        mean_BCTHW, logvar_BCTHW = self.encode_tiles(pixels_BCTHW, tiling=tiling).chunk(2, dim=1)
        # Beyond these limits the variance over- or underflows in half precision.
        return mean_BCTHW, logvar_BCTHW.clamp(-30.0, 20.0)

    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Return scale_factor * (posterior - shift_factor)."""
        return self.config.scale_factor * (encoded_BCTHW - self.config.shift_factor)

    def unscale_latents(self, latents_BCTHW: Tensor) -> Tensor:
        return latents_BCTHW / self.config.scale_factor + self.config.shift_factor

    def encode(
        self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None, tiling: Tiling = NO_TILING
    ) -> Tensor:
        mean_BCTHW, logvar_BCTHW = self.encode_moments(pixels_BCTHW, tiling=tiling)
        if generator is None:
            return self.scale_latents(mean_BCTHW)
        noise_BCTHW = torch.randn(
            mean_BCTHW.shape, generator=generator, device=mean_BCTHW.device, dtype=mean_BCTHW.dtype
        )
        return self.scale_latents(mean_BCTHW + torch.exp(0.5 * logvar_BCTHW) * noise_BCTHW)

    def forward(self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None) -> Reconstruction:
        # In fp32 under autocast too: the exponential of a rounded log variance is far off.
        mean_BCTHW, logvar_BCTHW = (moment.float() for moment in self.encode_moments(pixels_BCTHW))
        sample_BCTHW = mean_BCTHW
        if generator is not None:
            noise_BCTHW = torch.randn(mean_BCTHW.shape, generator=generator, device=generator.device)
            sample_BCTHW = mean_BCTHW + torch.exp(0.5 * logvar_BCTHW) * queued_copy(noise_BCTHW, mean_BCTHW.device)
        return Reconstruction(self.decode(self.scale_latents(sample_BCTHW)), mean_BCTHW, logvar_BCTHW)


def run_tiled(run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor, *, grid: TileGrid, tiling: Tiling) -> Tensor:
    """Return `run(clip_BCTHW)`, computed tile by tile; `grid` cuts the axes in `tiling` that are longer than a tile."""
    return joined_in_time(tiled_pieces(run, clip_BCTHW, grid=grid, tiling=tiling))


def tiled_pieces(
    run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor, *, grid: TileGrid, tiling: Tiling
) -> Iterator[Tensor]:
    """Yield the result of `run_tiled` in pieces along time, one for each temporal tile."""

    def run_in_space(part_BCTHW: Tensor) -> Tensor:
        if tiling.spatial and max(part_BCTHW.shape[3:]) > grid.space.size:
            return _run_spatial_tiles(run, part_BCTHW, grid.space)
        return run(part_BCTHW)

    if tiling.temporal and clip_BCTHW.shape[2] > grid.time.size:
        yield from _run_temporal_tiles(run_in_space, clip_BCTHW, grid.time, extra=int(grid.is_causal))
    else:
        yield run_in_space(clip_BCTHW)


def joined_in_time(pieces: Iterable[Tensor]) -> Tensor:
    """Return the pieces of a clip as one. A single piece is not copied."""
    first, *others = pieces
    return torch.cat((first, *others), dim=2) if others else first


def _run_spatial_tiles(run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor, axis: TileAxis) -> Tensor:
    rows_kept: list[Tensor] = []
    above: list[Tensor] = []
    for top in range(0, clip_BCTHW.shape[3], axis.stride):
        row: list[Tensor] = []
        for left in range(0, clip_BCTHW.shape[4], axis.stride):
            tile_BCTHW = run(clip_BCTHW[..., top : top + axis.size, left : left + axis.size])
            if above:
                tile_BCTHW = blend(above[len(row)], tile_BCTHW, length=axis.blend, dim=3)
            if row:
                tile_BCTHW = blend(row[-1], tile_BCTHW, length=axis.blend, dim=4)
            row.append(tile_BCTHW)
        rows_kept.append(torch.cat([tile[..., : axis.kept, : axis.kept] for tile in row], dim=4))
        above = row
    return torch.cat(rows_kept, dim=3)


def _run_temporal_tiles(
    run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor, axis: TileAxis, *, extra: int
) -> Iterator[Tensor]:
    # A causal tile has one extra frame, so that it is a causal clip. The previous tile has the output of that frame,
    # too, so a last tile of one frame would add nothing.
    starts = axis.starts_in_time(clip_BCTHW.shape[2] - extra)
    before: Tensor | None = None
    for start in starts:
        tile_BCTHW = run(clip_BCTHW[:, :, start : start + axis.size + extra])
        kept = axis.kept + extra
        if before is not None:
            tile_BCTHW = blend(before, tile_BCTHW[:, :, extra:], length=axis.blend, dim=2)
            kept = axis.kept
        yield tile_BCTHW if start == starts[-1] else tile_BCTHW[:, :, :kept]
        before = tile_BCTHW


def blend(before: Tensor, after: Tensor, *, length: int, dim: int) -> Tensor:
    """Fade from the end of `before` into the start of `after` along `dim`: position i of `length` weighs i / length."""
    length = min(length, before.shape[dim], after.shape[dim])
    if length == 0:
        return after
    ramp = torch.arange(length, device=after.device, dtype=torch.float32) / length
    weight = ramp.to(after.dtype).view([-1 if axis == dim else 1 for axis in range(after.dim())])
    end_of_before = before.narrow(dim, before.shape[dim] - length, length)
    start_of_after = after.narrow(dim, 0, length)
    rest = after.narrow(dim, length, after.shape[dim] - length)
    return torch.cat((end_of_before * (1 - weight) + start_of_after * weight, rest), dim=dim)
