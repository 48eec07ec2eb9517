"""Figures of tensors, of every dtype, however many pieces they come in."""

import math

import pytest
import torch

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.engine.ckpt import statistics
from opensora_cli.engine.ckpt.statistics import Statistics, measure


def figures(tensor: torch.Tensor) -> Statistics:
    return measure(LazyTensor.of(tensor), advance=lambda count: None)


@pytest.mark.parametrize("step", [3, 7, 1000])
def test_pieces_add_up_to_the_whole(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "STEP_NUMEL", step)
    values = torch.randn(50, generator=torch.Generator().manual_seed(1))
    values[[3, 10, 11, 12]] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    finite = values[values.isfinite()]
    found = figures(values)
    assert (found.count, found.nan, found.infinite) == (50, 2, 2)
    assert (found.min, found.max) == (float(finite.min()), float(finite.max()))
    assert found.mean == pytest.approx(float(finite.double().mean()))
    assert not found.is_finite
    assert not found.all_zero


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        *(torch.complex64, torch.complex128, torch.float8_e8m0fnu),
    ],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    ones = torch.ones(4, dtype=torch.float32).to(dtype)
    found = figures(ones)
    assert found.max == 1
    assert found.is_finite
    assert found.mean == (0.5 if dtype.is_complex else 1)
    if dtype != torch.float8_e8m0fnu:  # has no zero
        assert figures(torch.zeros(4).to(dtype)).all_zero


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_not_a_number_in_few_bits(dtype: torch.dtype) -> None:
    assert figures(torch.tensor([1.0, math.nan]).to(dtype)).nan == 1


def test_without_numbers() -> None:
    for tensor in (torch.empty(0), torch.tensor([math.nan, math.inf])):
        found = figures(tensor)
        assert (found.min, found.max, found.mean) == (None, None, None)
        assert not found.all_zero
        assert found.mean is None


def test_negative_zeros_are_zeros_and_huge_sums_no_crash() -> None:
    assert figures(torch.tensor([-0.0, 0.0])).all_zero
    assert figures(torch.full((3,), 1.7e308, dtype=torch.float64)).mean is None
