"""Pictures of a result: its thumbnail and a sheet of its frames."""

from collections.abc import Iterator
from pathlib import Path

import av
from PIL import Image

from opensora_cli.core.files import atomic_path

THUMBNAIL, SHEET = "thumbnail.webp", "spritesheet.jpg"
_THUMBNAIL_SIDE, _CELL_SIDE = 480, 160
_COLUMNS, _CELLS = 5, 25


def write_extras(result: Path, folder: Path) -> None:
    """Write the thumbnail and the sheet of a picture or video. Raises OutputError if they cannot be written."""
    frames = list(frames_of(result))
    with atomic_path(folder / THUMBNAIL, replace=True) as path:
        thumbnail(frames[0]).save(path, "WEBP")
    cells = frames[:: -(-len(frames) // _CELLS)]
    for cell in cells:
        cell.thumbnail((_CELL_SIDE, _CELL_SIDE))
    width, height = cells[0].size
    rows = -(-len(cells) // _COLUMNS)
    sheet = Image.new("RGB", (min(len(cells), _COLUMNS) * width, rows * height))
    for place, cell in enumerate(cells):
        row, column = divmod(place, _COLUMNS)
        sheet.paste(cell, (column * width, row * height))
    with atomic_path(folder / SHEET, replace=True) as path:
        sheet.save(path, "JPEG", quality=85)


def thumbnail(frame: Image.Image) -> Image.Image:
    """Return a smaller copy of a frame."""
    small = frame.copy()
    small.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    return small


def frames_of(path: Path) -> Iterator[Image.Image]:
    """Yield the frames of a picture, a video or a folder of pictures. Raises OSError or FFmpegError if it is broken."""
    if path.is_dir() or path.suffix in (".png", ".jpg"):
        for each in sorted(path.glob("frame_*.png")) if path.is_dir() else [path]:
            with Image.open(each) as picture:
                yield picture.convert("RGB")
        return
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))
