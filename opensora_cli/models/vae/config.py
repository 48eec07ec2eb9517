"""Sizes of the Hunyuan causal video autoencoder."""

from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, slots=True)
class HunyuanVAEConfig:
    """Sizes of the autoencoder; the defaults are those of the released `hunyuan_vae.safetensors`.

    Args:
        in_channels: colour channels that are encoded.
        out_channels: colour channels that are decoded.
        latent_channels: channels of the latents.
        block_out_channels: width of every resolution level, finest first.
        layers_per_block: residual blocks of an encoder level; a decoder level has one more.
        norm_num_groups: groups of every group norm; must divide every width.
        sample_size: edge of a spatial tile in pixels.
        sample_tsize: length of a temporal tile in frames, not counting the first, causal one.
        tile_overlap_factor: share of a tile that overlaps with the next, in [0, 1).
        scale_factor: latents = scale_factor * (posterior - shift_factor).
        shift_factor: see `scale_factor`.
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
        # A list is what JSON gives; the instance must be hashable.
        object.__setattr__(self, "block_out_channels", tuple(self.block_out_channels))
        levels = len(self.block_out_channels)
        if levels == 0:
            raise RequestError("vae.block_out_channels is empty: name the width of at least one level")
        for name in ("time_compression_ratio", "spatial_compression_ratio"):
            ratio = getattr(self, name)
            if ratio < 1 or ratio & (ratio - 1):
                raise RequestError(f"vae.{name}={ratio} must be a power of two")
        for width in self.block_out_channels:
            if self.norm_num_groups < 1 or width % self.norm_num_groups:
                raise RequestError(
                    f"vae.norm_num_groups={self.norm_num_groups} must divide every width in "
                    f"vae.block_out_channels={self.block_out_channels}"
                )
        # Time is never halved after the last level; space may be.
        if self.time_compression_ratio > 2 ** (levels - 1):
            raise RequestError(
                f"vae.time_compression_ratio={self.time_compression_ratio} needs more than the {levels} levels of "
                f"vae.block_out_channels: with {levels} it is at most {2 ** (levels - 1)}"
            )
        if self.spatial_compression_ratio > 2**levels:
            raise RequestError(
                f"vae.spatial_compression_ratio={self.spatial_compression_ratio} needs more than the {levels} levels "
                f"of vae.block_out_channels: with {levels} it is at most {2**levels}"
            )
        for name, ratio in (
            ("sample_size", self.spatial_compression_ratio),
            ("sample_tsize", self.time_compression_ratio),
        ):
            if getattr(self, name) < ratio or getattr(self, name) % ratio:
                raise RequestError(f"vae.{name}={getattr(self, name)} must be a positive multiple of {ratio}")
        if not 0.0 <= self.tile_overlap_factor < 1.0:
            raise RequestError(f"vae.tile_overlap_factor={self.tile_overlap_factor} must be in [0, 1)")

    @property
    def level_factors(self) -> tuple[tuple[int, int], ...]:
        """(time, space) factor between every level and the next, in the order of the blocks, in encoder and decoder.

        Encoder and decoder share the order: the decoder is not the encoder's mirror image in this respect.
        """
        levels = len(self.block_out_channels)
        num_time = self.time_compression_ratio.bit_length() - 1
        num_space = self.spatial_compression_ratio.bit_length() - 1
        return tuple(
            (2 if levels - 1 - num_time <= level < levels - 1 else 1, 2 if level < num_space else 1)
            for level in range(levels)
        )
