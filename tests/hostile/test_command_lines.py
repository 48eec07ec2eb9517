"""Hostile command lines of every command: refused in one line, or done."""

import pytest
from hostile.command_lines import command_line
from hostile.inputs import BASES, Inputs
from hostile.trial import Case, Trials, batches

pytestmark = pytest.mark.slow


@batches(400)
def test_hostile_command_lines_are_refused_or_done(numbers: range, trials: Trials, inputs: Inputs) -> None:
    trials.run_all(command_line(number, inputs) for number in numbers)


def test_valid_command_lines_are_done(trials: Trials, inputs: Inputs) -> None:
    trials.run_all(
        Case(base.name, base.argv, inputs.putting(base), codes=frozenset({base.code}), may_change=base.replaces)
        for base in BASES
    )
