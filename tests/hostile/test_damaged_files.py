"""Damaged files of every format, read by the commands that take them: refused in one line, or read."""

import pytest
from hostile.damaged import damaged_file
from hostile.inputs import Inputs
from hostile.trial import Trials

_BATCH = 50


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(_BATCH, 3000, _BATCH))]
)
def test_damaged_files_are_refused_or_read(first: int, trials: Trials, inputs: Inputs) -> None:
    trials.run_all(damaged_file(number, inputs) for number in range(first, first + _BATCH))
