"""From settings to what is trained, and to the frozen parts that it learns from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.configs import mmdit_config, transformer_on_meta, vae_config, vae_on_meta
from opensora_cli.engine.train.files import CLIP_FOLDER, FROZEN_PARTS, T5_FOLDER, VAE_FILE
from opensora_cli.engine.train.loop import Task
from opensora_cli.engine.train.mmdit import ClipSource, MMDiTTask
from opensora_cli.engine.train.vae import VAETask, channels_last
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.train import TrainSettings, TrainTarget


def build_task(settings: TrainSettings, *, reporter: Reporter) -> Task[Any]:
    """Return what `settings.target` names, with fresh weights drawn from `loop.seed`.

    Raises:
        RequestError: sizes contradict each other.
        CheckpointError: frozen parts are missing (all are named) or broken.
    """
    # Layers draw their first weights from torch's global generator; the caller's own use of it goes on undisturbed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        match settings.target:
            case TrainTarget.VAE:
                return VAETask(
                    vae_config(settings.vae),
                    data=settings.data,
                    settings=settings.train_vae,
                    batch_size=settings.loop.batch_size,
                )
            case TrainTarget.TEXT:
                # Imported here, since transformers takes seconds to load.
                from opensora_cli.engine.train.text import TextTask

                return TextTask(settings.text, batch_size=settings.loop.batch_size)
            case TrainTarget.MMDIT:
                return _build_mmdit_task(settings, reporter=reporter)


def count_parameters(settings: TrainSettings) -> int:
    """Return how many numbers are trained; no weight is made.

    Raises:
        RequestError: sizes contradict each other.
    """
    match settings.target:
        case TrainTarget.VAE:
            module: torch.nn.Module = vae_on_meta(settings.vae)
        case TrainTarget.TEXT:
            from opensora_cli.engine.train.text import TextTask

            with torch.device("meta"):
                module = TextTask(settings.text, batch_size=settings.loop.batch_size).module
        case TrainTarget.MMDIT:
            module = transformer_on_meta(settings.model)
    return sum(weight.numel() for weight in module.parameters())


def find_frozen_parts(settings: TrainSettings) -> dict[str, Path | None]:
    """Return where each frozen part is: in the first of the folders `weights` that has it, or None."""
    places = {name: [Path(folder) / name for folder in settings.weights] for name in FROZEN_PARTS[settings.target]}
    return {name: next((path for path in paths if path.exists()), None) for name, paths in places.items()}


def _build_mmdit_task(settings: TrainSettings, *, reporter: Reporter) -> MMDiTTask:
    parts = _require_frozen_parts(settings)
    text = _frozen_text(settings, t5_folder=parts[T5_FOLDER], clip_folder=parts[CLIP_FOLDER])
    return MMDiTTask(
        mmdit_config(settings.model),
        clips=ClipSource(_frozen_vae(settings, parts[VAE_FILE]), data=settings.data, settings=settings.train_mmdit),
        text=text,
        settings=settings.train_mmdit,
        batch_size=settings.loop.batch_size,
        reporter=reporter,
    )


def _require_frozen_parts(settings: TrainSettings) -> dict[str, Path]:
    parts = find_frozen_parts(settings)
    missing = [name for name, path in parts.items() if path is None]
    if missing:
        raise CheckpointError(
            f"weights={','.join(settings.weights) or 'none'} has no {', '.join(missing)}",
            hint="train autoencoder and text encoders first, or name their folders: --set weights=FOLDER,FOLDER",
        )
    return {name: path for name, path in parts.items() if path is not None}


def _frozen_vae(settings: TrainSettings, path: Path) -> HunyuanVAE:
    vae = vae_on_meta(settings.vae)
    load_into_module(vae, path, device="cpu", dtype=torch.float32)
    return channels_last(vae.requires_grad_(False).eval())


def _frozen_text(
    settings: TrainSettings, *, t5_folder: Path, clip_folder: Path
) -> Callable[[list[str]], tuple[Tensor, Tensor]]:
    lengths = settings.text
    t5 = T5Encoder.from_folder(t5_folder, max_length=lengths.t5_max_length, device="cpu", dtype=torch.float32)
    clip = ClipEncoder.from_folder(clip_folder, max_length=lengths.clip_max_length, device="cpu", dtype=torch.float32)

    def encode(captions: list[str]) -> tuple[Tensor, Tensor]:
        # As when generating on a CPU: in float32.
        with torch.autocast("cpu", enabled=False):
            return t5.encode(captions), clip.encode(captions)

    prompt_embeds_1LC, pooled_1V = encode([""])
    for key, needed, given, folder in (
        ("context_in_dim", settings.model.context_in_dim, prompt_embeds_1LC.shape[-1], t5_folder),
        ("vec_in_dim", settings.model.vec_in_dim, pooled_1V.shape[-1], clip_folder),
    ):
        if needed != given:
            raise RequestError(f"model.{key}={needed} must be the width of {folder}: use {given}")
    return encode
