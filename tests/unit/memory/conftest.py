"""What the tests of memory share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Only algorithms that give the same bits each time, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """As sampling computes."""
    with torch.no_grad():
        yield
