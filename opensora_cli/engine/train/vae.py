"""Training the causal autoencoder on the procedural world."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opensora_cli.data.scenes import render_scene, sample_scene
from opensora_cli.engine.train.files import VAE_FILE, write_weights
from opensora_cli.engine.train.loop import Chance
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.train import SceneSettings, VAETrainSettings

# The latents are measured on the same clips whatever the run's seed.
_WHITENING_SEED = 20


def channels_last(vae: HunyuanVAE) -> HunyuanVAE:
    """Lay the weights out, in place, as convolutions on a CPU like them; returns the same module."""
    vae.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # not in torch's stubs
    return vae


def to_pixels(frames_NTHWC: NDArray[np.uint8]) -> Tensor:
    """Turn uint8 clips (N,T,H,W,3) into pixels (N,3,T,H,W) in [-1,1], laid out as convolutions like them."""
    pixels = torch.from_numpy(frames_NTHWC).permute(0, 4, 1, 2, 3).to(torch.float32) / 127.5 - 1.0
    return pixels.contiguous(memory_format=torch.channels_last_3d)


class VAETask:
    """Reconstruct clips: |error| + w·error² + w_kl·KL, all means; first single frames, then whole clips.

    Args:
        config: sizes of the autoencoder.
        data: the clips.
        settings: the objective, and how long to stay with single frames.
        batch_size: clips of a step.
    """

    def __init__(
        self, config: HunyuanVAEConfig, *, data: SceneSettings, settings: VAETrainSettings, batch_size: int
    ) -> None:
        self.module = channels_last(HunyuanVAE(config))
        self._data = data
        self._settings = settings
        self._batch_size = batch_size

    def begin_step(self, step: int, ema: HunyuanVAE) -> None:
        """Rework weights and average for whole clips when the single frames are over.

        The moments of the optimizers stay: they fade within some tens of steps, and without them the first steps would
        be as large as a single noisy gradient makes them.
        """
        if step == self._settings.picture_steps > 0:
            move_to_last_tap(self.module)
            move_to_last_tap(ema)

    def loss(self, step: int, chance: Chance) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch of pictures or clips, with PSNR (dB) and KL (nats per latent value)."""
        pixels = self._batch(step, chance.rng)
        mean, logvar = (moment.float() for moment in self.module.encode_moments(pixels))
        noise = torch.empty_like(mean).normal_(generator=chance.generator)
        decoded = self.module.decode(self.module.scale_latents(mean + torch.exp(0.5 * logvar) * noise)).float()
        absolute = nn.functional.l1_loss(decoded, pixels)
        squared = nn.functional.mse_loss(decoded, pixels)
        kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
        loss = absolute + self._settings.squared_error_weight * squared + self._settings.kl_weight * kl
        psnr = -10.0 * torch.log10(squared.detach() / 4.0)  # pixels span 2
        return loss, {"psnr": float(psnr), "kl": float(kl.detach())}

    def export(self, ema: HunyuanVAE, folder: Path) -> None:
        """Write `vae.safetensors` in half precision, its latents brought to mean 0 and variance 1 in every channel."""
        vae = deepcopy(ema)
        rng = np.random.default_rng(_WHITENING_SEED)
        count = self._settings.whitening_clips
        whiten_latents(vae, self._render(rng, count=count, num_frames=self._data.num_frames))
        write_weights(folder / VAE_FILE, {name: weight.half() for name, weight in vae.state_dict().items()})

    def _batch(self, step: int, rng: np.random.Generator) -> Tensor:
        if step < self._settings.picture_steps:
            return self._render(rng, count=self._settings.picture_batch_size, num_frames=1)
        return self._render(rng, count=self._batch_size, num_frames=self._data.num_frames)

    def _render(self, rng: np.random.Generator, *, count: int, num_frames: int) -> Tensor:
        size, fps = self._data.size, self._data.fps
        clips = [render_scene(sample_scene(rng), size=size, num_frames=num_frames, fps=fps) for _ in range(count)]
        return to_pixels(np.stack(clips))


@torch.no_grad()
def move_to_last_tap(vae: HunyuanVAE) -> None:
    """Gather every causal kernel's taps in time into the last one, the present frame, in place.

    A picture, whose past is itself, is encoded and decoded as before; of a clip, every frame is now treated as that
    picture was. Trained on pictures alone, the taps only make sense in their sum, and would smear a clip in time.
    A second time changes nothing.
    """
    for layer in vae.modules():
        if isinstance(layer, nn.Conv3d) and layer.kernel_size[0] > 1:
            total = layer.weight.sum(dim=2)
            layer.weight.zero_()
            layer.weight[:, :, -1] = total


@torch.no_grad()
def whiten_latents(vae: HunyuanVAE, pixels_BCTHW: Tensor) -> None:
    """Fold a shift and scale of every latent channel into the 1x1 convolutions around the latents, in place.

    Afterwards the posterior means of clips like `pixels_BCTHW` have mean 0 and variance 1 in each channel, and decoding
    undoes it exactly: one scale factor for all channels, as the configuration has it, then suits them all.

    Args:
        vae: the autoencoder.
        pixels_BCTHW: clips, in [-1,1].
    """
    means = torch.cat([vae.encode_moments(clips)[0] for clips in torch.split(pixels_BCTHW, 4)])
    mean_C = means.mean(dim=(0, 2, 3, 4)).double()
    std_C = means.std(dim=(0, 2, 3, 4)).double()
    channels = mean_C.numel()
    into, out_of = (
        {name: weight.double() for name, weight in layer.state_dict().items()}
        for layer in (vae.quant_conv, vae.post_quant_conv)
    )
    into["weight"][:channels] /= std_C.view(-1, 1, 1, 1, 1)
    into["bias"][:channels] = (into["bias"][:channels] - mean_C) / std_C
    into["bias"][channels:] -= 2.0 * std_C.log()  # the log variance of the shifted and scaled posterior
    out_of["bias"] += out_of["weight"][:, :, 0, 0, 0] @ mean_C
    out_of["weight"] *= std_C.view(1, -1, 1, 1, 1)
    vae.quant_conv.load_state_dict(into)
    vae.post_quant_conv.load_state_dict(out_of)
