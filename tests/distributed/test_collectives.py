"""Collectives and their gradients against one process that holds everything, in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from torch import Tensor

from opensora_cli.parallel.collectives import (
    all_gather,
    all_to_all,
    gather_forward_split_backward,
    reduce_scatter,
    split_forward_gather_backward,
)
from opensora_cli.parallel.shares import shares, span

_SHAPE = (3, 5, 6, 2)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _cut(whole: Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> Tensor:
    return whole.narrow(dim, span(sizes, rank).start, sizes[rank])


def _group() -> tuple[dist.ProcessGroup | None, int, int]:
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and the gradient of a loss that is not linear in it."""
    leaf = x.detach().clone().requires_grad_()
    out = function(leaf.transpose(0, -1).contiguous().transpose(0, -1))
    loss = (out.sin() * weights).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return out.detach(), gradient


def _equal(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    assert_close(ours, expected, tolerance=1e-12)


def _gather_and_reduce(uneven: bool) -> int:
    group, rank, ranks = _group()
    checked = 0
    for dim in (*range(len(_SHAPE)), -1):
        shape = list(_SHAPE)
        shape[dim] = 2 * ranks + 1 if uneven else 2 * ranks
        sizes = tuple(reversed(shares(shape[dim], ranks)))
        given = sizes if uneven else None
        whole = _random(*shape, seed=dim)
        weights = [_random(*shape, seed=10 + other) for other in range(ranks)]

        # One process: each rank computes its own loss from the whole.
        _, expected = _gradient(lambda x: x, whole, sum(weights, torch.zeros(())))
        out, gradient = _gradient(
            lambda x, dim=dim, given=given: all_gather(x, group, dim=dim, sizes=given),
            _cut(whole, dim, sizes, rank),
            weights[rank],
        )
        _equal(out, whole)
        _equal(gradient, _cut(expected, dim, sizes, rank))

        # One process: the loss is that of the sum, and every addend has the sum's gradient.
        addends = [_random(*shape, seed=20 + other) for other in range(ranks)]
        total = torch.stack(addends).sum(0)
        _, expected = _gradient(lambda x: x, total, weights[0])
        out, gradient = _gradient(
            lambda x, dim=dim, given=given: reduce_scatter(x, group, dim=dim, sizes=given),
            addends[rank],
            _cut(weights[0], dim, sizes, rank),
        )
        _equal(out, _cut(total, dim, sizes, rank))
        _equal(gradient, expected)
        assert out.is_contiguous()
        checked += 1
    return checked


def _exchange(uneven: bool) -> int:
    group, rank, ranks = _group()
    checked = 0
    for scatter_dim in range(4):
        for gather_dim in {0, 1, 2, 3, -1} - {scatter_dim, scatter_dim - 4}:
            shape = list(_SHAPE)
            # One less than two each: with uneven shares the last rank has one, and of three over four none.
            shape[scatter_dim] = 2 * ranks - 1 if uneven else 2 * ranks
            shape[gather_dim] = ranks - 1 if uneven else ranks
            scattered, gathered = shares(shape[scatter_dim], ranks), shares(shape[gather_dim], ranks)
            whole, weights = _random(*shape, seed=1), _random(*shape, seed=2)
            _, expected = _gradient(lambda x: x, whole, weights)
            out, gradient = _gradient(
                lambda x, s=scatter_dim, g=gather_dim, ss=scattered, gs=gathered: all_to_all(
                    x, group, s, g, scatter_sizes=ss if uneven else None, gather_sizes=gs if uneven else None
                ),
                _cut(whole, gather_dim, gathered, rank),
                _cut(weights, scatter_dim, scattered, rank),
            )
            _equal(out, _cut(whole, scatter_dim, scattered, rank))
            _equal(gradient, _cut(expected, gather_dim, gathered, rank))
            checked += 1
    return checked


def _gather_and_split(grad_scale: Any) -> int:
    group, rank, ranks = _group()
    factor = {None: 1.0, "up": float(ranks), "down": 1.0 / ranks}[grad_scale]
    checked = 0
    for dim in (0, 1, -1):
        for uneven in (False, True):
            shape = list(_SHAPE)
            shape[dim] = 2 * ranks - (1 if uneven else 0)
            sizes = shares(shape[dim], ranks)
            given = sizes if uneven else None
            whole, weights = _random(*shape, seed=3), _random(*shape, seed=4)
            _, expected = _gradient(lambda x: x, whole, weights)
            out, gradient = _gradient(
                lambda x, d=dim, s=given: gather_forward_split_backward(x, d, group, grad_scale, sizes=s),
                _cut(whole, dim, sizes, rank),
                weights,
            )
            _equal(out, whole)
            _equal(gradient, factor * _cut(expected, dim, sizes, rank))
            out, gradient = _gradient(
                lambda x, d=dim, s=given: split_forward_gather_backward(x, d, group, grad_scale, sizes=s),
                whole,
                _cut(weights, dim, sizes, rank),
            )
            _equal(out, _cut(whole, dim, sizes, rank))
            _equal(gradient, factor * expected)
            checked += 1
    return checked


def _refusals() -> list[str]:
    group, _, ranks = _group()
    x = torch.zeros(2 * ranks + 1, 2)
    messages = []
    for call in (
        lambda: reduce_scatter(x, group, dim=0),
        lambda: reduce_scatter(x, group, dim=0, sizes=(1,) * ranks),
        lambda: all_gather(x, group, dim=0, sizes=(1,) * ranks),
        lambda: all_gather(x, group, dim=0, sizes=(2 * ranks + 1,)),
        lambda: all_to_all(x, group, 1, -1),
        lambda: split_forward_gather_backward(x, 0, group),
    ):
        with pytest.raises(ValueError, match=r"shares|sizes|divided") as raised:
            call()
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize(("ranks", "uneven"), [(2, False), (4, True)])
def test_gathering_and_reducing_are_exact_with_gradients(pool, ranks, uneven):
    assert pool(ranks).run(_gather_and_reduce, uneven) == [5] * ranks


@pytest.mark.parametrize(("ranks", "uneven"), [(2, False), (4, True)])
def test_exchanges_are_exact_with_gradients(pool, ranks, uneven):
    assert pool(ranks).run(_exchange, uneven) == [15] * ranks


@pytest.mark.parametrize(("ranks", "grad_scale"), [(2, None), (4, "up"), (2, "down")])
def test_each_of_the_pair_is_the_backward_of_the_other(pool, ranks, grad_scale):
    assert pool(ranks).run(_gather_and_split, grad_scale) == [6] * ranks


def test_wrong_sizes_are_refused_before_anything_is_sent(pool):
    for messages in pool(2).run(_refusals):
        assert len(messages) == 6
        assert messages[0] == "5 along dimension 0 are not 2 equal shares: name the sizes"
