"""Pictures of a result, and one HTML page of a folder of results, which needs no server: `osora gallery`."""

import base64
import html
import io
import os
from collections.abc import Iterator
from pathlib import Path
from string import Template
from urllib.parse import quote

import av
from PIL import Image

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import FileProblem, OsoraError
from opensora_cli.core.files import atomic_path, require_writable
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.show import show_recorded
from opensora_cli.media.results import read_sidecar
from opensora_cli.settings.tools import GallerySettings

THUMBNAIL, SHEET = "thumbnail.webp", "spritesheet.jpg"
_THUMBNAIL_SIDE, _CELL_SIDE = 480, 160
_COLUMNS, _CELLS = 5, 25
_PAGE = Path(__file__).parent / "page"
_PICTURES = (".png", ".webp", ".jpg")


def write_extras(result: Path, folder: Path) -> None:
    """Write the thumbnail and the sheet of a picture or video. Raises OutputError if they cannot be written."""
    cells, every = list[Image.Image](), 1
    for number, frame in enumerate(_frames_of(result)):
        if number == 0:
            with atomic_path(folder / THUMBNAIL, replace=True) as path:
                _smaller(frame, _THUMBNAIL_SIDE).save(path, "WEBP")
        if number % every == 0:
            cells.append(_smaller(frame, _CELL_SIDE))
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


class Gallery(Document):
    """Page of results."""

    SCHEMA = "osora.gallery/1"

    path: Path
    results: int
    """Number of results in the page."""

    def lines(self) -> list[str]:
        return [str(self.path)]


def write_gallery(settings: GallerySettings, *, reporter: Reporter) -> Gallery:
    """Write the page of all results in a folder and the folders in it, the newest first.

    Raises:
        FileProblem: there are no results.
        OutputError: the page exists already, or cannot be written.
    """
    folder = Path(settings.folder)
    output = folder / "gallery.html" if settings.output is None else Path(settings.output)
    require_writable(output, overwrite=settings.overwrite)
    sidecars = (path for path in folder.rglob("*.json") if path.with_suffix("").exists() and read_sidecar(path))
    found = [sidecar.with_suffix("") for sidecar in sidecars]
    items = []
    with reporter.stage("read", total=len(found), unit="results") as progress:
        for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                items.append(_item(path, output.parent))
            except (OsoraError, OSError, av.FFmpegError, StopIteration) as error:
                reporter.warn(f"{path} is skipped: {error or 'it has no frames'}")
            progress.advance()
    if not items:
        raise FileProblem(
            f"{folder} has no results: videos and pictures with a sidecar NAME.json beside them",
            hint="name the folder that osora generate or osora serve writes to",
        )
    template = Template((_PAGE / "gallery.html").read_text("utf-8"))
    style = (_PAGE / "style.css").read_text("utf-8")
    page = template.substitute(style=style, count=len(items), items="\n".join(items))
    with atomic_path(output, replace=settings.overwrite) as path:
        path.write_text(page, "utf-8")
    return Gallery(path=output, results=len(items))


def _item(path: Path, base: Path) -> str:
    """Return the list item of a result; `base` is the folder of the page."""
    shown = show_recorded(path)
    poster = io.BytesIO()
    _smaller(next(_frames_of(path)), _THUMBNAIL_SIDE).save(poster, "WEBP")
    data = f"data:image/webp;base64,{base64.b64encode(poster.getvalue()).decode()}"
    name = html.escape(f"./{quote(os.path.relpath(path, base))}")
    prompt = html.escape(shown.prompt or path.name)
    if path.is_dir() or path.suffix in _PICTURES or shown.recorded.get("num_frames") == 1:
        media = f'<a href="{name}"><img src="{data}" alt="{prompt}"></a>'
    elif path.suffix == ".gif":
        media = f'<img src="{data}" data-moving="{name}" alt="{prompt}">'
    else:
        media = f'<video src="{name}" poster="{data}" preload="none" aria-label="{prompt}"></video>'
    lines = html.escape("\n".join(shown.lines()))
    return f"""<li class="result"><div class="media">{media}</div><p class="prompt">{prompt}</p>
<details><summary>Settings</summary><pre>{lines}</pre></details></li>"""


def _smaller(frame: Image.Image, side: int) -> Image.Image:
    small = frame.copy()
    small.thumbnail((side, side))
    return small


def _frames_of(path: Path) -> Iterator[Image.Image]:
    """Yield the frames of a picture, a video or a folder of pictures. Raises OSError or FFmpegError if it is broken."""
    if path.is_dir() or path.suffix in (".png", ".jpg"):
        for each in sorted(path.glob("frame_*.png")) if path.is_dir() else [path]:
            with Image.open(each) as picture:
                yield picture.convert("RGB")
        return
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))
