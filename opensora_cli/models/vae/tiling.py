"""Overlapping tiles with linear blending, as in the reference implementation.

A tile starts at every stride, even if the previous tile reached the end. Its beginning is blended with the end of the
blended previous tile, and its part before the start of the next tile is kept. Group norms span a tile, so that a tiled
result differs from the whole one and depends on the tile size.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from opensora_cli.models.vae.tiles import TileAxis, TileGrid, Tiling


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
