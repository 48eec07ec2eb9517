"""Commands ended at any instant: no half file, and the next run removes what is left and makes the same results."""

import pytest
from hostile.inputs import Inputs
from hostile.kills import ENDED_RANKS, Kills
from hostile.sandbox import Sandbox
from hostile.trial import Trials

pytestmark = pytest.mark.slow
_BATCH = 10


@pytest.fixture(scope="session")
def kills(sandbox: Sandbox, inputs: Inputs) -> Kills:
    """Keeps the results of uninterrupted runs."""
    return Kills(sandbox, inputs)


@pytest.mark.parametrize("first", range(0, 140, _BATCH))
def test_what_is_ended_goes_on_to_the_same(first: int, kills: Kills, trials: Trials) -> None:
    trials.count(kills.faults(number) for number in range(first, first + _BATCH))


@pytest.mark.parametrize("number", range(12))
def test_ranks_that_are_ended_go_on_to_the_same(number: int, kills: Kills, trials: Trials) -> None:
    trials.count([kills.faults(number, ENDED_RANKS)])
