"""Copies of tensors to a device."""

import torch
from torch import Tensor


def queued_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device without waiting for queued work; a GPU copies it in the order of its queue."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # torch reuses this pinned memory only after the copy is done.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)
