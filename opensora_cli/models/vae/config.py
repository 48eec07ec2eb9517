"""Sizes of the Hunyuan causal video autoencoder."""

from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
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
        # A list is what JSON and YAML give; the configuration must be hashable.
        object.__setattr__(self, "block_out_channels", tuple(self.block_out_channels))
        self._check_levels()
        self._check_tiles("sample_size", "spatial_compression_ratio")
        self._check_tiles("sample_tsize", "time_compression_ratio")

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

    def _check_tiles(self, size_name: str, ratio_name: str) -> None:
        """Refuse tiles that would be cut and put together at different places."""
        size, ratio, overlap = getattr(self, size_name), getattr(self, ratio_name), self.tile_overlap_factor
        latent_size = size // ratio
        strides = (int(latent_size * (1 - overlap)) * ratio, int(size * (1 - overlap)))
        kept = ((latent_size - int(latent_size * overlap)) * ratio, size - int(size * overlap))
        if strides[0] < 1 or len({*strides, *kept}) > 1:
            raise RequestError(
                f"vae.{size_name}={size} and vae.tile_overlap_factor={overlap} must give a tile and a smaller overlap "
                f"that are multiples of vae.{ratio_name}={ratio}"
            )

    @property
    def is_causal(self) -> bool:
        """The first latent frame is the first frame alone."""
        return True

    @property
    def has_posterior(self) -> bool:
        """Pixels are encoded to a normal distribution."""
        return True

    @property
    def latent_sample_size(self) -> int:
        """Edge of a spatial tile in latents."""
        return self.sample_size // self.spatial_compression_ratio

    @property
    def latent_sample_tsize(self) -> int:
        """Length of a temporal tile in latent frames, not counting the first, causal one."""
        return self.sample_tsize // self.time_compression_ratio

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
