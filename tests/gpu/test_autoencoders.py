"""The DC-AE and the 2D autoencoder on a CUDA device: the same function, trainable, and tiles that bound the memory."""

import pytest
import torch
from small_autoencoders import SMALL_DC_AE, SMALL_FLUX_AE

from opensora_cli.models.vae.config import DCAEConfig, Tiling
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.flux_ae import FluxAE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"dc_ae": lambda: DCAE(SMALL_DC_AE), "flux_ae": lambda: FluxAE(SMALL_FLUX_AE)}


def random_clip(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("num_frames", [1, 8])
def test_the_same_function_as_on_a_cpu(kind, num_frames):
    torch.manual_seed(0)
    vae = SMALL[kind]().requires_grad_(False)
    pixels = random_clip(1, 3, num_frames, 32, 48)
    latents = vae.encode(pixels)
    decoded = vae.decode(latents)
    with torch.backends.cudnn.flags(allow_tf32=False):
        vae.to(CUDA)
        torch.testing.assert_close(vae.encode(pixels.to(CUDA)).cpu(), latents, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(vae.decode(latents.to(CUDA), canvas=CPU), decoded, atol=1e-4, rtol=1e-4)


def peak_bytes(vae, *, size, tiling):
    pixels = random_clip(1, 3, 32, *size).to(CUDA, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoded = vae.decode(vae.encode(pixels, tiling=tiling), tiling=tiling, canvas=CPU)
    assert decoded.shape == pixels.shape
    return torch.cuda.max_memory_allocated() - before


def test_tiles_bound_the_memory_of_the_released_dc_ae():
    with CUDA:
        vae = DCAE(DCAEConfig()).bfloat16().requires_grad_(False)
    tiling = Tiling(spatial=True, temporal=True)
    small = peak_bytes(vae, size=(256, 256), tiling=tiling)
    large = peak_bytes(vae, size=(512, 768), tiling=tiling)
    assert large < 1.2 * small
    assert large < 0.5 * peak_bytes(vae, size=(512, 768), tiling=Tiling())
