"""Hostile command lines and settings of every command: refused in one line, or done."""

import pytest
from hostile.command_lines import command_line
from hostile.inputs import BASES, Inputs
from hostile.trial import Case, Trials
from hostile.yaml_texts import yaml_text

_BATCH = 50


def _batches(count: int) -> pytest.MarkDecorator:
    """Have so many numbers of cases tried, the first in the fast tier, too."""
    later = [pytest.param(first, marks=pytest.mark.slow) for first in range(_BATCH, count, _BATCH)]
    return pytest.mark.parametrize("first", [0, *later])


@_batches(3500)
def test_hostile_command_lines_are_refused_or_done(first: int, trials: Trials, inputs: Inputs) -> None:
    trials.run_all(command_line(number, inputs) for number in range(first, first + _BATCH))


@_batches(1500)
def test_hostile_settings_are_refused_or_done(first: int, trials: Trials, inputs: Inputs) -> None:
    trials.run_all(yaml_text(number, inputs) for number in range(first, first + _BATCH))


@pytest.mark.slow
def test_valid_command_lines_are_done(trials: Trials, inputs: Inputs) -> None:
    trials.run_all(
        Case(base.name, base.argv, inputs.putting(base), codes=frozenset({base.code}), may_change=base.replaces)
        for base in BASES
    )
