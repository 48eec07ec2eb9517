"""Valid commands on full disks, in closed folders, as other users, with a hostile hub: refused in one line, or done."""

from hostile.batches import batches
from hostile.circumstances import circumstance
from hostile.hubs import hub_case
from hostile.inputs import Inputs
from hostile.trial import Trials


@batches(1300, first=20)
def test_what_is_wrong_around_a_command_is_refused_or_does_no_harm(
    numbers: range, trials: Trials, inputs: Inputs
) -> None:
    trials.run_all(circumstance(number, inputs) for number in numbers)


@batches(300, first=10)
def test_downloads_from_a_hostile_hub_are_refused_or_whole(numbers: range, trials: Trials, inputs: Inputs) -> None:
    trials.run_all(hub_case(number, inputs) for number in numbers)
