"""Exported autoencoders of the demo: from pictures to clips, and latents of mean 0 and variance 1."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from demo_world.scenes import render_scene, sample_scene
from demo_world.settings import DemoSettings, SceneSettings
from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.train.objectives.vae import to_pixels
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.components import VAESettings

# The latents are whitened by the same clips for every seed of a run.
_WHITENING_SEED = 20


def finish_autoencoder(path: Path, vae: VAESettings, demo: DemoSettings, *, dtype: torch.dtype) -> None:
    """Replace an exported autoencoder by the one that `demo` asks for, rounded to `dtype`."""
    weights = load_file(path)
    if demo.gather_taps:
        gather_taps(weights)
    if demo.whitening_clips:
        autoencoder = new_autoencoder(vae)
        assert isinstance(autoencoder, HunyuanVAE)
        autoencoder.load_state_dict(weights)
        whiten_latents(autoencoder.eval(), _whitening_clips(demo.whitening_clips, demo.scenes))
        weights = autoencoder.state_dict()
    write_weights(path, weights, dtype=dtype)


def _whitening_clips(count: int, scenes: SceneSettings) -> Tensor:
    rng = np.random.default_rng(_WHITENING_SEED)
    clips = [
        render_scene(sample_scene(rng), size=scenes.size, num_frames=scenes.num_frames, fps=scenes.fps)
        for _ in range(count)
    ]
    return to_pixels(torch.from_numpy(np.stack(clips)))


@torch.no_grad()
def gather_taps(weights: Mapping[str, Tensor]) -> None:
    """Gather what a causal kernel's taps in time sum up to in the last one, the present frame, in place.

    A picture, whose past is itself, is encoded and decoded as before. Trained on pictures alone, the taps only make
    sense in their sum, and would smear a clip in time. What the past ones differ by is as random as at first, and
    stays: with zeros, neither encoder nor decoder would have a reason to tell the frames of a group apart before the
    other does. A second time changes nothing. `weights` are those of a causal autoencoder, by name, or this rank's
    parts of them.
    """
    for weight in weights.values():
        if weight.ndim == 5 and weight.shape[2] > 1:
            past = weight[:, :, :-1]
            weight[:, :, -1] += past.sum(dim=2)
            past.copy_((past - past.flip(2)) / 2)


@torch.no_grad()
def whiten_latents(vae: HunyuanVAE, pixels_BCTHW: Tensor) -> None:
    """Fold a shift and scale of every latent channel into the 1x1 convolutions around the latents, in place.

    Afterwards the posterior means of clips like `pixels_BCTHW`, in [-1,1], have mean 0 and variance 1 in each channel,
    and decoding undoes it exactly: one scale factor for all channels, as the configuration has it, then suits them all.
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
