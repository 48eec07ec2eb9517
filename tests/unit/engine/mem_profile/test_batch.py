import pytest
import torch

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.mem_profile.batch import MOST, largest_batch
from opensora_cli.engine.mem_profile.report import LargestBatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """What was asked to give memory back, which takes time."""
    asked: list[torch.device] = []
    monkeypatch.setattr("opensora_cli.engine.mem_profile.batch.release_memory", asked.append)
    return asked


def search(bytes_each: int, limit: int, error: type[Exception] | None = MemoryError, most: int = MOST) -> LargestBatch:
    def peak_of(size: int) -> int:
        if error is not None and size * bytes_each > limit:
            raise error("there is no more")
        return size * bytes_each

    return largest_batch(peak_of, of="clips", limit_bytes=limit, device=CPU, reporter=SilentReporter(), most=most)


@pytest.mark.parametrize(
    ("fits", "error"),
    [
        *((fits, MemoryError) for fits in (1, 2, 5, 513)),
        (5, torch.OutOfMemoryError),
        (5, None),
    ],
)
def test_the_largest_batch_that_fits_is_found(fits: int, error: type[Exception] | None, released: list[torch.device]):
    found = search(10, 10 * fits + 9, error)
    assert released == [CPU] * len(found.tried)
    assert (found.batch_size, found.peak_bytes, found.reached_most) == (fits, 10 * fits, False)
    assert len(found.tried) <= 2 * fits.bit_length() + 1
    assert all((peak is None) == (size > fits) for size, peak in found.tried)


def test_no_batch_fits():
    found = search(10, 9)
    assert (found.batch_size, found.peak_bytes, found.tried) == (0, 0, ((1, None),))


@pytest.mark.parametrize("most", [1, 6, 8])
def test_the_search_ends_at_its_largest_batch(most: int):
    found = search(1, 10**9, most=most)
    assert (found.batch_size, found.reached_most) == (most, True)
    assert max(size for size, _ in found.tried) == most


def test_errors_besides_memory_are_raised():
    def peak_of(size: int) -> int:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_batch(peak_of, of="clips", limit_bytes=1, device=CPU, reporter=SilentReporter())
