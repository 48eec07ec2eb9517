"""Rehearsals need fake `cuda` tensors, which a CPU build of torch has once a device guard is built."""

from pathlib import Path

import pytest
from fake_cuda.guard import why_impossible


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of this folder where nothing can be rehearsed; the guard is built when the first one runs."""
    if item.path.is_relative_to(Path(__file__).parent) and (reason := why_impossible()):
        pytest.skip(reason)
