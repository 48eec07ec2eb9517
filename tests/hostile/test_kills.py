"""Commands ended at any instant: no half file, and the next run removes what is left and makes the same results."""

import pytest
from hostile.batches import batches
from hostile.inputs import Inputs
from hostile.kills import Kills
from hostile.sandbox import Sandbox
from hostile.trial import Trials

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def kills(sandbox: Sandbox, inputs: Inputs) -> Kills:
    """Keeps the results of uninterrupted runs."""
    return Kills(sandbox, inputs)


@batches(20, size=10)
def test_what_is_ended_goes_on_to_the_same(numbers: range, kills: Kills, trials: Trials) -> None:
    trials.count(kills.faults(number) for number in numbers)
