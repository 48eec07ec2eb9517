"""Damaged files of every format, read by the commands that take them: refused in one line, or read."""

import pytest
from hostile.damaged import damaged_file
from hostile.inputs import Inputs
from hostile.trial import Trials, batches

pytestmark = pytest.mark.slow


@batches(400)
def test_damaged_files_are_refused_or_read(numbers: range, trials: Trials, inputs: Inputs) -> None:
    trials.run_all(damaged_file(number, inputs) for number in numbers)
