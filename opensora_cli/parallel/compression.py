"""Rounding of exchanged elements, which makes an all-to-all send fewer bytes."""

import torch
from torch import Tensor

from opensora_cli.parallel.collectives import Exchange
from opensora_cli.parallel.shares import SCALE_BYTES, Parts, WireFormat

_FP8 = torch.float8_e4m3fn


def compressed(exchange: Exchange, wire: WireFormat | None, sent: Tensor, parts: Parts) -> Tensor:
    """Exchange parts through `exchange`, with elements rounded to `wire`. None means no rounding.

    The error of an element x of an fp32 tensor is at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16, or
    2^-18 of the largest element of its row if that is more; a row is along the last dimension. A row with an infinity
    or NaN arrives as NaN with `fp8`. `bf16` saves nothing for a 16-bit tensor. Raises ValueError like `Parts.on_wire`.
    """
    if wire is None:
        return exchange(sent, parts)
    return unpacked(exchange(to_wire(sent, parts, wire), parts.on_wire(wire)), parts, wire, dtype=sent.dtype)


def to_wire(sent: Tensor, parts: Parts, wire: WireFormat) -> Tensor:
    """Return flat elements in the format of the wire. Raises ValueError like `Parts.on_wire`."""
    if wire == "bf16":
        return sent.to(torch.bfloat16)
    parts.on_wire(wire)
    values, scales = _quantize(sent.view(-1, parts.row or 1))
    # Values and scales share a message because a second one would cost its latency again.
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1).view(-1)


def unpacked(received: Tensor, parts: Parts, wire: WireFormat, *, dtype: torch.dtype) -> Tensor:
    """Return the elements from the format of the wire; inverse of `to_wire`."""
    if wire == "bf16":
        return received.to(dtype)
    rows = received.view(-1, (parts.row or 1) + SCALE_BYTES)
    values, scales = rows[:, :-SCALE_BYTES], rows[:, -SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(dtype).view(-1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values, and the fp32 scale of each row (..., 1) as a factor for them; the largest value becomes 448.

    Rows are along the last dimension, and have at least one element.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales
