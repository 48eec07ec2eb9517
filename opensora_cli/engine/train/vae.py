"""Training the causal autoencoder on the procedural world."""

import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from opensora_cli.core.files import atomic_path
from opensora_cli.data.scenes import render_scene, sample_scene
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.train import SceneSettings, VAETrainSettings


def to_pixels(frames_NTHWC: np.ndarray) -> Tensor:
    """Turn uint8 clips (N,T,H,W,3) into pixels (N,3,T,H,W) in [-1,1], laid out as convolutions like them."""
    pixels = torch.from_numpy(frames_NTHWC).permute(0, 4, 1, 2, 3).to(torch.float32) / 127.5 - 1.0
    return pixels.contiguous(memory_format=torch.channels_last_3d)


class VAETask:
    """Reconstruct clips: |error| + w·error² + w_kl·KL, all means; first single frames, then whole clips."""

    def __init__(self, config: HunyuanVAEConfig, *, data: SceneSettings, settings: VAETrainSettings, batch_size: int):
        self.vae = HunyuanVAE(config).to(memory_format=torch.channels_last_3d)
        self.module: nn.Module = self.vae
        self._data = data
        self._settings = settings
        self._batch_size = batch_size

    def loss(self, step: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch of pictures or clips, with PSNR (dB) and KL (nats per latent value)."""
        if step == self._settings.picture_steps > 0:
            move_to_last_tap(self.vae)
        pixels = self._batch(step, rng)
        mean, logvar = (value.float() for value in self.vae.encode_moments(pixels))
        latents = self.vae.scale_latents(mean + torch.exp(0.5 * logvar) * torch.randn_like(mean))
        decoded = self.vae.decode(latents).float()
        squared = F.mse_loss(decoded, pixels)
        kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
        loss = (
            F.l1_loss(decoded, pixels) + self._settings.squared_error_weight * squared + self._settings.kl_weight * kl
        )
        psnr = -10.0 * torch.log10(squared.detach() / 4.0)  # pixels span 2
        return loss, {"psnr": float(psnr), "kl": float(kl.detach())}

    def _batch(self, step: int, rng: np.random.Generator) -> Tensor:
        pictures = step < self._settings.picture_steps
        count = self._settings.picture_batch_size if pictures else self._batch_size
        frames = 1 if pictures else self._data.num_frames
        clips = [
            render_scene(sample_scene(rng), size=self._data.size, num_frames=frames, fps=self._data.fps)
            for _ in range(count)
        ]
        return to_pixels(np.stack(clips))

    def export(self, ema: nn.Module, folder: Path) -> None:
        """Write `vae.safetensors`, its latents brought to mean 0 and variance 1 in every channel."""
        assert isinstance(ema, HunyuanVAE)
        vae = copy.deepcopy(ema)
        whiten_latents(vae, self._sample_pixels())
        tensors = {name: value.contiguous() for name, value in vae.state_dict().items()}
        with atomic_path(folder / "vae.safetensors") as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})

    def _sample_pixels(self) -> Tensor:
        rng = np.random.default_rng(20)
        clips = [
            render_scene(sample_scene(rng), size=self._data.size, num_frames=self._data.num_frames, fps=self._data.fps)
            for _ in range(64)
        ]
        return to_pixels(np.stack(clips))


@torch.no_grad()
def move_to_last_tap(vae: HunyuanVAE) -> None:
    """Gather every causal kernel's taps in time into the last one, the present frame, in place.

    A picture, whose past is itself, is encoded and decoded as before; of a clip, every frame is now treated as that
    picture was. Trained on pictures alone, the taps only make sense in their sum, and would smear a clip in time.
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
    """
    means = torch.cat([vae.encode_moments(clip)[0] for clip in pixels_BCTHW.split(4)])
    mean_C = means.mean(dim=(0, 2, 3, 4)).double()
    std_C = means.std(dim=(0, 2, 3, 4)).double()
    channels = mean_C.numel()
    into, out_of = vae.quant_conv, vae.post_quant_conv
    assert into.bias is not None
    assert out_of.bias is not None
    weight, bias = into.weight.double(), into.bias.double()
    weight[:channels] /= std_C.view(-1, 1, 1, 1, 1)
    bias[:channels] = (bias[:channels] - mean_C) / std_C
    bias[channels:] -= 2.0 * std_C.log()  # the log variance of the shifted and scaled posterior
    into.weight.copy_(weight)
    into.bias.copy_(bias)
    out_weight = out_of.weight.double()
    out_of.bias.copy_(out_of.bias.double() + out_weight[:, :, 0, 0, 0] @ mean_C)
    out_of.weight.copy_(out_weight * std_C.view(1, -1, 1, 1, 1))
