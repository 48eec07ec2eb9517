"""Checks of a request to encode clips, before torch is imported."""

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.encode.inputs import require_frozen_parts, require_tables
from opensora_cli.settings.train import TrainSettings


def refuse_early(settings: TrainSettings) -> None:
    """Refuse training that needs no cache, or lacks the input of a cache.

    Raises:
        RequestError: the trained model is not the transformer, or no cache is named.
        FileProblem: the table is missing.
        CheckpointError: frozen parts are missing.
    """
    if not settings.trains_transformer:
        raise RequestError(f"target={settings.target} learns from pixels alone: only mmdit has a use for a cache")
    if settings.train_mmdit.cache is None:
        raise RequestError("train_mmdit.cache is not set", hint="name a folder: --set train_mmdit.cache=FOLDER")
    require_tables(settings)
    require_frozen_parts(settings)
