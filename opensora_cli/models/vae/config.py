"""Sizes of the autoencoders, and the cuts of clips into overlapping tiles."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from pydantic import Field

from opensora_cli.core.conditions import LatentGrid
from opensora_cli.core.section import MAX_FRAMES, MAX_SIDE, Section

HEAD_DIM = 32
"""Width of an attention head of the DC-AE."""
FLUX_NORM_GROUPS = 32
_MAX_STAGES = 16
"""Largest number of widths. Each stage halves the resolution."""

_Channels = Annotated[int, Field(ge=1, le=8192)]
_Depth = Annotated[int, Field(ge=1, le=32)]
"""Blocks at one width."""
_Scale = Annotated[float, Field(ge=1e-6, le=10**6)]
_Shift = Annotated[float, Field(ge=-(10**6), le=10**6)]
_Ratio = Annotated[int, Field(ge=1, le=1024)]
_TileSide = Annotated[int, Field(ge=1, le=MAX_SIDE)]
_TileLength = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
_Overlap = Annotated[float, Field(ge=0, lt=1)]
_OVERLAP = "Overlap of neighboring tiles, relative to a tile."


@dataclass(frozen=True, slots=True)
class Tiling:
    """Axes that are cut into tiles: height and width if one of them is larger than a tile, time if it is longer."""

    spatial: bool = False
    temporal: bool = False


NO_TILING = Tiling()


@dataclass(frozen=True, slots=True)
class TileAxis:
    """Cut of an axis in positions of the input, and its blending in positions of the output."""

    size: int
    stride: int
    """Input positions from one tile's start to the next."""
    blend: int
    """Output positions at the beginning of a tile that are blended with the previous tile."""
    kept: int
    """Output positions that are kept of each tile except the last."""
    shortest: int = 1
    """Input positions of the shortest last tile in time. The previous tile has those of a shorter one."""

    def starts_in_time(self, num_frames: int) -> range:
        """Return the first position of each temporal tile."""
        starts = range(0, num_frames, self.stride)
        return starts[:-1] if num_frames - starts[-1] < self.shortest else starts


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Cut of space and time for encoding or decoding. Tiles of causal models have one more frame."""

    space: TileAxis
    time: TileAxis
    is_causal: bool = True

    def count(self, size: tuple[int, int, int], tiling: Tiling) -> int:
        """Return the number of tiles of a clip of these frames, height and width."""
        frames, *sides = size
        tiles = 1
        if tiling.spatial and max(sides) > self.space.size:
            tiles *= prod(len(range(0, side, self.space.stride)) for side in sides)
        if tiling.temporal and frames > self.time.size:
            tiles *= len(self.time.starts_in_time(frames - self.is_causal))
        return tiles


def tile_axes(size: int, *, ratio: int, overlap: float, shortest: int = 1) -> tuple[TileAxis, TileAxis]:
    """Return the cuts of pixels or frames into tiles of `size`, and of their latents, each of `ratio` positions.

    `overlap` is the share of a tile that overlaps with the next. The last tile has at least `shortest` latents.
    """

    def axis(size: int, output_size: int, shortest: int) -> TileAxis:
        blend = int(output_size * overlap)
        return TileAxis(
            size, stride=int(size * (1 - overlap)), blend=blend, kept=output_size - blend, shortest=shortest
        )

    return axis(size, size // ratio, 1), axis(size // ratio, size, shortest)


def tile_problem(
    section: str, name: str, size: int, *, ratio: int, overlap: float, ratio_name: str = "", shortest_overlap: int = 0
) -> str | None:
    """Return the error if tiles of pixels or frames and of their latents are not cut and joined at the same places.

    Two tiles must share at least `shortest_overlap` latents. `section` and the names are those of the settings.
    """
    encoded, decoded = tile_axes(size, ratio=ratio, overlap=overlap)
    places = {encoded.stride, decoded.stride * ratio, encoded.kept * ratio, decoded.kept}
    if decoded.stride >= 1 and len(places) == 1 and encoded.blend >= shortest_overlap:
        return None
    of_ratio = f"{section}.{ratio_name}={ratio}" if ratio_name else ratio
    least = f", the overlap at least {shortest_overlap * ratio}" if shortest_overlap else ""
    return (
        f"{section}.{name}={size} and {section}.tile_overlap_factor={overlap} must give a tile and a smaller overlap "
        f"that are multiples of {of_ratio}{least}"
    )


_ONE_FRAME = TileAxis(size=1, stride=1, blend=0, kept=1)


class HunyuanSizes(Section):
    """Fields of `HunyuanVAEConfig`."""

    latent_channels: _Channels = Field(default=16, description="Channels of the latents.")
    block_out_channels: tuple[_Channels, ...] = Field(
        default=(128, 256, 512, 512), min_length=1, max_length=_MAX_STAGES, description="Widths, from the pixels."
    )
    layers_per_block: _Depth = Field(default=2, description="Residual blocks at each width. The decoder has one more.")
    norm_num_groups: _Channels = Field(default=32, description="Groups of the group norms. They divide every width.")
    sample_size: _TileSide = Field(default=256, description="Side of a spatial tile in pixels.")
    sample_tsize: _TileLength = Field(default=64, description="Length of a temporal tile in frames, after the first.")
    tile_overlap_factor: _Overlap = Field(default=0.25, description=_OVERLAP)
    scale_factor: _Scale = Field(default=0.476986, description="Latents are scale_factor x (sample - shift_factor).")
    shift_factor: _Shift = Field(default=0.0, description="Shift of the latents, see scale_factor.")
    time_compression_ratio: _Ratio = Field(default=4, description="Frames of a latent frame, after the first.")
    spatial_compression_ratio: _Ratio = Field(default=8, description="Pixels of a latent pixel, along each side.")

    def rules(self) -> Iterator[str]:
        widths = self.block_out_channels
        if wrong := [width for width in widths if width % self.norm_num_groups]:
            yield (
                f"vae.norm_num_groups={self.norm_num_groups} must divide every width of vae.block_out_channels, "
                f"and {wrong[0]} is one"
            )
        # The last level never halves time, but may halve space.
        for name, most in (("time_compression_ratio", len(widths) - 1), ("spatial_compression_ratio", len(widths))):
            if (ratio := getattr(self, name)) not in (allowed := [2**power for power in range(most + 1)]):
                yield (
                    f"vae.{name}={ratio} does not fit the {len(widths)} levels of vae.block_out_channels: "
                    f"use {', '.join(map(str, allowed))}"
                )
                return
        for size, name in (("sample_size", "spatial_compression_ratio"), ("sample_tsize", "time_compression_ratio")):
            ratio, overlap = getattr(self, name), self.tile_overlap_factor
            if problem := tile_problem("vae", size, getattr(self, size), ratio=ratio, ratio_name=name, overlap=overlap):
                yield problem


class HunyuanVAEConfig(HunyuanSizes):
    """Sizes of the causal video autoencoder. The defaults describe the released `hunyuan_vae.safetensors`."""

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents. The first latent frame is the first frame alone."""
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=self.time_compression_ratio,
            spatial_compression_ratio=self.spatial_compression_ratio,
            is_causal=True,
        )

    @property
    def pixel_width(self) -> int:
        """Channels of the layers at full resolution."""
        return self.block_out_channels[0]

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels to encode, and of latents to decode."""
        overlap = self.tile_overlap_factor
        space = tile_axes(self.sample_size, ratio=self.spatial_compression_ratio, overlap=overlap)
        time = tile_axes(self.sample_tsize, ratio=self.time_compression_ratio, overlap=overlap)
        return TileGrid(space[0], time[0]), TileGrid(space[1], time[1])

    @property
    def level_factors(self) -> tuple[tuple[int, int], ...]:
        """(time, space) factor between every level and the next, in the order of the blocks of encoder and decoder."""
        levels = len(self.block_out_channels)
        num_time = self.time_compression_ratio.bit_length() - 1
        num_space = self.spatial_compression_ratio.bit_length() - 1
        return tuple(
            (2 if levels - 1 - num_time <= level < levels - 1 else 1, 2 if level < num_space else 1)
            for level in range(levels)
        )


BlockType = Literal["res", "efficientvit"]
"""Residual blocks of convolutions, or linear attention and gated convolutions."""


class DCAEConfig(Section):
    """Sizes of the video DC-AE. The defaults describe the released `F32T4C128_AE.safetensors`.

    Lists have an entry for each stage, from the pixels. Between two stages space is halved.
    """

    latent_channels: _Channels = Field(default=128, description="Channels of the latents. They divide the last width.")
    block_types: tuple[BlockType, ...] = Field(
        default=("res", "res", "res", "efficientvit", "efficientvit", "efficientvit"),
        min_length=1,
        max_length=_MAX_STAGES,
        description="Block type of each stage: res or efficientvit.",
    )
    width_list: tuple[_Channels, ...] = Field(
        default=(128, 256, 512, 512, 1024, 1024), description="Widths. Multiples of 32 in efficientvit stages."
    )
    encoder_depth_list: tuple[_Depth, ...] = Field(default=(2, 2, 2, 3, 3, 3), description="Blocks of encoder stages.")
    decoder_depth_list: tuple[_Depth, ...] = Field(default=(3, 3, 3, 3, 3, 3), description="Blocks of decoder stages.")
    temporal: tuple[bool, ...] = Field(
        default=(False, False, False, True, True, False), description="Stages that halve time."
    )
    spatial_tile_size: _TileSide = Field(default=256, description="Side of a spatial tile in pixels.")
    temporal_tile_size: _TileLength = Field(default=32, description="Length of a temporal tile in frames.")
    tile_overlap_factor: _Overlap = Field(default=0.25, description=_OVERLAP)
    scaling_factor: _Scale | None = Field(
        default=None,
        description="Latents are the encoder's output divided by it. None means 1. The reference trains with 0.493 and "
        "generates with none.",
    )

    def rules(self) -> Iterator[str]:
        stages = len(self.block_types)
        for name in ("width_list", "encoder_depth_list", "decoder_depth_list", "temporal"):
            if (found := len(getattr(self, name))) != stages:
                yield f"vae.dc_ae.{name} has {found} entries and must have {stages}, as vae.dc_ae.block_types has"
                return
        if self.temporal[-1]:
            yield "vae.dc_ae.temporal must end with false: nothing is halved after the last stage"
        widths = self.width_list
        attend = [width for kind, width in zip(self.block_types, widths, strict=True) if kind == "efficientvit"]
        # The shortcuts average or repeat channels: four positions become one, or eight if time is halved.
        unfit = [coarser for finer, coarser in pairwise(widths) if 4 * finer % coarser]
        if unfit or any(width % HEAD_DIM for width in attend) or widths[-1] % self.latent_channels:
            yield (
                f"vae.dc_ae.width_list={','.join(map(str, widths))} must be multiples of {HEAD_DIM} in efficientvit "
                f"stages, each a divisor of 4 times the width before it, and the last a multiple of "
                f"vae.dc_ae.latent_channels={self.latent_channels}"
            )
        tiles = (
            ("spatial_tile_size", self.grid.spatial_compression_ratio, 0),
            # The previous tile has the frame of a last tile of one latent frame.
            ("temporal_tile_size", self.grid.time_compression_ratio, 1),
        )
        for name, ratio, least in tiles:
            overlap, size = self.tile_overlap_factor, getattr(self, name)
            if problem := tile_problem("vae.dc_ae", name, size, ratio=ratio, overlap=overlap, shortest_overlap=least):
                yield problem

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents. A single frame is a picture."""
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=int(2 ** sum(self.temporal)),
            spatial_compression_ratio=int(2 ** (len(self.width_list) - 1)),
            is_causal=False,
        )

    @property
    def pixel_width(self) -> int:
        """Channels of the layers at full resolution."""
        return self.width_list[0]

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels to encode, and of latents to decode.

        A last tile of one latent frame would be decoded to a picture; the previous tile has that frame at its end.
        """
        grid, overlap = self.grid, self.tile_overlap_factor
        space = tile_axes(self.spatial_tile_size, ratio=grid.spatial_compression_ratio, overlap=overlap)
        time = tile_axes(self.temporal_tile_size, ratio=grid.time_compression_ratio, overlap=overlap, shortest=2)
        return TileGrid(space[0], time[0], is_causal=False), TileGrid(space[1], time[1], is_causal=False)


class FluxAEConfig(Section):
    """Sizes of the 2D autoencoder. The defaults describe the released `flux1-dev-ae.safetensors`."""

    z_channels: _Channels = Field(default=16, description="Channels of the latents.")
    ch: _Channels = Field(default=128, multiple_of=FLUX_NORM_GROUPS, description="Base width, a multiple of 32.")
    ch_mult: tuple[_Depth, ...] = Field(
        default=(1, 2, 4, 4),
        min_length=1,
        max_length=_MAX_STAGES,
        description="Widths relative to ch, from the pixels.",
    )
    num_res_blocks: _Depth = Field(default=2, description="Residual blocks at each width. The decoder has one more.")
    scale_factor: _Scale = Field(default=0.3611, description="Latents are scale_factor x (sample - shift_factor).")
    shift_factor: _Shift = Field(default=0.1159, description="Shift of the latents, see scale_factor.")
    tile_size: _TileSide = Field(default=1024, description="Side of a spatial tile in pixels.")
    tile_overlap_factor: _Overlap = Field(default=0.25, description=_OVERLAP)

    def rules(self) -> Iterator[str]:
        ratio, overlap = self.grid.spatial_compression_ratio, self.tile_overlap_factor
        if problem := tile_problem("vae.flux_ae", "tile_size", self.tile_size, ratio=ratio, overlap=overlap):
            yield problem

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents, one frame at a time."""
        return LatentGrid(
            latent_channels=self.z_channels,
            time_compression_ratio=1,
            spatial_compression_ratio=int(2 ** (len(self.ch_mult) - 1)),
            is_causal=False,
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every level, from the pixels."""
        return tuple(self.ch * factor for factor in self.ch_mult)

    @property
    def pixel_width(self) -> int:
        """Channels of the layers at full resolution."""
        return self.widths[0]

    def tile_grids(self) -> tuple[TileGrid, TileGrid]:
        """Return the cuts of pixels to encode, and of latents to decode. Each frame is a temporal tile."""
        axes = tile_axes(self.tile_size, ratio=self.grid.spatial_compression_ratio, overlap=self.tile_overlap_factor)
        encoded, decoded = (TileGrid(axis, _ONE_FRAME, is_causal=False) for axis in axes)
        return encoded, decoded


AutoencoderConfig = HunyuanVAEConfig | DCAEConfig | FluxAEConfig
