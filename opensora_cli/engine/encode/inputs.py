"""Files that training reads: tables of clips, and the frozen parts that the transformer learns from.

This module needs no torch, so missing files are reported early.
"""

from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.reading import require_there
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, download_command, packaged_demo
from opensora_cli.models.registry import WeightNames
from opensora_cli.models.text.sizes import CLIP_VOCABULARIES, T5_VOCABULARIES, require_files
from opensora_cli.settings.train import TrainSettings

NO_TABLE, TABLE_HINT = "data.table is not set", "name a table of clips: osora data scan makes one of a folder"

PACKAGED = "demo"
"""Name of the packaged model, instead of a path."""


def find_frozen_parts(settings: TrainSettings) -> dict[str, Path | None]:
    """Return the path of each frozen part by its name: in the first folder of `weights` that has it, or None."""
    files = settings.train_mmdit.files
    folders = [packaged_demo() if folder == PACKAGED else Path(folder) for folder in settings.weights]
    places = {name: [folder / name for folder in folders] for name in (files.vae, files.t5, files.clip)}
    return {name: next((path for path in paths if path.exists()), None) for name, paths in places.items()}


def require_frozen_parts(settings: TrainSettings) -> tuple[Path, Path, Path]:
    """Return the paths of autoencoder, T5 and CLIP; raises CheckpointError that names all missing ones."""
    found = find_frozen_parts(settings)
    paths = {name: path for name, path in found.items() if path is not None}
    files = settings.train_mmdit.files
    if missing := [name for name in found if name not in paths]:
        hint = "train autoencoder and text encoders first, or name their folders: --set weights=FOLDER,FOLDER"
        if files.t5 == WeightNames().t5:
            folder = next((each for each in settings.weights if each != PACKAGED), DEFAULT_FOLDER)
            hint = download_command(settings.vae.kind, to=folder)
        raise CheckpointError(f"weights={','.join(settings.weights) or 'none'} has no {', '.join(missing)}", hint=hint)
    require_files(paths[files.t5], vocabularies=T5_VOCABULARIES)
    require_files(paths[files.clip], vocabularies=CLIP_VOCABULARIES)
    return paths[files.vae], paths[files.t5], paths[files.clip]


def require_tables(settings: TrainSettings, *, has_source: bool = False) -> None:
    """Raise FileProblem if a table of the run is missing, and RequestError if none is named and needed."""
    if settings.data.table is None and not has_source:
        raise RequestError(NO_TABLE, hint=TABLE_HINT)
    validated = settings.validation.table if settings.validation.every is not None else None
    require_there(*(table for table in (settings.data.table, validated) if table is not None))


def require_cache_inputs(settings: TrainSettings) -> None:
    """Refuse training that needs no cache, or lacks the input of a cache."""
    if not settings.trains_transformer:
        raise RequestError(f"target={settings.target} learns from pixels alone: only mmdit has a use for a cache")
    if settings.train_mmdit.cache is None:
        raise RequestError("train_mmdit.cache is not set", hint="name a folder: --set train_mmdit.cache=FOLDER")
    require_tables(settings)
    require_frozen_parts(settings)
