"""Rehearsals need fake `cuda` tensors, which a CPU build of torch has once a device guard is built."""

from pathlib import Path

import pytest
from fake_cuda.guard import why_impossible

_FOLDER = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the guard, if a test here needs it, before any test runs: autograd counts devices in its first backward."""
    if not session.config.option.collectonly and any(item.path.is_relative_to(_FOLDER) for item in session.items):
        why_impossible()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of this folder where nothing can be rehearsed."""
    if item.path.is_relative_to(_FOLDER) and (reason := why_impossible()):
        pytest.skip(reason)
