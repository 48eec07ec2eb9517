"""What the tests of the engine share."""

from collections.abc import Iterator

import pytest
import torch
from small_stages import small_stages
from tiny_world import RecordingReporter


@pytest.fixture
def reporter() -> RecordingReporter:
    return RecordingReporter()


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Work this small is slower on several threads, and far slower where other tests have the other cores.

    What tests compare with is computed as they compute: sums that several threads share are rounded otherwise.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan in milliseconds: what a stage needs is found on fake tensors, which takes longer than these generations."""
    monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
