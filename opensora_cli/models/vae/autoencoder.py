"""What all autoencoders have in common: pixels to scaled latents, and back."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.models.vae.tiling import NO_TILING, TileGrid, Tiling, joined_in_time


class AutoencoderConfig(Protocol):
    """What is known of an autoencoder from its sizes."""

    @property
    def in_channels(self) -> int:
        """Colour channels that are encoded."""

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""

    @property
    def time_compression_ratio(self) -> int:
        """Frames to a latent frame."""

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent along height and width."""

    @property
    def is_causal(self) -> bool:
        """Whether the first latent frame is the first frame alone; see `LatentGrid`."""


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

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents."""
        config = self.config
        return LatentGrid(
            latent_channels=config.latent_channels,
            time_compression_ratio=config.time_compression_ratio,
            spatial_compression_ratio=config.spatial_compression_ratio,
            is_causal=config.is_causal,
        )

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
    def decode_pieces(
        self, latents_BCTHW: Tensor, *, tiling: Tiling = NO_TILING, canvas: torch.device | None = None
    ) -> Iterator[Tensor]:
        """Yield the frames of `decode` as they are finished, by tiles in time; errors come before any work."""

    def decode(
        self, latents_BCTHW: Tensor, *, tiling: Tiling = NO_TILING, canvas: torch.device | None = None
    ) -> Tensor:
        """Decode scaled latents to pixels of the size that `grid` returns; about [-1, 1], not clamped.

        Tiling changes the result. Pixels are gathered on `canvas`; None is the device of the latents. A shape that
        cannot be decoded is a RequestError.
        """
        return joined_in_time(self.decode_pieces(latents_BCTHW, tiling=tiling, canvas=canvas))

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
        shape, channels = tuple(latents_BCTHW.shape), self.config.latent_channels
        if len(shape) != 5 or shape[1] != channels or not latents_BCTHW.numel():
            raise RequestError(
                f"latents of shape {shape} cannot be decoded: expected "
                f"(batch, {channels}, latent frames, latent height, latent width)"
            )


class PosteriorAutoencoder(Autoencoder):
    """An autoencoder whose encoder gives mean and log variance of a normal distribution for every latent value."""

    @abstractmethod
    def encode_moments(self, pixels_BCTHW: Tensor, *, tiling: Tiling = NO_TILING) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the posterior, unscaled, each shaped as the latents; see `encode`."""

    @abstractmethod
    def scale_latents(self, posterior_BCTHW: Tensor) -> Tensor:
        """Bring posterior values to about unit variance."""

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
            sample_BCTHW = mean_BCTHW + torch.exp(0.5 * logvar_BCTHW) * noise_BCTHW.to(mean_BCTHW.device)
        return Reconstruction(self.decode(self.scale_latents(sample_BCTHW)), mean_BCTHW, logvar_BCTHW)


class VideoAutoencoderConfig(AutoencoderConfig, Protocol):
    """What generating asks of the sizes of an autoencoder."""

    @property
    def out_channels(self) -> int:
        """Colour channels that are decoded."""

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels that are encoded, and of latents that are decoded."""


class VideoAutoencoder(Autoencoder):
    """What generating asks of an autoencoder: it decodes long clips within a bounded memory."""

    config: VideoAutoencoderConfig
    encoder: nn.Module
    decoder: nn.Module
    """Runs once for each tile of the latents."""

    @abstractmethod
    def decode_pieces(
        self,
        latents_BCTHW: Tensor,
        *,
        tiling: Tiling = NO_TILING,
        canvas: torch.device | None = None,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
    ) -> Iterator[Tensor]:
        """Yield the frames of `decode` as they are finished, a piece for each tile in time.

        Errors come before any work.

        With `chunk_frames`, each layer computes so many frames at a time, and between two layers they wait on `store`
        (None: where the latents are).
        """


def split_moments(moments_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance, which lie one after the other in the channels."""
    mean_BCTHW, logvar_BCTHW = moments_BCTHW.chunk(2, dim=1)
    # Beyond these limits the variance over- or underflows in half precision.
    return mean_BCTHW, logvar_BCTHW.clamp(-30.0, 20.0)
