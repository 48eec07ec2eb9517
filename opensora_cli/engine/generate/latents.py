"""Finished latents in a file, so that a failure while decoding or saving costs no sampling."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.settings.generate import GenerateSettings

LATENTS_SCHEMA = "osora.latents/1"
_KEY = "latents"


@dataclass(frozen=True, slots=True)
class SavedLatents:
    """What such a file holds."""

    latents_CTHW: torch.Tensor
    """Scaled, as the autoencoder decodes them; on the CPU."""
    settings: Mapping[str, object]
    """Sections as in `GenerateSettings.model_dump(mode="json")`, for this one sample."""


def save_latents(path: Path, latents_CTHW: torch.Tensor, settings: GenerateSettings) -> None:
    """Write the latents of one sample, with the settings that made them; whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    metadata = {"schema": LATENTS_SCHEMA, "settings": json.dumps(settings.model_dump(mode="json"))}
    write_bytes_atomic(path, save({_KEY: latents_CTHW.detach().cpu().contiguous()}, metadata=metadata))


def load_latents(path: str | Path) -> SavedLatents:
    """Read a file of `save_latents`.

    Raises:
        CheckpointError: it is missing, truncated, or not such a file.
    """
    hint = "--from-latents takes the .latents.safetensors file of an unfinished run"
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist or is no file", hint=hint)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("schema") != LATENTS_SCHEMA or _KEY not in set(file.keys()):
                raise CheckpointError(f"{path} holds no latents of osora", hint=hint)
            return SavedLatents(file.get_tensor(_KEY), _settings(path, metadata))
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint=hint) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _settings(path: str | Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(metadata["settings"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} does not say which settings made it") from error
    return settings
