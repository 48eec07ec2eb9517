"""`train`: from settings to a run that is started, resumed or begun anew, and to exported weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.configs import mmdit_config, vae_config, vae_on_meta
from opensora_cli.engine.train.loop import CHECKPOINT_NAME, LOG_NAME, Task, Trainer
from opensora_cli.engine.train.mmdit import ClipSource, MMDiTTask
from opensora_cli.engine.train.text import TextTask
from opensora_cli.engine.train.vae import VAETask
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.train import TrainSettings, TrainTarget

RESULT_SCHEMA = "osora.train/1"


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left."""

    target: TrainTarget
    output: Path
    steps: int
    resumed_from: int | None
    parameters: int

    def lines(self) -> list[str]:
        """Say it to a person."""
        return [f"trained {self.target} for {self.steps} steps ({self.parameters:,} parameters): {self.output}"]

    def to_json(self) -> dict[str, object]:
        """Say it to a program."""
        return {
            "schema": RESULT_SCHEMA,
            "target": str(self.target),
            "output": str(self.output),
            "steps": self.steps,
            "resumed_from": self.resumed_from,
            "parameters": self.parameters,
        }


def train(
    settings: TrainSettings, *, resume: bool = False, overwrite: bool = False, reporter: Reporter | None = None
) -> TrainResult:
    """Train what `settings.target` names, and export it to `settings.output`.

    Args:
        settings: the run.
        resume: go on from the checkpoint in the output folder.
        overwrite: begin anew although there is one.
        reporter: hears of progress.

    Raises:
        RequestError: there is a checkpoint and neither `resume` nor `overwrite` says what to do, or none to resume.
        CheckpointError: frozen weights or the checkpoint are missing or broken.
    """
    reporter = reporter or SilentReporter()
    output = Path(settings.output)
    _check_output(output, resume=resume, overwrite=overwrite)
    torch.manual_seed(settings.loop.seed)
    task = _build_task(settings, reporter=reporter)
    trainer = Trainer(task, loop=settings.loop, optimizer=settings.optimizer, output=output, reporter=reporter)
    resumed_from = None
    if resume:
        trainer.resume()
        resumed_from = trainer.step
    elif overwrite:
        (output / LOG_NAME).unlink(missing_ok=True)
    parameters = sum(weight.numel() for weight in task.module.parameters())
    reporter.note(f"{settings.target}: {parameters:,} parameters, steps {trainer.step} to {settings.loop.steps}")
    trainer.run()
    return TrainResult(settings.target, output, trainer.step, resumed_from, parameters)


def _check_output(output: Path, *, resume: bool, overwrite: bool) -> None:
    there = (output / CHECKPOINT_NAME).exists()
    if resume and not there:
        raise RequestError(f"--resume: there is no checkpoint in {output}", hint="start the run without --resume")
    if there and not resume and not overwrite:
        raise RequestError(
            f"output={output} holds the checkpoint of an earlier run",
            hint="go on with --resume, begin anew with --overwrite, or give another --set output=FOLDER",
        )


def _build_task(settings: TrainSettings, *, reporter: Reporter) -> Task:
    if settings.target is TrainTarget.VAE:
        return VAETask(
            vae_config(settings.vae),
            data=settings.data,
            settings=settings.train_vae,
            batch_size=settings.loop.batch_size,
        )
    if settings.target is TrainTarget.TEXT:
        return TextTask(settings.text, batch_size=settings.loop.batch_size)
    return MMDiTTask(
        mmdit_config(settings.model),
        clips=ClipSource(_frozen_vae(settings), data=settings.data, settings=settings.train_mmdit),
        text=_frozen_text(settings),
        settings=settings.train_mmdit,
        batch_size=settings.loop.batch_size,
        reporter=reporter,
    )


def _weights(settings: TrainSettings, name: str) -> Path:
    path = Path(settings.weights) / name
    if not settings.weights or not path.exists():
        raise CheckpointError(
            f"weights={settings.weights!r} has no {name}",
            hint="the transformer needs the frozen autoencoder and text encoders: train them first, or point "
            "--set weights=FOLDER at them",
        )
    return path


def _frozen_vae(settings: TrainSettings) -> HunyuanVAE:
    vae = vae_on_meta(settings.vae)
    load_into_module(vae, _weights(settings, "vae.safetensors"), device="cpu", dtype=torch.float32)
    return vae.requires_grad_(False).eval().to(memory_format=torch.channels_last_3d)


def _frozen_text(settings: TrainSettings) -> Callable[[list[str]], tuple[Tensor, Tensor]]:
    t5 = T5Encoder.from_folder(
        _weights(settings, "t5"), max_length=settings.text.t5_max_length, device="cpu", dtype=torch.float32
    )
    clip = ClipEncoder.from_folder(
        _weights(settings, "clip"), max_length=settings.text.clip_max_length, device="cpu", dtype=torch.float32
    )

    def encode(captions: list[str]) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return t5.encode(captions).clone(), clip.encode(captions).clone()

    return encode
