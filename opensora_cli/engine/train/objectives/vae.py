"""Objective `vae`: errors of pixels, KL divergence, a perceptual term, and a discriminator."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.load import fill_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.device import queued_copy
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.architectures import autoencoder_on_meta, new_autoencoder
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.train.activations import BatchShape
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import find_first_weights
from opensora_cli.engine.train.objectives import Objective, TokenWeights
from opensora_cli.engine.train.objectives.vae_terms import (
    PerceptualDistance,
    adaptive_weight,
    discriminator_role,
    gradient_error,
    gradient_norm,
    hinge_loss,
    kl_divergence,
    load_perceptual_distance,
    psnr,
    with_gradient,
)
from opensora_cli.engine.train.trainer import MODEL, Losses, Role, Task
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.train import VAE_FILE, TrainSettings
from opensora_cli.settings.train_sections import VAETrainSettings

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class VAETask(Task):
    """Training task that reconstructs clips and pictures.

    The loss is |error| + a·error² + b·|error of gradients| + c·LPIPS + d·KL + e·w·(-logit), all means. The logit is
    that of the discriminator, and w balances gradients (see `adaptive_weight`).
    """

    module: Autoencoder
    adversary: Role | None

    def __init__(
        self,
        autoencoder: Autoencoder,
        *,
        settings: VAETrainSettings,
        perceptual: PerceptualDistance | None = None,
        adversary: Role | None = None,
    ) -> None:
        super().__init__(autoencoder, roles={} if adversary is None else {"adversary": adversary})
        self.adversary = adversary
        self._settings = settings
        self._perceptual = perceptual
        self._is_opposed = False

    def begin_step(self, step: int) -> None:
        """Turn the discriminator on at its first step."""
        self._is_opposed = self.adversary is not None and step >= self._settings.discriminator.start_step

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch of clips or pictures, with PSNR (dB), KL (nats per latent value) and more.

        Without gradients, the adversarial term is dropped and clips stay whole, so that losses of different steps and
        runs can be compared.
        """
        return self._reconstruct(self._pixels(batch, rng), rng)[:2]

    def losses(self, batch: ClipBatch, rng: SampleRng) -> Losses:
        """Yield the autoencoder's loss, and the discriminator's on the same clips once it has started."""
        pixels = self._pixels(batch, rng)
        loss, figures, made = self._reconstruct(pixels, rng)
        yield MODEL, loss, figures
        if self._is_opposed and self.adversary is not None:
            # One pass for both: DDP needs one forward for each backward.
            real, fake = self.adversary.forward(torch.cat([pixels, made])).float().chunk(2)
            means = {"real_logit": real.detach().mean(), "made_logit": fake.detach().mean()}
            yield "adversary", hinge_loss(real, fake), means

    def tokens(self, batch: ClipBatch) -> int:
        one, grid, crop = batch.requests[0], self.module.grid, self._settings.crop_size
        rows, columns = grid.latent_size(*(min(side, crop or side) for side in (one.height, one.width)))
        return len(batch.requests) * grid.latent_frames(one.num_frames) * rows * columns

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write `vae.safetensors`, in half precision if the settings ask for it."""
        dtype = torch.float16 if self._settings.export_half else torch.float32
        write_weights(folder / VAE_FILE, weights, dtype=dtype)

    def _reconstruct(self, pixels: Tensor, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss, its figures and the detached reconstructions of clips."""
        made, mean, logvar = self.forward(pixels, generator=rng.torch)
        loss, figures = self._pixel_loss(made.float(), pixels)
        if logvar is not None:
            kl = kl_divergence(mean.float(), logvar.float())
            loss = loss + self._settings.kl_weight * kl
            figures["kl"] = kl.detach()
        return loss, figures, made.detach()

    def _pixel_loss(self, made: Tensor, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the decoded pixels. Its gradient by the pixels is computed immediately, term by term."""
        if not torch.is_grad_enabled():
            return self._reconstruction_loss(made, pixels)
        # The backward pass ends at this leaf, and frees the activations of LPIPS and the discriminator.
        leaf = made.detach().requires_grad_()
        value, figures = self._reconstruction_loss(leaf, pixels)
        (gradient,) = torch.autograd.grad(value, leaf)
        if self._is_opposed and self.adversary is not None:
            # Differentiated only by the clips, so that the discriminator gets no gradient, and DDP starts no exchange.
            generator_loss = -self.adversary.module(leaf).float().mean()
            (against,) = torch.autograd.grad(generator_loss, leaf)
            last = self.module.last_layer.weight
            balance = adaptive_weight(gradient_norm(made, last, gradient), gradient_norm(made, last, against))
            weight = self._settings.discriminator.weight * balance
            value = value.detach() + weight * generator_loss.detach()
            gradient = gradient + weight * against
            figures |= {"adversarial": generator_loss.detach(), "adversarial_weight": weight}
        return with_gradient(made, value=value, gradient=gradient), figures

    def _reconstruction_loss(self, made: Tensor, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self._settings
        squared = nn.functional.mse_loss(made, pixels)
        loss = nn.functional.l1_loss(made, pixels) + settings.squared_error_weight * squared
        figures = {"psnr": psnr(squared.detach())}
        if settings.gradient_weight:
            loss = loss + settings.gradient_weight * gradient_error(made, pixels)
        if self._perceptual is not None:
            distance = self._perceptual(made, pixels)
            loss = loss + settings.perceptual_weight * distance
            figures["lpips"] = distance.detach()
        return loss, figures

    def _pixels(self, batch: ClipBatch, rng: SampleRng) -> Tensor:
        frames = batch.pixels_BTHWC
        assert frames is not None, "autoencoders learn from pixels"
        count, num_frames = frames.shape[:2]
        share = self._settings.single_frame_share if torch.is_grad_enabled() else 0.0
        if share and num_frames > 1 and rng.numpy.random() < share:
            frames = frames[torch.arange(count), rng.numpy.integers(num_frames, size=count)].unsqueeze(1)
        if self._settings.crop_size and torch.is_grad_enabled():
            frames = cut_squares(frames, self._settings.crop_size, rng.numpy)
        return to_pixels(queued_copy(frames, next(self.module.parameters()).device))


def vae_task(settings: TrainSettings, *, device: torch.device, reporter: Reporter) -> VAETask:
    """Return the task with random weights from torch's global generator, on the host."""
    chosen = settings.train_vae
    perceptual = None
    if chosen.perceptual_files:
        perceptual = load_perceptual_distance([Path(file) for file in chosen.perceptual_files]).to(device)
    elif chosen.perceptual_weight:
        reporter.warn(
            f"train_vae.perceptual_weight={chosen.perceptual_weight:g}, but the perceptual term is off: "
            "train_vae.perceptual_files names no weights"
        )
    autoencoder = new_autoencoder(settings.vae)
    if chosen.decoder_only:
        freeze_encoder(autoencoder)
    if device.type == "cpu":
        # This memory format is fast for convolutions there.
        for weight in autoencoder.parameters():
            if weight.ndim in _CHANNELS_LAST:
                weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])
    adversary = None
    if chosen.discriminator.weight:
        adversary = discriminator_role(chosen.discriminator, optimizer=settings.optimizer)
    return VAETask(autoencoder, settings=chosen, perceptual=perceptual, adversary=adversary)


