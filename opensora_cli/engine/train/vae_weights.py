"""What is done to an autoencoder's weights besides learning."""

from collections.abc import Mapping

import torch
from torch import Tensor

from opensora_cli.engine.train.strategy.local import local
from opensora_cli.models.vae.hunyuan import HunyuanVAE


@torch.no_grad()
def move_to_last_tap(weights: Mapping[str, Tensor]) -> None:
    """Gather every causal kernel's taps in time into the last one, the present frame, in place.

    A picture, whose past is itself, is encoded and decoded as before; of a clip, every frame is now treated as that
    picture was. Trained on pictures alone, the taps only make sense in their sum, and would smear a clip in time.
    A second time changes nothing.

    Args:
        weights: of a causal autoencoder, by name, or this rank's parts of them.
    """
    for weight in map(local, weights.values()):
        if weight.ndim == 5 and weight.shape[2] > 1:
            total = weight.sum(dim=2)
            weight.zero_()
            weight[:, :, -1] = total


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
