"""The all-to-all of two machines with two ranks each against the plain one, bit for bit."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.all_to_all import TwoStages
from opensora_cli.parallel.collectives import all_to_all
from opensora_cli.parallel.mesh import stage_groups
from opensora_cli.parallel.shares import shares

_RANKS = 4


def _two_stages() -> TwoStages:
    return TwoStages(*stage_groups([list(range(_RANKS))], inner=2))


def _with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    (gradient,) = torch.autograd.grad(out.sin().sum(), leaf)
    return out.detach(), gradient


def _compare(uneven: bool) -> int:
    assert dist.group.WORLD is not None
    stages = _two_stages()
    rank, checked = dist.get_rank(), 0
    for dims in ((2, 1), (1, 2), (0, -1), (3, 0)):
        shape = [2, 3, 2, 3]
        # With uneven shares the last rank scatters to none.
        scattered, gathered = shares(3, _RANKS) if uneven else (2,) * _RANKS, (2, 0, 3, 1) if uneven else (2,) * _RANKS
        shape[dims[0]], shape[dims[1]] = sum(scattered), gathered[rank]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        sizes = {"scatter_sizes": scattered, "gather_sizes": gathered} if uneven else {}
        expected, expected_gradient = _with_gradient(
            lambda x, d=dims, s=sizes: all_to_all(x, dist.group.WORLD, *d, **s), x
        )
        out, gradient = _with_gradient(
            lambda x, d=dims, s=sizes: all_to_all(x, dist.group.WORLD, *d, **s, exchange=stages), x
        )
        assert torch.equal(out, expected)
        assert torch.equal(gradient, expected_gradient)
        assert gradient.any() == bool(gathered[rank])
        checked += 1
    return checked


def _messages() -> tuple[list[int], list[int]]:
    """Return the ranks and elements of each group in which something was sent."""
    assert dist.group.WORLD is not None
    stages = _two_stages()
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        all_to_all(torch.zeros(1, 3, 8, 5), dist.group.WORLD, exchange=stages)
    return [call.kwargs["group"].size() for call in sent.call_args_list], [
        call.args[1].numel() for call in sent.call_args_list
    ]


@pytest.mark.parametrize("uneven", [False, True])
def test_it_is_the_plain_one(pool: Callable[[int], Any], uneven: bool) -> None:
    assert pool(_RANKS).run(_compare, uneven) == [4] * _RANKS


def test_one_message_goes_inside_and_one_between(pool: Callable[[int], Any]) -> None:
    assert pool(_RANKS).run(_messages) == [([2, 2], [120, 120])] * _RANKS
