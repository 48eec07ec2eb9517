"""Latents to tokens and back."""

import pytest
import torch

from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents


def _latents(batch=2, channels=3, frames=4, height=6, width=8):
    return torch.randn(batch, channels, frames, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("patch_size", [1, 2])
def test_unpack_undoes_pack(patch_size):
    latents = _latents()
    packed = pack_latents(latents, patch_size)
    assert torch.equal(unpack_latents(packed, num_latent_frames=4, height=6, width=8, patch_size=patch_size), latents)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5x8 do not divide into patches of 2x2"):
        pack_latents(_latents(height=5), 2)
    packed = pack_latents(_latents(), 2)
    with pytest.raises(ValueError, match="48 tokens are not 5 frames of 6x8"):
        unpack_latents(packed, num_latent_frames=5, height=6, width=8, patch_size=2)


def test_position_ids_are_in_the_order_of_the_tokens():
    frames, rows, columns = 3, 2, 4
    grid = torch.stack(
        torch.meshgrid(*(torch.arange(size, dtype=torch.float32) for size in (frames, rows, columns)), indexing="ij")
    )
    tokens = pack_latents(grid[None], 1)
    ids = position_ids(2, frames, rows, columns)
    assert ids.shape == (2, frames * rows * columns, 3)
    assert ids.dtype is torch.float32
    assert torch.equal(ids, tokens.expand(2, -1, -1))


def test_conditioning_has_the_mask_first():
    latents = _latents()
    mask = torch.zeros(2, 1, 4, 6, 8)
    mask[:, :, 0] = 1
    packed = pack_conditioning(mask, latents, 2)
    assert packed.shape == (2, 48, 16)
    assert torch.equal(packed[..., :4], pack_latents(mask, 2))
    assert torch.equal(packed[..., 4:], pack_latents(latents, 2))
