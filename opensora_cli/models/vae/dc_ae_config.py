"""Sizes of the video deep-compression autoencoder."""

import itertools
from dataclasses import dataclass
from enum import StrEnum

from opensora_cli.core.exceptions import RequestError

HEAD_DIM = 32
"""Channels of an attention head."""


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
        in_channels: colour channels.
        latent_channels: channels of the latents; divides the last width.
        block_types: what the stages are made of.
        width_list: their widths.
        encoder_depth_list: blocks of the encoder's stages.
        decoder_depth_list: blocks of the decoder's stages.
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
        self._check_tiles("spatial_tile_size", self.spatial_compression_ratio, shortest_overlap=0)
        # A last tile of one latent frame is left to the tile before, which must have that frame.
        self._check_tiles("temporal_tile_size", self.time_compression_ratio, shortest_overlap=1)
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
        for finer, coarser in itertools.pairwise(widths):
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

    def _check_tiles(self, name: str, ratio: int, *, shortest_overlap: int) -> None:
        """Refuse tiles that would be cut and put together at different places."""
        size, overlap = getattr(self, name), self.tile_overlap_factor
        latent_size = size // ratio
        strides = (int(latent_size * (1 - overlap)) * ratio, int(size * (1 - overlap)))
        kept = ((latent_size - int(latent_size * overlap)) * ratio, size - int(size * overlap))
        too_short = int(latent_size * overlap) < shortest_overlap
        if not 0 <= overlap < 1 or strides[0] < 1 or len({*strides, *kept}) > 1 or too_short:
            least = f", the overlap at least {shortest_overlap * ratio}" if shortest_overlap else ""
            raise RequestError(
                f"vae.dc_ae.{name}={size} and vae.dc_ae.tile_overlap_factor={overlap} must give a tile and a smaller "
                f"overlap that are multiples of {ratio}{least}"
            )

    @property
    def time_compression_ratio(self) -> int:
        """Frames to a latent frame."""
        return int(2 ** sum(self.temporal))

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent along height and width."""
        return int(2 ** (len(self.width_list) - 1))

    @property
    def is_causal(self) -> bool:
        """A clip has a multiple of `time_compression_ratio` frames; a single one is a picture."""
        return False

    @property
    def has_posterior(self) -> bool:
        """Pixels are encoded straight to latents."""
        return False
