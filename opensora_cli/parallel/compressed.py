"""All-to-all with fewer bytes on the wire: for links that are slower than the loss of precision is dear."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import Exchange, Group, Sizes, all_to_all, exchange_once, exchange_with_gradient

WireFormat = Literal["bf16", "fp8"]
"""`bf16` is two bytes an element; `fp8` is one (e4m3), and four for the scale of each row."""

_FP8 = torch.float8_e4m3fn
_SCALE_BYTES = 4


def compressed_all_to_all(
    input_: Tensor,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    wire: WireFormat | None = None,
) -> Tensor:
    """Do what `all_to_all` does, with elements that are rounded for the way; the gradients' are too.

    An element x of an fp32 tensor comes out wrong by at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16,
    or 2^-18 of the largest element of its row, whichever is more; a row is what lies along the last dimension. A row
    that holds an infinity or NaN arrives as NaN with `fp8`.

    Args:
        input_: as for `all_to_all`, which describes the others too; floating-point. Of a 16-bit one `bf16` saves
            nothing.
        process_group: the ranks.
        scatter_dim: is divided.
        gather_dim: is joined.
        scatter_sizes: the lengths of the shares along `scatter_dim`.
        gather_sizes: the same along `gather_dim`.
        wire: how elements travel; None: as they are.

    Raises:
        ValueError: the sizes are wrong, or one of the dimensions is the last one, which `fp8` keeps whole.
    """
    if process_group is None or wire is None:
        return all_to_all(
            input_, process_group, scatter_dim, gather_dim, scatter_sizes=scatter_sizes, gather_sizes=gather_sizes
        )
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if ranks == 1:
        return input_
    exchange = compress(partial(exchange_once, process_group), wire)
    return exchange_with_gradient(exchange, ranks, rank, input_, scatter_dim, gather_dim, scatter_sizes, gather_sizes)


def compress(exchange: Exchange, wire: WireFormat | None) -> Exchange:
    """Return an exchange that rounds what it hands to `exchange`; None: the same exchange."""
    match wire:
        case None:
            return exchange
        case "bf16":
            return partial(_as_bf16, exchange)
        case "fp8":
            return partial(_as_fp8, exchange)


def _as_bf16(exchange: Exchange, x: Tensor, scatter: int, gather: int, scattered: Sizes, gathered: Sizes) -> Tensor:
    return exchange(x.to(torch.bfloat16), scatter, gather, scattered, gathered).to(x.dtype)


def _as_fp8(exchange: Exchange, x: Tensor, scatter: int, gather: int, scattered: Sizes, gathered: Sizes) -> Tensor:
    if x.ndim - 1 in (scatter, gather):
        raise ValueError(f"rows of fp8 lie along dimension {x.ndim - 1}, which can be neither divided nor joined")
    values, scales = quantise(x)
    # Values and scales share a message: a second one would cost its latency again.
    sent = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
    received = exchange(sent, scatter, gather, scattered, gathered)
    values, scales = received[..., :-_SCALE_BYTES], received[..., -_SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(x.dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values and the fp32 scale of each row (..., 1) by which to multiply them; the largest becomes 448.

    Args:
        x: floating-point, with rows of at least one element along the last dimension.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales
