"""Decoding some frames at a time: the same pixels, in memory that does not grow with the clip."""

from unittest import mock

import pytest
import torch
from closeness import assert_close
from small_autoencoders import SMALL_HUNYUAN
from torch import nn

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae import chunked
from opensora_cli.models.vae.config import NO_TILING, Tiling
from opensora_cli.models.vae.hunyuan import HunyuanVAE


def small_vae(config=SMALL_HUNYUAN, *, dtype=torch.float32):
    """A decoder whose every weight matters: fresh norms are all alike."""
    torch.manual_seed(0)
    vae = HunyuanVAE(config).to(dtype).requires_grad_(False)
    for module in vae.modules():
        if isinstance(module, nn.GroupNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return vae


def recorded(vae, name, clip, **arguments):
    """What comes of all frames at once, as where gradients are recorded."""
    vae.requires_grad_(True)
    try:
        return getattr(vae, name)(clip, **arguments).detach()
    finally:
        vae.requires_grad_(False)


def latents_of(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "num_latent_frames", "tiling"),
    [
        (torch.float64, 1e-12, 1, NO_TILING),
        (torch.float64, 1e-12, 2, Tiling(spatial=True)),
        (torch.float64, 1e-12, 5, NO_TILING),
        pytest.param(torch.float32, 1e-5, 5, NO_TILING, marks=pytest.mark.slow),
    ],
)
def test_every_chunk_length_gives_the_same_pixels(dtype, tolerance, num_latent_frames, tiling):
    vae, latents = small_vae(dtype=dtype), latents_of(2, 4, num_latent_frames, 3, 6, dtype=dtype)
    whole = recorded(vae, "decode", latents, tiling=tiling)
    assert_close(vae.decode(latents, tiling=tiling), whole, tolerance=tolerance)
    # The highest resolution has 1 + 4 (T-1) frames.
    for chunk_frames in {1, 2, num_latent_frames, 7, 99}:
        in_chunks = vae.decode(latents, tiling=tiling, chunk_frames=chunk_frames)
        assert in_chunks.shape == whole.shape
        assert (in_chunks - whole).abs().max() <= tolerance * whole.abs().max()


@pytest.mark.parametrize("tiling", [NO_TILING, Tiling(spatial=True, temporal=True)])
@pytest.mark.parametrize("num_frames", [1, 5, 21])
def test_a_clip_is_encoded_in_chunks_to_the_same_latents(num_frames, tiling):
    vae = small_vae(dtype=torch.float64)
    pixels = latents_of(2, 3, num_frames, 20, 12, dtype=torch.float64)
    # Chunks of 4 frames and more than one of them, as with large pictures.
    with mock.patch.object(chunked, "_LEAST_VALUES", 1):
        latents = vae.encode(pixels, tiling=tiling)
    assert_close(latents, recorded(vae, "encode", pixels, tiling=tiling), tolerance=1e-12)


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_without_gradients_a_cpu_needs_half_of_the_memory(name):
    vae = small_vae()
    clip = latents_of(1, 3, 17, 64, 64) if name == "encode" else latents_of(1, 4, 5, 16, 16)
    peaks = []
    with torch.no_grad():
        for is_frozen in (False, True):
            vae.requires_grad_(not is_frozen)
            with TensorBytes() as counter:
                getattr(vae, name)(clip)
            peaks.append(counter.peak_bytes)
    assert peaks[1] < 0.6 * peaks[0]


# --- pieces and canvas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_frames", [None, 2])
@pytest.mark.parametrize(("tiling", "lengths"), [(NO_TILING, [41]), (Tiling(temporal=True), [13, 12, 12, 4])])
def test_pieces_are_the_clip_in_order(tiling, lengths, chunk_frames):
    vae, latents = small_vae(), latents_of(1, 4, 11, 2, 2)
    arguments = {"tiling": tiling, "chunk_frames": chunk_frames, "canvas": torch.device("cpu")}
    pieces = list(vae.decode_pieces(latents, **arguments))
    assert [piece.shape[2] for piece in pieces] == lengths
    assert torch.equal(torch.cat(pieces, dim=2), vae.decode(latents, **arguments))


def test_a_piece_comes_before_the_next_is_computed():
    vae, latents = small_vae(), latents_of(1, 4, 11, 2, 2)
    calls = []
    vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    pieces = vae.decode_pieces(latents, tiling=Tiling(temporal=True))
    assert not calls
    next(pieces)
    assert len(calls) == 1
