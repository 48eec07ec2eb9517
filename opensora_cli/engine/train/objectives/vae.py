"""Objective `vae`: reconstruction of clips by an autoencoder."""

from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.train.objectives.base import VAE_FILE, Objective
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from opensora_cli.engine.encode.clip_cache import ClipCache
    from opensora_cli.engine.train.activations import BatchShape
    from opensora_cli.engine.train.distribution import Distribution
    from opensora_cli.engine.train.objectives.flow_matching import TokenWeights
    from opensora_cli.engine.train.trainer import Task


class Reconstruction(Objective):
    """Errors of pixels, KL divergence, a perceptual term, and a discriminator."""

    weights_file = VAE_FILE

    def frozen_parts(self, settings: TrainSettings) -> dict[str, Path | None]:
        files = {file: Path(file) for file in settings.train_vae.perceptual_files}
        return {name: path if path.exists() else None for name, path in files.items()}

    def require_frozen(self, settings: TrainSettings) -> None:
        if missing := [name for name, path in self.frozen_parts(settings).items() if path is None]:
            raise CheckpointError(f"train_vae.perceptual_files: {', '.join(missing)} does not exist")

    def layer_values(self, settings: TrainSettings, shape: "BatchShape") -> int:
        return shape.batch_size * shape.num_frames * shape.height * shape.width * settings.vae.sizes.pixel_width

    def measured_steps(self, settings: TrainSettings) -> tuple[int, ...]:
        chosen = settings.train_vae
        opposed_from = chosen.discriminator.start_step if chosen.discriminator.weight else 0
        whole_from = settings.loop.steps - chosen.whole_steps if chosen.whole_steps else 0
        last_phase = max(opposed_from, whole_from)
        return (0, 0, last_phase) if last_phase else (0, 1)

    def stand_in(self, settings: TrainSettings) -> "tuple[Task, list[nn.Module]]":
        import torch

        from opensora_cli.engine.train.objectives.reconstruction import build_vae_task

        without_files = settings.replace({"train_vae.perceptual_files": (), "train_vae.perceptual_weight": 0.0})
        return build_vae_task(without_files, device=torch.device("cpu"), reporter=SilentReporter()), []

    def outline(self, settings: TrainSettings) -> "nn.Module":
        from opensora_cli.engine.components.autoencoders import autoencoder_on_meta
        from opensora_cli.engine.train.objectives.reconstruction import freeze_encoder

        autoencoder = autoencoder_on_meta(settings.vae)
        if settings.train_vae.decoder_only:
            freeze_encoder(autoencoder)
        return autoencoder

    def build(
        self,
        settings: TrainSettings,
        *,
        distribution: "Distribution",
        clips: "ClipCache | None",
        token_weights: "TokenWeights | None",
        reporter: Reporter,
    ) -> "Task":
        from opensora_cli.checkpoint.load import fill_module
        from opensora_cli.checkpoint.opening import open_checkpoint
        from opensora_cli.engine.train.objectives.reconstruction import build_vae_task

        task = build_vae_task(settings, device=distribution.device, reporter=reporter)
        if (path := self.first_weights(settings)) is not None:
            fill_module(task.module, open_checkpoint(path))
        # A distribution moves trained weights, but not a frozen encoder.
        task.module.to(distribution.device)
        return task


OBJECTIVE = Reconstruction()
