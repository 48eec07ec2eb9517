"""The compressed all-to-all against the plain one: how wrong it is. `test_attention` counts what it sends."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import all_to_all, exchange_directly
from opensora_cli.parallel.sequence import compressed
from opensora_cli.parallel.shares import WireFormat

_RANKS = 4


def _compressed(x: Tensor, *dims: int, wire: WireFormat) -> Tensor:
    exchange = partial(compressed, partial(exchange_directly, dist.group.WORLD), wire)
    return all_to_all(x, dist.group.WORLD, *dims, exchange=exchange)


def _allowed(exact: Tensor, wire: WireFormat) -> Tensor:
    """Return what the docstring allows, and the rounding of fp32 beside it."""
    if wire == "bf16":
        return exact.abs() / 256
    of_row = exact.abs().amax(-1, keepdim=True) * 2.0**-18
    return torch.maximum(exact.abs() / 16, of_row) * (1 + 1e-5)


def _errors(wire: WireFormat) -> tuple[float, float]:
    """Return the largest error of the result and of the gradient, relative to what is allowed."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    # Rows of very different size, elements too, and a row of zeros.
    x = torch.randn(2, 6, 8, 16, generator=generator) * torch.logspace(-6, 6, 8).view(8, 1)
    x = x * torch.logspace(-7, 0, 16)
    x[0, 0, 0] = 0.0
    weights = torch.randn(2, 24, 2, 16, generator=generator)
    ratios = []
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outs = [
        _compressed(leaves[0], wire=wire),
        all_to_all(leaves[1], dist.group.WORLD),
    ]
    for out in outs:
        (out * weights).sum().backward()
    for ours, exact in ((outs[0], outs[1]), (leaves[0].grad, leaves[1].grad)):
        assert ours.shape == exact.shape
        error, allowed = (ours - exact).detach().abs(), _allowed(exact.detach(), wire)
        assert (error <= allowed).all()
        ratios.append(float((error / allowed.clamp(min=1e-30)).max()))
    return ratios[0], ratios[1]


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_the_error_is_as_stated(pool: Callable[[int], Any], wire: WireFormat) -> None:
    for forward, backward in pool(_RANKS).run(_errors, wire):
        # Also not far below: the bound says something.
        assert 0.5 < forward <= 1.0
        assert 0.5 < backward <= 1.0
