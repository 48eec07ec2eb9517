"""Hostile command lines and files. See CONTRIBUTING.md for how they are run."""

import pytest
from hostile.inputs import make_inputs
from hostile.sandbox import NotPossibleError, Sandbox
from hostile.trial import Trials


@pytest.fixture(scope="session")
def sandbox():
    """A warm process that every test of this worker shares."""
    box = Sandbox()
    try:
        box.__enter__()
    except NotPossibleError as reason:
        pytest.skip(str(reason))
    yield box
    box.__exit__(None, None, None)


@pytest.fixture
def trials(sandbox):
    return Trials(sandbox)


@pytest.fixture(scope="session")
def inputs(sandbox, tmp_path_factory):
    return make_inputs(sandbox, tmp_path_factory.mktemp("inputs") / "made")
