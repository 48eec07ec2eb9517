"""The video DC-AE: its layers against plain formulas."""

import pytest
import torch
from closeness import assert_close
from torch.nn import functional

from opensora_cli.models.vae.dc_ae import ChannelRMSNorm, ClipConv3d, relu_attention


def random_clip(*shape, seed=1, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


def test_attention_adds_up_in_full_precision_under_autocast():
    q, k, v = (torch.ones(1, 1, 2, 5000, dtype=torch.bfloat16) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attended = relu_attention(q, k, v)
    assert attended.dtype == torch.float32
    assert_close(attended, torch.ones(1, 1, 2, 5000))


def test_a_norm_of_zeros_has_a_finite_gradient():
    hidden = torch.zeros(1, 4, 1, 1, 1, requires_grad=True)
    ChannelRMSNorm(4)(hidden).sum().backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize(("kernel_size", "num_frames"), [(3, 1), (3, 2), (3, 4), (5, 1), (5, 2), (5, 4), (5, 5)])
def test_bf16_results_and_gradients_of_short_clips_come_from_the_clip_alone(kernel_size, num_frames, channels):
    torch.manual_seed(0)
    conv = ClipConv3d(channels, 8, kernel_size, padding=kernel_size // 2)
    pixels = random_clip(1, channels, num_frames, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    plain = functional.conv3d(pixels, conv.weight, conv.bias, padding=kernel_size // 2)
    gradient = random_clip(*plain.shape, seed=2)
    (expected,) = torch.autograd.grad(plain, conv.weight, gradient)
    for _ in range(5):
        poison_free_memory()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = conv(pixels)
        torch.testing.assert_close(out.float(), plain, atol=0.05, rtol=0.05)
        poison_free_memory()
        (actual,) = torch.autograd.grad(out, conv.weight, gradient.bfloat16())
        torch.testing.assert_close(actual, expected, atol=0.3, rtol=0.05)


def poison_free_memory() -> None:
    """Leave NaN in it, so that what is read by mistake is not zero by chance."""
    poison = [torch.full((size,), torch.nan) for size in (100, 1000, 10_000, 100_000)]
    del poison
