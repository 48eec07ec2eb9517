"""Settings of `osora serve` and `osora gallery`."""

from collections.abc import Iterator

from pydantic import Field

from opensora_cli.core.section import FileName, Section
from opensora_cli.models.registry import AUTO

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that others cannot reach."""


class ServeSettings(Section):
    """Address, folder and limits of a server."""

    model: str = Field(default=AUTO, description="Model: auto, demo or a released model.")
    host: str = Field(default="127.0.0.1", description="Address to listen at. Others than loopback need --token-file.")
    port: int = Field(default=8000, ge=1, le=65_535, description="Port to listen at.")
    folder: FileName = Field(default="serve", description="Folder of jobs and their results.")
    token_file: FileName | None = Field(default=None, description="File with the secret that requests must bring.")
    max_queue: int = Field(default=100, ge=1, le=100_000, description="Most videos that wait.")
    save_every: float = Field(
        default=30.0, gt=0, le=86_400, description="Seconds of work between two saves of a video's state."
    )
    groups: int = Field(default=1, ge=1, le=64, description="Videos made at the same time, each on its own devices.")

    def rules(self) -> Iterator[str]:
        if self.host not in LOOPBACK and self.token_file is None:
            yield f"host={self.host} lets other machines make videos: give --token-file, too"


class GallerySettings(Section):
    """Folder of results, and the page about it."""

    folder: FileName = Field(description="Folder of results, with the folders in it.")
    output: FileName | None = Field(default=None, description="Page to write. None means FOLDER/gallery.html.")
    overwrite: bool = Field(default=False, description="Replace an existing page.")

    def rules(self) -> Iterator[str]:
        if self.output is not None and not self.output.endswith(".html"):
            yield f"output={self.output} must end with .html"
