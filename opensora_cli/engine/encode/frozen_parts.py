"""The frozen parts that the transformer learns from, loaded, and what tells them apart."""

import json
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import BYTES, Reporter
from opensora_cli.core.reading import require_file
from opensora_cli.engine.components.autoencoders import load_autoencoder, vae_tiling
from opensora_cli.engine.components.text_encoders import (
    cast_later,
    load_clip,
    load_t5,
    stored_t5_dtype,
    streamed_layers,
)
from opensora_cli.engine.encode.encoding import Encoders, TextEncoder
from opensora_cli.engine.encode.inputs import require_frozen_parts
from opensora_cli.settings.enums import DType
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_objectives import MMDiTTrainSettings

# What a text encoder's folder has that changes what it makes of a caption.
_FILES_OF_ENCODERS = frozenset({".json", ".safetensors", ".bin", ".model", ".txt"})


def load_encoders(settings: TrainSettings, *, device: torch.device) -> Encoders:
    """Return the frozen autoencoder and text encoders, loaded.

    A CheckpointError for missing or broken parts, a RequestError for a text length that does not suit its encoder.
    """
    parts, chosen = require_frozen_parts(settings), settings.train_mmdit
    dtype = frozen_dtype(chosen, device)
    vae = load_autoencoder(settings.vae, parts.vae, device=device, dtype=dtype)
    t5 = _t5(parts.t5, max_length=settings.text.t5_max_length, device=device, dtype=dtype)
    clip = load_clip(parts.clip, max_length=settings.text.clip_max_length, device=device, dtype=dtype)
    return Encoders(
        vae,
        t5=t5,
        clip=clip.encode,
        device=device,
        dtype=dtype,
        tiling=vae_tiling(settings.vae),
    )


def _t5(folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Return what encodes captions; on a CPU with layers that stay mapped, and are cast one by one for each caption."""
    streams = cast_later(device, dtype) and stored_t5_dtype(folder) not in (None, dtype)
    t5 = load_t5(folder, max_length=max_length, device=device, dtype=dtype, layers_on_host=streams)
    if not streams:
        return t5.encode

    def encode(captions: list[str]) -> Tensor:
        with streamed_layers(t5, device=device, dtype=dtype):
            return t5.encode(captions)

    return encode


def cache_identity(settings: TrainSettings, *, device: torch.device, reporter: Reporter) -> dict[str, str]:
    """Return what makes the encoded clips what they are, but for the clips: files by their SHA-256, and settings.

    A CheckpointError if frozen parts are missing, or cannot be read.
    """
    parts = require_frozen_parts(settings)
    files = {name: _files_of(path) for name, path in (("vae", parts.vae), ("t5", parts.t5), ("clip", parts.clip))}
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    with reporter.stage("hash", total=size, unit=BYTES) as progress:
        digests = {
            name: " ".join(f"{path.name}:{sha256_of(path, advance=progress.advance)}" for path in paths)
            for name, paths in files.items()
        }
    of_files = {"autoencoder": digests["vae"], "T5": digests["t5"], "CLIP": digests["clip"]}
    return {**of_files, **cache_settings(settings, device=device)}


def cache_settings(settings: TrainSettings, *, device: torch.device) -> dict[str, str]:
    """Return the part of `cache_identity` that needs no file."""
    chosen, text = settings.train_mmdit, settings.text
    return {
        "autoencoder's settings": json.dumps(settings.vae.model_dump(mode="json"), sort_keys=True),
        "text lengths": f"{text.t5_max_length}, {text.clip_max_length}",
        "fit": str(settings.data.fit),
        "captions": f"add_fps={chosen.add_fps}, add_motion_score={chosen.add_motion_score}",
        "precision": str(frozen_dtype(chosen, device)).removeprefix("torch."),
    }


def frozen_dtype(settings: MMDiTTrainSettings, device: torch.device) -> torch.dtype:
    """Return what the frozen parts compute in."""
    if settings.frozen_dtype is not DType.AUTO:
        return torch_dtype(settings.frozen_dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        require_file(path, problem=CheckpointError)
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.suffix in _FILES_OF_ENCODERS)
