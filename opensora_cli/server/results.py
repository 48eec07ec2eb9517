"""Pictures of a result: its thumbnail and a sheet of its frames. Stand-ins for the references of a plan."""

from collections.abc import Iterator
from pathlib import Path

import av
from PIL import Image

from opensora_cli.core.files import atomic_path

THUMBNAIL, SHEET = "thumbnail.webp", "spritesheet.jpg"
_THUMBNAIL_SIDE, _CELL_SIDE = 480, 160
_COLUMNS, _CELLS = 5, 25
STAND_INS = {"picture": 1, "video": 300}
"""Kinds of references, and the number of frames that stand for one in a plan."""


def write_extras(result: Path, folder: Path) -> None:
    """Write the thumbnail and the sheet of a picture or video. Raises OutputError if they cannot be written."""
    cells, every = list[Image.Image](), 1
    for number, frame in enumerate(frames_of(result)):
        if number == 0:
            with atomic_path(folder / THUMBNAIL, replace=True) as path:
                thumbnail(frame).save(path, "WEBP")
        if number % every == 0:
            cells.append(thumbnail(frame, _CELL_SIDE))
        if len(cells) > _CELLS:
            cells, every = cells[::2], 2 * every
    width, height = cells[0].size
    rows = -(-len(cells) // _COLUMNS)
    sheet = Image.new("RGB", (min(len(cells), _COLUMNS) * width, rows * height))
    for place, cell in enumerate(cells):
        row, column = divmod(place, _COLUMNS)
        sheet.paste(cell, (column * width, row * height))
    with atomic_path(folder / SHEET, replace=True) as path:
        sheet.save(path, "JPEG", quality=85)


def thumbnail(frame: Image.Image, side: int = _THUMBNAIL_SIDE) -> Image.Image:
    """Return a smaller copy of a frame."""
    small = frame.copy()
    small.thumbnail((side, side))
    return small


def stand_in(kind: str, folder: Path) -> Path:
    """Return a file that a plan reads in place of a reference."""
    path = folder / f"stand_in_{kind}.gif"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Equal frames would become one.
        frames = [Image.new("L", (64, 64), 255 * (number % 2)) for number in range(STAND_INS[kind])]
        with atomic_path(path, replace=True) as written:
            frames[0].save(written, "GIF", save_all=True, append_images=frames[1:], duration=40)
    return path


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
