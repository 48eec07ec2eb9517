"""The causal VAE: its sizes, and its layers against plain formulas."""

import pytest
import torch
from closeness import assert_close
from small_autoencoders import SMALL_HUNYUAN
from torch import nn

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.hunyuan_blocks import CausalConv3d, FrameCausalAttention
from opensora_cli.models.vae.resample import conv_of_upsampled

# Half the sides of the most positions that the released model's attention meets, 33 x 32 x 32.
FRAMES, EDGE = 17, 16
DENSE_MASK_BYTES = (FRAMES * EDGE * EDGE) ** 2 * 4


def small_vae(config=SMALL_HUNYUAN, *, seed=0):
    torch.manual_seed(seed)
    return HunyuanVAE(config)


def random_clip(*shape, seed=1, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


@pytest.mark.parametrize(
    ("widths", "time", "space", "factors", "num_latent_frames"),
    [
        ((8, 8, 8, 8), 4, 8, ((1, 2), (2, 2), (2, 2), (1, 1)), 3),
        ((8, 8, 8), 4, 4, ((2, 2), (2, 2), (1, 1)), 1),
        ((8, 8, 8), 2, 8, ((1, 2), (2, 2), (1, 2)), 3),
        ((8, 8, 8), 4, 2, ((2, 2), (2, 1), (1, 1)), 3),
        ((8,), 1, 1, ((1, 1),), 1),
    ],
)
def test_every_choice_of_ratios_compresses_by_them(widths, time, space, factors, num_latent_frames):
    config = HunyuanVAEConfig(
        latent_channels=2,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=2,
        time_compression_ratio=time,
        spatial_compression_ratio=space,
    )
    assert config.level_factors == factors
    vae = small_vae(config).double()
    pixels = random_clip(2, 3, (num_latent_frames - 1) * time + 1, 2 * space, 3 * space, dtype=torch.float64)
    with torch.no_grad():
        latents = vae.encode(pixels)
        assert latents.shape == (2, 2, num_latent_frames, 2, 3)
        decoded = vae.decode(latents)
        assert decoded.shape == pixels.shape
        for chunk_frames in (1, 2):
            assert_close(vae.decode(latents, chunk_frames=chunk_frames), decoded)


@pytest.mark.parametrize(
    ("time", "space", "num_frames", "memory_format"),
    [
        (1, 2, 3, torch.contiguous_format),
        (2, 1, 3, torch.channels_last_3d),
        (2, 2, 3, torch.contiguous_format),
        (2, 2, 1, torch.channels_last_3d),
        (1, 1, 1, torch.contiguous_format),
    ],
)
def test_conv_of_upsampled_equals_upsampling_then_convolving(time, space, num_frames, memory_format):
    torch.manual_seed(0)
    conv = CausalConv3d(4, 6).double()
    clip = random_clip(2, 4, num_frames, 3, 5, dtype=torch.float64).contiguous(memory_format=memory_format)
    clip.requires_grad_()
    wide = clip.repeat_interleave(space, dim=3).repeat_interleave(space, dim=4)
    expected = conv(torch.cat((wide[:, :, :1], wide[:, :, 1:].repeat_interleave(time, dim=2)), dim=2))
    actual = conv_of_upsampled(clip, conv.conv, time=time, space=space)
    assert_close(actual, expected)

    weighting = torch.randn_like(expected)
    inputs = (clip, conv.conv.weight, conv.conv.bias)
    gradients = [torch.autograd.grad((output * weighting).sum(), inputs) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, tolerance=1e-10, floor=1.0)  # that of the keys' bias is zero


def dense_attention(layer: FrameCausalAttention, hidden):
    """The formula with the full mask."""
    num_frames, height, width = hidden.shape[2:]
    tokens = layer.group_norm(hidden).flatten(2).transpose(1, 2)
    frame = torch.arange(num_frames).repeat_interleave(height * width)
    scores = layer.to_q(tokens) @ layer.to_k(tokens).transpose(1, 2) / tokens.shape[-1] ** 0.5
    scores = scores.masked_fill(frame[None, :] > frame[:, None], float("-inf"))
    out = layer.to_out[0](scores.softmax(-1) @ layer.to_v(tokens))
    return hidden + out.transpose(1, 2).reshape(hidden.shape)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_attention_equals_the_masked_formula_forward_and_backward(memory_format):
    torch.manual_seed(0)
    layer = FrameCausalAttention(8, num_groups=2).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    hidden = random_clip(2, 8, 4, 3, 5, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    actual, expected = layer(hidden), dense_attention(layer, hidden)
    assert_close(actual, expected)
    weighting = torch.randn_like(expected)
    inputs = (hidden, *layer.parameters())
    gradients = [torch.autograd.grad((output * weighting).sum(), inputs) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, tolerance=1e-10, floor=1.0)  # that of the keys' bias is zero


def test_attention_builds_no_tensor_of_the_order_of_the_dense_mask():
    torch.manual_seed(0)
    layer = FrameCausalAttention(8, num_groups=2)
    with torch.no_grad(), TensorBytes() as counter:
        layer(torch.randn(1, 8, FRAMES, EDGE, EDGE))
    # Not even one frame's scores against all positions.
    assert 0 < counter.peak_bytes < DENSE_MASK_BYTES / FRAMES / 2


def test_encode_scales_the_mode_or_a_seeded_sample_of_the_posterior():
    config = HunyuanVAEConfig(
        latent_channels=4,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        time_compression_ratio=2,
        spatial_compression_ratio=4,
        scale_factor=0.5,
        shift_factor=0.25,
    )
    vae, pixels = small_vae(config), random_clip(1, 3, 3, 8, 8)
    with torch.no_grad():
        mean, logvar = vae.encode_moments(pixels)
        mode = vae.encode(pixels)
        sample = vae.encode(pixels, generator=torch.Generator().manual_seed(5))
        again = vae.encode(pixels, generator=torch.Generator().manual_seed(5))
    assert_close(mode, 0.5 * (mean - 0.25))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(5))
    assert_close(sample, 0.5 * (mean + (logvar / 2).exp() * noise - 0.25))
    assert torch.equal(sample, again)
