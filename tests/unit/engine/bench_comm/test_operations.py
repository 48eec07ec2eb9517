"""Numbers that show which rank wrote them."""

import pytest
import torch

from opensora_cli.engine.bench_comm import operations

COUNT = 5000


def _filled(dtype: torch.dtype, *, scale: int, start: int = 0) -> torch.Tensor:
    values = torch.zeros(COUNT, dtype=dtype)
    operations.fill(values, scale=scale, start=start)
    return values


def test_numbers_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(index % 31 + 1) * 3 for index in range(7, 7 + COUNT)]
    assert _filled(torch.float32, scale=3, start=7).tolist() == expected
    monkeypatch.setattr(operations, "_CHUNK", 64)  # long tensors are made in pieces
    assert _filled(torch.float32, scale=3, start=7).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_wrong_element_is_found(dtype: torch.dtype) -> None:
    values = _filled(dtype, scale=2, start=40)
    assert operations.count_mismatches(values, scale=2, start=40) == 0
    values[COUNT // 2] += 1
    assert operations.count_mismatches(values, scale=2, start=40) == 1


@pytest.mark.parametrize(("scale", "start"), [(1, 40), (3, 40), (2, 41), (2, 0)])
def test_another_rank_and_another_place_are_wrong_everywhere(scale: int, start: int) -> None:
    assert (
        operations.count_mismatches(_filled(torch.float32, scale=2, start=40), scale=scale, start=start) > 0.9 * COUNT
    )


def test_sums_over_a_thousand_ranks_are_exact_in_float32() -> None:
    assert operations.sum_of_scales(4) == 1 + 2 + 3 + 4
    assert 31 * operations.sum_of_scales(1000) < 2**24
