"""Checks of a request to `osora vae` before torch is imported. The engine repeats them."""

from pathlib import Path

from opensora_cli.core.exceptions import MediaError, OutputError
from opensora_cli.core.files import require_writable
from opensora_cli.engine.components.weights import find_autoencoder
from opensora_cli.media.results import readable_file, sidecar_path
from opensora_cli.settings.tools import EncodeSettings, ReconstructSettings

ENDINGS = ("mp4", "png")
"""File endings of reconstructed videos and pictures."""


def refuse_early(settings: EncodeSettings) -> None:
    """Refuse a request without any file that could be processed.

    Raises:
        MediaError: none of the files can be read.
        CheckpointError: the weights are missing.
        OutputError: a result exists already.
    """
    takes_folders = not isinstance(settings, ReconstructSettings)
    files = [file for file in settings.files if not (takes_folders and Path(file).is_dir())]
    problems = [problem for file in files if (problem := _problem(file)) is not None]
    if len(problems) == len(settings.files):
        raise MediaError("\n".join(error.message for error in problems), hint=problems[0].hint)
    find_autoencoder(settings)
    if isinstance(settings, ReconstructSettings):
        result_stems(settings)


def result_stems(settings: ReconstructSettings) -> list[Path]:
    """Return the path of every result without its ending; equal names are numbered.
    Raises OutputError if a result exists already, cannot be written, or is one of the input files.
    """
    folder, stems = Path(settings.output.folder), list[Path]()
    for file in settings.files:
        stem, number = f"{Path(file).stem}_reconstructed", 1
        while folder / stem in stems:
            number += 1
            stem = f"{Path(file).stem}_reconstructed_{number}"
        stems.append(folder / stem)
    sources = {Path(file).absolute() for file in settings.files}
    for path in (stem.with_name(f"{stem.name}.{ending}") for stem in stems for ending in ENDINGS):
        if path.absolute() in sources:
            raise OutputError(f"{path} is one of the files to be reconstructed", hint="use another --out")
        for written in (path, sidecar_path(path)) if settings.output.metadata else (path,):
            require_writable(written, overwrite=settings.output.overwrite)
    return stems


def _problem(file: str) -> MediaError | None:
    try:
        readable_file(file)
    except MediaError as error:
        return error
    return None
