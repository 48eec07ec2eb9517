"""Autoencoders of any kind, from settings and a file of weights."""

import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.configs import autoencoder_on_meta
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, hub_snapshot, packaged_demo
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.enums import DownloadPreset, VAEKind

_DOWNLOADS = {
    VAEKind.HUNYUAN: DownloadPreset.OPEN_SORA_V2,
    VAEKind.DC_AE: DownloadPreset.OPEN_SORA_V2_DC_AE,
    VAEKind.FLUX_AE: DownloadPreset.FLUX1_DEV,
}


def load_autoencoder(
    settings: VAESettings,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[int], None] | None = None,
) -> Autoencoder:
    """Return the chosen autoencoder with the weights of a file, for use without training.

    Args:
        settings: which, and its sizes.
        path: of its weights.
        device: where it goes.
        dtype: of its weights.
        advance: told of bytes as they are loaded.

    Raises:
        RequestError: the sizes contradict each other.
        CheckpointError: the file is missing or broken, or its keys or shapes do not fit the settings.
    """
    autoencoder = autoencoder_on_meta(settings)
    load_into_module(autoencoder, path, device=device, dtype=dtype, advance=advance)
    return autoencoder.requires_grad_(False).eval()


def find_autoencoder(kind: VAEKind, file: str, *, hub_repo: str | None, named: str | None) -> Path:
    """Return where the weights of an autoencoder are.

    Args:
        kind: which it is.
        file: the name of its file.
        hub_repo: the Hub repository in whose cache it may be; None: it is the demo's, which is part of osora.
        named: the folder to look in, and in no other; None: `./ckpts`, then the Hugging Face cache.

    Raises:
        CheckpointError: it is not there; says where it was looked for, and how to get it.
    """
    if named is not None:
        folders = [Path(named)]
    elif hub_repo is None:
        folders = [packaged_demo()]
    else:
        folders = [folder for folder in (Path(DEFAULT_FOLDER), hub_snapshot(hub_repo)) if folder is not None]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    hint = None
    if hub_repo is not None:
        place = "" if named is None else f" --to {shlex.quote(named)}"
        hint = f"osora ckpt download {_DOWNLOADS[kind]}{place}"
    raise CheckpointError(
        f"weights of the autoencoder are missing: {file} (looked in {' and '.join(map(str, folders))})", hint=hint
    )