class VAEObjective(Objective):
    """Objective of an autoencoder."""

    def build(
        self,
        settings: TrainSettings,
        *,
        distribution: Distribution,
        clips: ClipCache | None,
        token_weights: TokenWeights | None,
        reporter: Reporter,
    ) -> VAETask:
        """Return the task with its first weights. Raises the errors of `vae_task`, and CheckpointError for `init`."""
        task = vae_task(settings, device=distribution.device, reporter=reporter)
        if (path := find_first_weights(settings)) is not None:
            fill_module(task.module, open_checkpoint(path))
        # A distribution moves trained weights, but not a frozen encoder.
        task.module.to(distribution.device)
        return task

    def stand_in(self, settings: TrainSettings) -> tuple[VAETask, list[nn.Module]]:
        without_files = settings.replace({"train_vae.perceptual_files": (), "train_vae.perceptual_weight": 0.0})
        return vae_task(without_files, device=torch.device("cpu"), reporter=SilentReporter()), []

    def outline(self, settings: TrainSettings) -> Autoencoder:
        autoencoder = autoencoder_on_meta(settings.vae)
        if settings.train_vae.decoder_only:
            freeze_encoder(autoencoder)
        return autoencoder

    def layer_values(self, settings: TrainSettings, shape: BatchShape) -> int:
        """Return the number of values of a micro-batch in a layer of full resolution."""
        return shape.batch_size * shape.num_frames * shape.height * shape.width * settings.vae.sizes.pixel_width

    def measured_steps(self, settings: TrainSettings) -> tuple[int, ...]:
        """Return the first two steps, or the first and one with the discriminator."""
        discriminator = settings.train_vae.discriminator
        opposed_from = discriminator.start_step if discriminator.weight else 0
        return (0, 0, opposed_from) if opposed_from else (0, 1)


OBJECTIVE = VAEObjective()


def freeze_encoder(autoencoder: Autoencoder) -> None:
    """Freeze all weights that compute latents; only the decoder is trained."""
    for name, weight in autoencoder.named_parameters():
        weight.requires_grad_(name.startswith(("decoder.", "post_quant_conv.")))


def to_pixels(frames_BTHWC: Tensor) -> Tensor:
    """Return uint8 clips (B,T,H,W,3) as pixels (B,3,T,H,W) in [-1,1], in the fast memory format of their device."""
    pixels = frames_BTHWC.permute(0, 4, 1, 2, 3).to(torch.float32) / 127.5 - 1.0
    is_on_cpu = pixels.device.type == "cpu"
    return pixels.contiguous(memory_format=torch.channels_last_3d if is_on_cpu else torch.contiguous_format)


def cut_squares(frames_BTHWC: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """Return a random square crop of every clip. Sides shorter than `size` are kept whole."""
    count, _, height, width, _ = frames_BTHWC.shape
    tops, lefts = (rng.integers(max(side - size, 0) + 1, size=count) for side in (height, width))
    return torch.stack(
        [
            clip_THWC[:, top : top + size, left : left + size]
            for clip_THWC, top, left in zip(frames_BTHWC, tops, lefts, strict=True)
        ]
    )
