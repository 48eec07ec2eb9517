"""What all autoencoders have in common: pixels to scaled latents, and back."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.transfers import queued_copy
from opensora_cli.models.vae.tiling import NO_TILING, TileGrid, Tiling, joined_in_time, run_tiled, tiled_pieces


class AutoencoderConfig(Protocol):
    """What is known of an autoencoder from its sizes."""

    @property
    def in_channels(self) -> int:
        """Colour channels that are encoded."""

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents."""

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels that are encoded, and of latents that are decoded."""


class Reconstruction(NamedTuple):
    """Reconstructed pixels, and the posterior of the latents that they were decoded from."""

    pixels_BCTHW: Tensor
    mean_BCTHW: Tensor
    """Of the posterior; where there is none, the latents."""
    logvar_BCTHW: Tensor | None
    """Log variance of the posterior; None where there is none."""


class Autoencoder(nn.Module, ABC):
    """Pixels (B,in_channels,T,H,W) in [-1,1] to scaled latents (B,latent_channels,t,h,w), and back.

    All methods are differentiable and work under autocast.
    """

    config: AutoencoderConfig
    encoder: nn.Module
    decoder: nn.Module
    """Runs once for each tile of the latents, with the `canvas` of `decode`."""
    decodes_in_chunks: ClassVar[bool] = False
    """Whether `decode` takes `chunk_frames`."""

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents."""
        return self.config.grid

    @property
    @abstractmethod
    def last_layer(self) -> nn.Conv2d | nn.Conv3d:
        """The decoder's last convolution, where adaptive loss weights are measured; if 2D, its batch is all frames."""

    @abstractmethod
    def forward(self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None) -> Reconstruction:
        """Encode and decode, for training: no tiling, and one call that wrappers of modules can watch.

        `generator`, on its own device, samples the posterior; None takes its mean.
        """

    @abstractmethod
    def encode(
        self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None, tiling: Tiling = NO_TILING
    ) -> Tensor:
        """Encode a clip in [-1, 1], or a picture as a clip of one frame, to scaled latents; `grid` gives their size.

        `generator`, on the pixels' device, samples the posterior, where there is one; None takes its mode. Tiling
        changes the result. A shape that cannot be encoded is a RequestError.
        """

    @abstractmethod
    def encode_tile(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return what the encoder makes of a clip that is not cut any more: its latents, (B,C,T,H,W).

        Where latents have a posterior, C counts its means and its log-variances: twice the latents' channels.
        """

    @abstractmethod
    def decode_tile(self, latents_BCTHW: Tensor, *, canvas: torch.device | None = None) -> Tensor:
        """Return the pixels of unscaled latents that are not cut any more; see `decode`."""

    @abstractmethod
    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Bring encoded values to about unit variance."""

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
        """Yield the frames of `decode`, with its arguments, as they are finished, by tiles in time; errors come before
        any work.
        """
        self.check_latents(latents_BCTHW)
        if chunk_frames is not None:
            raise RequestError(f"{type(self).__name__} decodes all frames of a tile at once: drop chunk_frames")
        return tiled_pieces(
            partial(self.decode_tile, canvas=canvas),
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
        """Decode scaled latents to pixels of the size that `grid` returns; about [-1, 1], not clamped.

        Tiling changes the result. A shape that cannot be decoded is a RequestError.

        Args:
            tiling: which axes are cut.
            canvas: where pixels are gathered, so that the device of the latents, which is the default, only holds those
                of one tile, or with `chunk_frames` those of one chunk.
            chunk_frames: frames that each layer computes at a time, at whatever resolution it works; None is all. The
                result is the same but for rounding, and no gradient is recorded. Under 1 is a RequestError, and so is
                any number without `decodes_in_chunks`.
            store: where, with `chunk_frames`, the frames wait between two layers; None is the device of the latents.
        """
        return joined_in_time(
            self.decode_pieces(latents_BCTHW, tiling=tiling, canvas=canvas, chunk_frames=chunk_frames, store=store)
        )

    def encode_tiles(self, pixels_BCTHW: Tensor, *, tiling: Tiling) -> Tensor:
        """Return the joined results of `encode_tile`, unscaled; a shape that cannot be encoded is a RequestError."""
        self.check_pixels(pixels_BCTHW)
        return run_tiled(self.encode_tile, pixels_BCTHW, grid=self.config.tile_grids()[0], tiling=tiling)

    def check_pixels(self, pixels_BCTHW: Tensor) -> None:
        """Raise a RequestError if the clip has a shape that cannot be encoded."""
        shape, channels = tuple(pixels_BCTHW.shape), self.config.in_channels
        if len(shape) != 5 or shape[1] != channels or not pixels_BCTHW.numel():
            raise RequestError(
                f"pixels of shape {shape} cannot be encoded: expected (batch, {channels}, frames, height, width)"
            )
        self.grid.latent_frames(shape[2])
        self.grid.latent_size(shape[3], shape[4])

    def check_latents(self, latents_BCTHW: Tensor) -> None:
        """Raise a RequestError if the latents have a shape that cannot be decoded."""
        shape, channels = tuple(latents_BCTHW.shape), self.grid.latent_channels
        if len(shape) != 5 or shape[1] != channels or not latents_BCTHW.numel():
            raise RequestError(
                f"latents of shape {shape} cannot be decoded: expected "
                f"(batch, {channels}, latent frames, latent height, latent width)"
            )


class PosteriorConfig(AutoencoderConfig, Protocol):
    """Sizes and the scaling of a posterior."""

    @property
    def scale_factor(self) -> float:
        """Latents = scale_factor * (posterior - shift_factor)."""

    @property
    def shift_factor(self) -> float:
        """See `scale_factor`."""


class PosteriorAutoencoder(Autoencoder):
    """An autoencoder whose encoder gives mean and log variance of a normal distribution for every latent value.

    The two lie one after the other in the channels that `encode_tile` returns.
    """

    config: PosteriorConfig

    def encode_moments(self, pixels_BCTHW: Tensor, *, tiling: Tiling = NO_TILING) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the posterior, unscaled, each shaped as the latents; see `encode`."""
        mean_BCTHW, logvar_BCTHW = self.encode_tiles(pixels_BCTHW, tiling=tiling).chunk(2, dim=1)
        # Beyond these limits the variance over- or underflows in half precision.
        return mean_BCTHW, logvar_BCTHW.clamp(-30.0, 20.0)

    def scale_latents(self, encoded_BCTHW: Tensor) -> Tensor:
        """Return scale_factor * (posterior - shift_factor)."""
        return self.config.scale_factor * (encoded_BCTHW - self.config.shift_factor)

    def unscale_latents(self, latents_BCTHW: Tensor) -> Tensor:
        """Undo `scale_latents`."""
        return latents_BCTHW / self.config.scale_factor + self.config.shift_factor

    def encode(
        self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None, tiling: Tiling = NO_TILING
    ) -> Tensor:
        """Encode a clip, or a picture as a clip of one frame, to scaled latents; see `Autoencoder.encode`."""
        mean_BCTHW, logvar_BCTHW = self.encode_moments(pixels_BCTHW, tiling=tiling)
        if generator is None:
            return self.scale_latents(mean_BCTHW)
        noise_BCTHW = torch.randn(
            mean_BCTHW.shape, generator=generator, device=mean_BCTHW.device, dtype=mean_BCTHW.dtype
        )
        return self.scale_latents(mean_BCTHW + torch.exp(0.5 * logvar_BCTHW) * noise_BCTHW)

    def forward(self, pixels_BCTHW: Tensor, *, generator: torch.Generator | None = None) -> Reconstruction:
        """Encode, sample and decode; see `Autoencoder.forward`."""
        # In fp32 under autocast too: the exponential of a rounded log variance is far off.
        mean_BCTHW, logvar_BCTHW = (moment.float() for moment in self.encode_moments(pixels_BCTHW))
        sample_BCTHW = mean_BCTHW
        if generator is not None:
            noise_BCTHW = torch.randn(mean_BCTHW.shape, generator=generator, device=generator.device)
            sample_BCTHW = mean_BCTHW + torch.exp(0.5 * logvar_BCTHW) * queued_copy(noise_BCTHW, mean_BCTHW.device)
        return Reconstruction(self.decode(self.scale_latents(sample_BCTHW)), mean_BCTHW, logvar_BCTHW)
