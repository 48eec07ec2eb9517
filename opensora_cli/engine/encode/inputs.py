"""The files that training reads: tables of clips, and the frozen parts that the transformer learns from.

Needs no torch, so that what is missing is reported early.
"""

from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import require_there
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, download_command, packaged_demo
from opensora_cli.models.registry import WeightNames
from opensora_cli.models.text.files import CLIP_VOCABULARIES, T5_VOCABULARIES, require_files
from opensora_cli.settings.train import TrainSettings, TrainTarget

PACKAGED = "demo"
"""In place of a path: the model that comes with osora."""


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Where the frozen parts are."""

    vae: Path
    t5: Path
    clip: Path


def find_frozen_parts(settings: TrainSettings) -> dict[str, Path | None]:
    """Return where each frozen part is, by its name: in the first of the folders `weights` that has it, or None."""
    files = settings.train_mmdit.files
    folders = [packaged_demo() if folder == PACKAGED else Path(folder) for folder in settings.weights]
    places = {name: [folder / name for folder in folders] for name in (files.vae, files.t5, files.clip)}
    return {name: next((path for path in paths if path.exists()), None) for name, paths in places.items()}


def require_frozen_parts(settings: TrainSettings) -> FrozenParts:
    """Return where the frozen parts are; a CheckpointError names all that are missing, and how to get them."""
    found = find_frozen_parts(settings)
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise CheckpointError(
            f"weights={','.join(settings.weights) or 'none'} has no {', '.join(missing)}",
            hint=_how_to_get(settings),
        )
    paths = {name: path for name, path in found.items() if path is not None}
    files = settings.train_mmdit.files
    require_files(paths[files.t5], vocabularies=T5_VOCABULARIES)
    require_files(paths[files.clip], vocabularies=CLIP_VOCABULARIES)
    return FrozenParts(paths[files.vae], paths[files.t5], paths[files.clip])


def require_tables(settings: TrainSettings) -> None:
    """Raise FileProblem if a table that the run reads is not there."""
    if settings.target is not TrainTarget.TEXT:
        validated = settings.validation.table if settings.validation.every is not None else None
        require_there(*(table for table in (settings.data.table, validated) if table is not None))


def _how_to_get(settings: TrainSettings) -> str:
    """Return the line that fetches missing parts, where they have the names of released ones."""
    released = WeightNames()
    if settings.train_mmdit.files.t5 != released.t5:
        return "train autoencoder and text encoders first, or name their folders: --set weights=FOLDER,FOLDER"
    folder = next((each for each in settings.weights if each != PACKAGED), DEFAULT_FOLDER)
    return download_command(settings.vae.kind, to=folder)
