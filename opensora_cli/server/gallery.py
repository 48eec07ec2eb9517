"""One HTML page of a folder of results, which needs no server: `osora gallery`."""

import base64
import html
import io
import os
from collections.abc import Iterator
from pathlib import Path
from string import Template
from urllib.parse import quote

import av

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import FileProblem, OsoraError
from opensora_cli.core.files import atomic_path, require_writable
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.show import Shown, show_recorded
from opensora_cli.media.results import read_sidecar
from opensora_cli.server.results import frames_of, thumbnail
from opensora_cli.settings.tools import GallerySettings

_PAGE = Path(__file__).parent / "page"
_PICTURES = (".png", ".webp", ".jpg")


class Gallery(Document):
    """Page of results."""

    SCHEMA = "osora.gallery/1"

    path: Path
    results: int
    """Number of results in the page."""

    def lines(self) -> list[str]:
        """Return the path."""
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
    found = sorted(_results(folder), key=lambda path: path.stat().st_mtime, reverse=True)
    items = []
    with reporter.stage("read", total=len(found), unit="results") as progress:
        for path in found:
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


def _results(folder: Path) -> Iterator[Path]:
    for sidecar in folder.rglob("*.json"):
        media = sidecar.with_suffix("")
        if media.exists() and read_sidecar(sidecar):
            yield media


def _item(path: Path, base: Path) -> str:
    """Return the list item of a result; `base` is the folder of the page."""
    shown = show_recorded(path)
    assert isinstance(shown, Shown)
    poster = io.BytesIO()
    thumbnail(next(frames_of(path))).save(poster, "WEBP")
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
