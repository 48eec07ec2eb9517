"""Commands that are killed at a system call, or of which one fails: no loss, and the next run makes the same."""

import pytest
from hostile.calls import Calls
from hostile.inputs import Inputs
from hostile.sandbox import NotPossibleError, Sandbox
from hostile.trial import Trials, batches


@pytest.fixture(scope="session")
def calls(sandbox: Sandbox, inputs: Inputs) -> Calls:
    """Keeps the results of runs of which no call fails."""
    try:
        return Calls(sandbox, inputs)
    except NotPossibleError as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@batches(70, size=10)
def test_what_a_broken_call_leaves_goes_on_to_the_same(numbers: range, calls: Calls, trials: Trials) -> None:
    trials.count(calls.faults(number) for number in numbers)
