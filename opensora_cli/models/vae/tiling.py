"""Overlapping tiles with linear blending, as the reference cuts and blends them.

A tile starts at every stride, also where the tile before already reached the end. The beginning of each is blended with
the end of the (already blended) tile before it, and only its part before the next tile's start is kept. Group norms
span a tile, so that tiling is not exact: a tiled result equals one with the same tile sizes, not the un-tiled one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, slots=True)
class Tiling:
    """Which axes are cut: space into tiles of `sample_size` pixels, time into tiles of `sample_tsize` frames.

    Height and width are cut where one of them is larger, time where it is longer. A causal model's tiles in time have
    one frame more.
    """

    spatial: bool = False
    temporal: bool = False


NO_TILING = Tiling()


@dataclass(frozen=True, slots=True)
class TileAxis:
    """How an axis is cut, in positions of the input, and blended, in positions of the output.

    Args:
        size: input positions of a tile.
        stride: input positions from one tile's start to the next.
        blend: output positions at the beginning of a tile that are blended with the tile before.
        kept: output positions that are kept of each tile but the last.
        shortest: input positions of the shortest last tile in time; what a shorter one has is left to the tile before.
    """

    size: int
    stride: int
    blend: int
    kept: int
    shortest: int = 1

    @classmethod
    def from_sizes(cls, size: int, *, output_size: int, overlap: float, shortest: int = 1) -> "TileAxis":
        """Cut tiles of `size` positions, `output_size` of them coming out, that share `overlap` of their length."""
        blend = int(output_size * overlap)
        stride = int(size * (1 - overlap))
        return cls(size=size, stride=stride, blend=blend, kept=output_size - blend, shortest=shortest)


def tile_axes(size: int, *, ratio: int, overlap: float, shortest: int = 1) -> tuple[TileAxis, TileAxis]:
    """Return how pixels or frames are cut into tiles of `size` to encode them, and their latents to decode them.

    A latent stands for `ratio` of them; the last tile has at least `shortest` latents. `overlap` is the share of a tile
    that overlaps with the next.
    """
    latent_size = size // ratio
    return (
        TileAxis.from_sizes(size, output_size=latent_size, overlap=overlap),
        TileAxis.from_sizes(latent_size, output_size=size, overlap=overlap, shortest=shortest),
    )


def check_tiles(
    section: str, name: str, size: int, *, ratio: int, overlap: float, ratio_name: str = "", shortest_overlap: int = 0
) -> None:
    """Raise a RequestError unless tiles of pixels or frames and of their latents are cut and joined at the same places.

    Arguments as in `tile_axes`; two tiles must share at least `shortest_overlap` latents. `section` and the names are
    those of the settings.
    """
    encoded, decoded = tile_axes(size, ratio=ratio, overlap=overlap)
    places = {encoded.stride, decoded.stride * ratio, encoded.kept * ratio, decoded.kept}
    of_ratio = f"{section}.{ratio_name}={ratio}" if ratio_name else ratio
    if not (0 <= overlap < 1 and decoded.stride >= 1 and len(places) == 1 and encoded.blend >= shortest_overlap):
        least = f", the overlap at least {shortest_overlap * ratio}" if shortest_overlap else ""
        raise RequestError(
            f"{section}.{name}={size} and {section}.tile_overlap_factor={overlap} must give a tile and a smaller "
            f"overlap that are multiples of {of_ratio}{least}"
        )


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The cut of space and time of one direction, encoding or decoding; causal models have one more frame in a tile."""

    space: TileAxis
    time: TileAxis
    is_causal: bool = True

    def count(self, size: tuple[int, int, int], tiling: Tiling) -> int:
        """Return how many tiles `run_tiled` makes of a clip of this (frames, height, width)."""
        frames, *sides = size
        tiles = 1
        if tiling.spatial and max(sides) > self.space.size:
            tiles *= prod(len(range(0, side, self.space.stride)) for side in sides)
        if tiling.temporal and frames > self.time.size:
            tiles *= len(_starts_in_time(frames - self.is_causal, self.time))
        return tiles


def run_tiled(run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor, *, grid: TileGrid, tiling: Tiling) -> Tensor:
    """Return `run(clip_BCTHW)`, computed tile by tile along the axes in `tiling` that are longer than a tile.

    `run` is the encoder or decoder of a whole tile, and `grid` the cut that belongs to it. The result has the size that
    `run` would return for the whole clip, on the device of its results.
    """
    return joined_in_time(tiled_pieces(run, clip_BCTHW, grid=grid, tiling=tiling))


def tiled_pieces(
    run: Callable[[Tensor], Tensor], clip_BCTHW: Tensor, *, grid: TileGrid, tiling: Tiling
) -> Iterator[Tensor]:
    """Yield what `run_tiled` returns in pieces along time, one for each tile, as soon as they are finished."""

    def run_in_space(part_BCTHW: Tensor) -> Tensor:
        if tiling.spatial and max(part_BCTHW.shape[3:]) > grid.space.size:
            return _run_spatial_tiles(run, part_BCTHW, grid.space)
        return run(part_BCTHW)

    if tiling.temporal and clip_BCTHW.shape[2] > grid.time.size:
        yield from _run_temporal_tiles(run_in_space, clip_BCTHW, grid.time, extra=int(grid.is_causal))
    else:
        yield run_in_space(clip_BCTHW)


def joined_in_time(pieces: Iterable[Tensor]) -> Tensor:
    """Return the pieces of a clip as one; a single piece is not copied."""
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
    # A causal tile has one extra frame, so that it is a causal clip of its own. What comes out for that frame the tile
    # before has too, except in the first tile: a last tile of one frame would add nothing.
    starts = _starts_in_time(clip_BCTHW.shape[2] - extra, axis)
    before: Tensor | None = None
    for start in starts:
        tile_BCTHW = run(clip_BCTHW[:, :, start : start + axis.size + extra])
        kept = axis.kept + extra
        if before is not None:
            tile_BCTHW = blend(before, tile_BCTHW[:, :, extra:], length=axis.blend, dim=2)
            kept = axis.kept
        yield tile_BCTHW if start == starts[-1] else tile_BCTHW[:, :, :kept]
        before = tile_BCTHW


def _starts_in_time(num_frames: int, axis: TileAxis) -> range:
    starts = range(0, num_frames, axis.stride)
    return starts[:-1] if num_frames - starts[-1] < axis.shortest else starts


def blend(before: Tensor, after: Tensor, *, length: int, dim: int) -> Tensor:
    """Fade from the last positions of `before` into the first of `after` along `dim`: position i weighs i / length.

    The result has the shape of `after`. Fewer than `length` positions are blended where one of both is shorter.
    """
    length = min(length, before.shape[dim], after.shape[dim])
    if length == 0:
        return after
    ramp = torch.arange(length, device=after.device, dtype=torch.float32) / length
    weight = ramp.to(after.dtype).view([-1 if axis == dim else 1 for axis in range(after.dim())])
    end_of_before = before.narrow(dim, before.shape[dim] - length, length)
    start_of_after = after.narrow(dim, 0, length)
    rest = after.narrow(dim, length, after.shape[dim] - length)
    return torch.cat((end_of_before * (1 - weight) + start_of_after * weight, rest), dim=dim)
