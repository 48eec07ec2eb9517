"""Commands that are killed at a system call, or of which one fails: nothing is lost, and the next run makes the same."""

import pytest
from hostile.batches import batches
from hostile.calls import Calls
from hostile.inputs import Inputs
from hostile.kills import Kills
from hostile.sandbox import NotPossibleError, Sandbox
from hostile.trial import Trials


@pytest.fixture(scope="session")
def calls(sandbox: Sandbox, inputs: Inputs) -> Calls:
    """Keeps the results of runs of which no call fails."""
    try:
        return Calls(Kills(sandbox, inputs))
    except NotPossibleError as reason:
        pytest.skip(str(reason))
