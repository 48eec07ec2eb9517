"""Sizes of the 2D autoencoder."""

from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError

NORM_GROUPS = 32
"""Groups of every group norm of the released weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxAEConfig:
    """Sizes of the autoencoder; the defaults are those of the released `flux1-dev-ae.safetensors`.

    Args:
        in_channels: colour channels that are encoded.
        out_ch: colour channels that are decoded.
        ch: base of the widths, a multiple of 32.
        ch_mult: width of every resolution level over `ch`, finest first. Between two levels height and width are
            halved.
        num_res_blocks: residual blocks of an encoder level; a decoder level has one more.
        z_channels: channels of the latents.
        scale_factor: latents = scale_factor * (posterior - shift_factor).
        shift_factor: see `scale_factor`.
        tile_size: edge of a spatial tile in pixels.
        tile_overlap_factor: share of a tile that overlaps with the next, in [0, 1).

    Raises:
        RequestError: the sizes contradict each other.
    """

    in_channels: int = 3
    out_ch: int = 3
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    scale_factor: float = 0.3611
    shift_factor: float = 0.1159
    tile_size: int = 1024
    tile_overlap_factor: float = 0.25

    def __post_init__(self) -> None:
        # A list is what JSON and YAML give; the configuration must be hashable.
        object.__setattr__(self, "ch_mult", tuple(self.ch_mult))
        if not self.ch_mult or min(self.ch_mult) < 1:
            raise RequestError(f"vae.flux_ae.ch_mult={self.ch_mult} must name a factor, at least 1, for every level")
        if self.ch < 1 or self.ch % NORM_GROUPS:
            raise RequestError(f"vae.flux_ae.ch={self.ch} must be a multiple of {NORM_GROUPS}, the groups of the norms")
        if self.num_res_blocks < 1 or self.z_channels < 1:
            raise RequestError("vae.flux_ae.num_res_blocks and vae.flux_ae.z_channels must be at least 1")
        ratio, overlap = self.spatial_compression_ratio, self.tile_overlap_factor
        latent_size = self.tile_size // ratio
        strides = (int(latent_size * (1 - overlap)) * ratio, int(self.tile_size * (1 - overlap)))
        kept = ((latent_size - int(latent_size * overlap)) * ratio, self.tile_size - int(self.tile_size * overlap))
        if not 0 <= overlap < 1 or strides[0] < 1 or len({*strides, *kept}) > 1:
            raise RequestError(
                f"vae.flux_ae.tile_size={self.tile_size} and vae.flux_ae.tile_overlap_factor={overlap} must give a "
                f"tile and a smaller overlap that are multiples of {ratio}"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every level, finest first."""
        return tuple(self.ch * factor for factor in self.ch_mult)

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self.z_channels

    @property
    def time_compression_ratio(self) -> int:
        """Every frame is encoded by itself."""
        return 1

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent along height and width."""
        return int(2 ** (len(self.ch_mult) - 1))

    @property
    def is_causal(self) -> bool:
        """No frame knows of another."""
        return False

    @property
    def has_posterior(self) -> bool:
        """Pixels are encoded to a normal distribution."""
        return True
