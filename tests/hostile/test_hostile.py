"""Hostile cases of all kinds: refused in one line, or done. No loss, and the next run makes the same."""

import pytest
from hostile.calls import Calls
from hostile.circumstances import circumstance
from hostile.command_lines import command_line
from hostile.damaged import damaged_file
from hostile.inputs import BASES
from hostile.trial import Case, batches

pytestmark = pytest.mark.slow


@batches(260)
def test_what_is_wrong_around_a_command_is_refused_or_does_no_harm(numbers, trials, inputs):
    trials.run_all(circumstance(number, inputs) for number in numbers)


def test_where_no_thread_can_be_started_training_ends_and_is_saved(trials, inputs):
    """Checkpoints are written in a thread, and tokenizers have several."""
    bases = [base for base in BASES if base.name in ("train mmdit", "train vae")]
    assert len(bases) == 3
    limits = {"RLIMIT_NPROC": 1}
    trials.run_all(
        Case(base.name, base.argv, inputs.putting(base), limits=limits, codes=frozenset({0})) for base in bases
    )


@batches(400)
def test_hostile_command_lines_are_refused_or_done(numbers, trials, inputs):
    trials.run_all(command_line(number, inputs) for number in numbers)


def test_valid_command_lines_are_done(trials, inputs):
    trials.run_all(
        Case(base.name, base.argv, inputs.putting(base), codes=frozenset({base.code}), may_change=base.replaces)
        for base in BASES
    )


@batches(400)
def test_damaged_files_are_refused_or_read(numbers, trials, inputs):
    trials.run_all(damaged_file(number, inputs) for number in numbers)


@pytest.fixture(scope="session")
def calls(sandbox, inputs):
    """Keeps the results of runs of which no call fails."""
    return Calls(sandbox, inputs)


# Last: its commands wait in the warm process, and each keeps a descriptor open, of which some cases have few.
@batches(70, size=10)
def test_what_a_broken_call_leaves_goes_on_to_the_same(numbers, calls, trials):
    trials.report(calls.faults(number) for number in numbers)
