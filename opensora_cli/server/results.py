"""Pictures beside a result: its thumbnail and a sheet of its frames."""

from collections.abc import Iterator
from pathlib import Path

import av
from PIL import Image

from opensora_cli.core.files import atomic_path

THUMBNAIL, SHEET = "thumbnail.webp", "spritesheet.jpg"
_THUMBNAIL_SIDE, _CELL_SIDE = 480, 160
_COLUMNS, _CELLS = 5, 25


def write_extras(result: str, folder: Path) -> None:
    """Write the thumbnail and the sheet of a picture or video. Raises OutputError if they cannot be written."""
    frames = list(_frames(Path(result)))
    first = frames[0].copy()
    first.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    with atomic_path(folder / THUMBNAIL, replace=True) as path:
        first.save(path, "WEBP")
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


def _frames(path: Path) -> Iterator[Image.Image]:
    if path.suffix in (".png", ".jpg", ".webp"):
        with Image.open(path) as picture:
            yield picture.convert("RGB")
        return
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))
