"""Cuts of clips into overlapping tiles: the arithmetic, without tensors."""

from dataclasses import dataclass
from math import prod


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
