"""Hostile command lines and files. See CONTRIBUTING.md for how they are run."""

from collections.abc import Iterator

import pytest
from hostile.inputs import Inputs, make_inputs
from hostile.sandbox import NotPossibleError, Sandbox
from hostile.trial import Trials


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """A warm process that every test of this worker shares."""
    box = Sandbox()
    try:
        box.__enter__()
    except NotPossibleError as reason:
        pytest.skip(str(reason))
    yield box
    box.__exit__(None, None, None)


@pytest.fixture
def trials(sandbox: Sandbox) -> Trials:
    return Trials(sandbox)


@pytest.fixture(scope="session")
def inputs(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(sandbox, tmp_path_factory.mktemp("inputs") / "made")
