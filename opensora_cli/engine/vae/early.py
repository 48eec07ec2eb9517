"""Checks of a request to `osora vae` before torch is imported. The engine repeats them."""

from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import require_writable
from opensora_cli.core.reading import require_there
from opensora_cli.engine.components.weights import find_autoencoder
from opensora_cli.media.results import sidecar_path
from opensora_cli.settings.tools import EncodeSettings, ReconstructSettings

ENDINGS = ("mp4", "png")
"""File endings of reconstructed videos and pictures."""


def refuse_early(settings: EncodeSettings) -> None:
    """Raise FileProblem, CheckpointError or OutputError if files or weights are missing, or results exist already."""
    require_there(*settings.files)
    find_autoencoder(settings)
    if isinstance(settings, ReconstructSettings):
        result_stems(settings)


def result_stems(settings: ReconstructSettings) -> list[Path]:
    """Return the path of every result without its ending.

    Raises OutputError if a result exists already, cannot be written, has the name of another one, or is one of the
    input files.
    """
    stems = [Path(settings.output.folder, f"{Path(file).stem}_reconstructed") for file in settings.files]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise OutputError(f"{twice} would be the result of several files", hint="use another --out for one of them")
    sources = {Path(file).absolute() for file in settings.files}
    for path in (stem.with_name(f"{stem.name}.{ending}") for stem in stems for ending in ENDINGS):
        if path.absolute() in sources:
            raise OutputError(f"{path} is one of the files to be reconstructed", hint="use another --out")
        for written in (path, sidecar_path(path)) if settings.output.metadata else (path,):
            require_writable(written, overwrite=settings.output.overwrite)
    return stems
