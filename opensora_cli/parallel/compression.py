"""Rounding of exchanged elements, which makes an all-to-all send fewer bytes."""

from typing import Literal

import torch
from torch import Tensor

from opensora_cli.parallel.collectives import Exchange, Parts

WireFormat = Literal["bf16", "fp8"]
"""Format of elements on the wire: `bf16` has two bytes each; `fp8` has one (e4m3), and four per row for a scale."""

_FP8 = torch.float8_e4m3fn
_SCALE_BYTES = 4


def compressed(exchange: Exchange, wire: WireFormat | None, sent: Tensor, parts: Parts) -> Tensor:
    """Exchange parts through `exchange`, with elements rounded to `wire`. None means no rounding.

    The error of an element x of an fp32 tensor is at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16, or
    2^-18 of the largest element of its row if that is more; a row is along the last dimension. A row with an infinity
    or NaN arrives as NaN with `fp8`. `bf16` saves nothing for a 16-bit tensor. Raises ValueError like `wire_parts`.
    """
    if wire is None:
        return exchange(sent, parts)
    return unpacked(exchange(to_wire(sent, parts, wire), wire_parts(parts, wire)), parts, wire, dtype=sent.dtype)


def wire_parts(parts: Parts, wire: WireFormat | None) -> Parts:
    """Return the parts for the result of `to_wire`. Raises ValueError for `fp8` if rows are divided or joined."""
    if wire != "fp8":
        return parts
    if parts.row is None:
        raise ValueError("rows of fp8 lie along the last dimension, which can be neither divided nor joined")
    return parts._replace(unit=parts.unit // parts.row * (parts.row + _SCALE_BYTES))


def to_wire(sent: Tensor, parts: Parts, wire: WireFormat) -> Tensor:
    """Return flat elements in the format of the wire. Raises ValueError like `wire_parts`."""
    if wire == "bf16":
        return sent.to(torch.bfloat16)
    wire_parts(parts, wire)
    values, scales = _quantize(sent.view(-1, parts.row or 1))
    # Values and scales share a message because a second one would cost its latency again.
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1).view(-1)


def unpacked(received: Tensor, parts: Parts, wire: WireFormat, *, dtype: torch.dtype) -> Tensor:
    """Return the elements from the format of the wire; inverse of `to_wire`."""
    if wire == "bf16":
        return received.to(dtype)
    rows = received.view(-1, (parts.row or 1) + _SCALE_BYTES)
    values, scales = rows[:, :-_SCALE_BYTES], rows[:, -_SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(dtype).view(-1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values, and the fp32 scale of each row (..., 1) as a factor for them; the largest value becomes 448.

    Rows are along the last dimension, and have at least one element.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales
