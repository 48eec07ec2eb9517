import pytest
import torch
from torch import nn

from opensora_cli.engine.mem_profile.measured_stages import fill_randomly
from opensora_cli.engine.mem_profile.profile import largest_batch
from opensora_cli.engine.mem_profile.report import LargestBatch


def search(bytes_each: int, limit: int, *, runs_out: bool = False, most: int = 1024) -> tuple[LargestBatch, list[int]]:
    """Return the largest batch, and the sizes that were tried."""
    tried: list[int] = []

    def peak_of(size: int) -> int | None:
        tried.append(size)
        return None if runs_out and size * bytes_each > limit else size * bytes_each

    return largest_batch(peak_of, limit_bytes=limit, most=most), tried


@pytest.mark.parametrize("runs_out", [False, True])
@pytest.mark.parametrize("fits", [1, 2, 5, 513])
def test_the_largest_batch_that_fits_is_found(fits: int, runs_out: bool):
    found, tried = search(10, 10 * fits + 9, runs_out=runs_out)
    assert (found.batch_size, found.peak_bytes) == (fits, 10 * fits)
    assert len(tried) <= 2 * fits.bit_length() + 1


def test_no_batch_fits():
    found, tried = search(10, 9)
    assert (found.batch_size, found.peak_bytes, tried) == (0, 0, [1])


@pytest.mark.parametrize("most", [1, 6, 8])
def test_the_search_ends_at_its_largest_batch(most: int):
    found, tried = search(1, 10**9, most=most)
    assert found.batch_size == max(tried) == most


def test_random_weights_are_frozen_and_shared_ones_stay_shared():
    with torch.device("meta"):
        layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
        layers.append(layers[0])
    fill_randomly(layers, torch.device("cpu"))
    weights = dict(layers.named_parameters())
    # A model that trains would decode all frames at once.
    assert not any(weight.requires_grad or weight.is_meta for weight in weights.values())
    assert layers[2].weight is layers[0].weight
    assert isinstance(layers[0].weight, nn.Parameter)
    assert not layers[1].running_mean.is_meta
