"""Compute dtype of layers. Trained weights, gradients and moments are in float32."""

import torch

from opensora_cli.settings.train_loop import Compute

DTYPES = {Compute.FP32: torch.float32, Compute.BF16: torch.bfloat16}


def autocast(compute: Compute, device: torch.device) -> torch.autocast:
    """Return an autocast context in which layers compute in `compute`."""
    return torch.autocast(device.type, dtype=DTYPES[compute], enabled=compute is not Compute.FP32)


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has native bfloat16 matmul; without it, float32 is far faster."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
