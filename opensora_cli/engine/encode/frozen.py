"""The frozen parts that the transformer learns from: where they are, and what is made of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.progress import BYTES, Reporter
from opensora_cli.engine.components.autoencoders import load_autoencoder
from opensora_cli.engine.components.configs import vae_tiling
from opensora_cli.engine.encode.cache import ClipCache
from opensora_cli.engine.encode.encoding import Encoders
from opensora_cli.engine.train.files import LORA_FOLDER, weights_folders
from opensora_cli.engine.train.lora import save_lora
from opensora_cli.engine.train.mmdit import Export, MMDiTTask, export_transformer
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.settings.enums import DType
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_mmdit import MMDiTTrainSettings

# What a text encoder's folder has that changes what it makes of a caption.
_FILES_OF_ENCODERS = frozenset({".json", ".safetensors", ".bin", ".model", ".txt"})


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Where the frozen parts are."""

    vae: Path
    t5: Path
    clip: Path


def find_frozen_parts(settings: TrainSettings) -> dict[str, Path | None]:
    """Return where each frozen part is, by its name: in the first of the folders `weights` that has it, or None."""
    files = settings.train_mmdit.files
    folders = weights_folders(settings)
    places = {name: [folder / name for folder in folders] for name in (files.vae, files.t5, files.clip)}
    return {name: next((path for path in paths if path.exists()), None) for name, paths in places.items()}


def require_frozen_parts(settings: TrainSettings) -> FrozenParts:
    """Return where the frozen parts are.

    Raises:
        CheckpointError: some are missing; all of these are named.
    """
    found = find_frozen_parts(settings)
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise CheckpointError(
            f"weights={','.join(settings.weights) or 'none'} has no {', '.join(missing)}",
            hint="train autoencoder and text encoders first, or name their folders: --set weights=FOLDER,FOLDER",
        )
    paths = {name: path for name, path in found.items() if path is not None}
    files = settings.train_mmdit.files
    return FrozenParts(paths[files.vae], paths[files.t5], paths[files.clip])


def load_encoders(settings: TrainSettings, *, device: torch.device) -> Encoders:
    """Return the frozen autoencoder and text encoders, loaded.

    Raises:
        CheckpointError: parts are missing or broken.
        RequestError: a text length does not suit its encoder.
    """
    parts, chosen = require_frozen_parts(settings), settings.train_mmdit
    dtype = frozen_dtype(chosen, device)
    vae = load_autoencoder(settings.vae, parts.vae, device=device, dtype=dtype)
    t5 = T5Encoder.from_folder(parts.t5, max_length=settings.text.t5_max_length, device=device, dtype=dtype)
    clip = ClipEncoder.from_folder(parts.clip, max_length=settings.text.clip_max_length, device=device, dtype=dtype)
    return Encoders(
        vae,
        t5=t5.encode,
        clip=clip.encode,
        device=device,
        dtype=dtype,
        tiling=vae_tiling(settings.vae),
    )


def cache_identity(settings: TrainSettings, *, device: torch.device, reporter: Reporter) -> dict[str, str]:
    """Return what makes the encoded clips what they are, but for the clips: files by their SHA-256, and settings.

    Raises:
        CheckpointError: frozen parts are missing, or cannot be read.
    """
    parts, chosen, text = require_frozen_parts(settings), settings.train_mmdit, settings.text
    files = {name: _files_of(path) for name, path in (("vae", parts.vae), ("t5", parts.t5), ("clip", parts.clip))}
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    with reporter.stage("hash", total=size, unit=BYTES) as progress:
        digests = {
            name: " ".join(f"{path.name}:{sha256_of(path, advance=progress.advance)}" for path in paths)
            for name, paths in files.items()
        }
    return {
        "autoencoder": digests["vae"],
        "T5": digests["t5"],
        "CLIP": digests["clip"],
        "autoencoder's settings": json.dumps(settings.vae.model_dump(mode="json"), sort_keys=True),
        "text lengths": f"{text.t5_max_length}, {text.clip_max_length}",
        "fit": str(settings.data.fit),
        "captions": f"add_fps={chosen.add_fps}, add_motion_score={chosen.add_motion_score}",
        "precision": str(frozen_dtype(chosen, device)).removeprefix("torch."),
    }


def build_mmdit_task(
    settings: TrainSettings, module: MMDiT, *, device: torch.device, clips: ClipCache | None = None
) -> MMDiTTask:
    """Return the transformer's task, with the frozen parts that it needs.

    Args:
        settings: the run.
        module: what is trained.
        device: where it computes, and where clips are encoded.
        clips: where encoded clips come from. The frozen parts are then loaded only if other clips come, as for
            validation.

    Raises:
        CheckpointError: frozen parts are missing or broken.
        RequestError: a text encoder has another width than the transformer reads.
    """
    encoders: Callable[[], Encoders] = cache(partial(load_encoders, settings, device=device))
    empty_prompt = encoders().empty_prompt() if clips is None else clips.empty_prompt()
    for key, needed, given, name in (
        ("context_in_dim", settings.model.context_in_dim, empty_prompt.prompt_embeds_LC.shape[-1], "T5"),
        ("vec_in_dim", settings.model.vec_in_dim, empty_prompt.pooled_prompt_embeds_V.shape[-1], "CLIP"),
    ):
        if needed != given:
            raise RequestError(f"model.{key}={needed} must be the width of {name}: use {given}")
    return MMDiTTask(
        module,
        settings=settings.train_mmdit,
        grid=settings.vae.grid,
        empty_prompt=empty_prompt,
        encoders=encoders,
        device=device,
        export=_export_of_adapter(settings, module) if settings.lora.is_on else export_transformer,
    )


def _export_of_adapter(settings: TrainSettings, module: MMDiT) -> Export:
    def export(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_lora(folder / LORA_FOLDER, weights, config=module.config, settings=settings.lora, base=settings.init)

    return export


def frozen_dtype(settings: MMDiTTrainSettings, device: torch.device) -> torch.dtype:
    """Return what the frozen parts compute in."""
    if settings.frozen_dtype is not DType.AUTO:
        return torch_dtype(settings.frozen_dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.suffix in _FILES_OF_ENCODERS)
