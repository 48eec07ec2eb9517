"""Convolutions without gradients: which kernels they are."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_cli.models.vae.dc_ae import ClipConv3d
from opensora_cli.models.vae.hunyuan_blocks import CausalConv3d, Upsample


def clip_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Convolved(TorchDispatchMode):
    """Knows in which dtypes was convolved."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


LAYERS = {
    "causal": lambda: CausalConv3d(2, 2),
    "upsampling": lambda: Upsample(2, time=2, space=2),
    "clip": lambda: ClipConv3d(2, 2, 3, padding=1),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("shape", "amx", "dtype"),
    [
        ((1, 2, 1, 96, 96), True, torch.float32),
        ((1, 2, 9, 96, 96), True, torch.float32),
        ((1, 2, 1, 96, 96), False, torch.bfloat16),
        ((1, 2, 13, 96, 96), True, torch.bfloat16),
        ((1, 2, 1, 64, 64), True, torch.bfloat16),
    ],
)
def test_few_large_frames_are_trained_in_float32_where_bfloat16_would_break_the_process(kind, shape, amx, dtype):
    torch.manual_seed(0)
    layer, clip = LAYERS[kind](), clip_of(*shape)
    with mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=amx), Convolved() as convolved:
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(clip)
        assert convolved.dtypes == {dtype}
        assert out.dtype is torch.bfloat16
        if dtype is torch.float32:
            assert torch.equal(out, layer(clip).bfloat16())
