"""Valid commands in closed folders, as other users, with little of everything: refused in one line, or done."""

import pytest
from hostile.circumstances import circumstance
from hostile.inputs import BASES, Inputs
from hostile.trial import Case, Trials, batches

pytestmark = pytest.mark.slow


@batches(260)
def test_what_is_wrong_around_a_command_is_refused_or_does_no_harm(
    numbers: range, trials: Trials, inputs: Inputs
) -> None:
    trials.run_all(circumstance(number, inputs) for number in numbers)


def test_where_no_thread_can_be_started_training_ends_and_is_saved(trials: Trials, inputs: Inputs) -> None:
    """Checkpoints are written in a thread, and tokenizers have several."""
    bases = [base for base in BASES if base.name in ("train mmdit", "train vae")]
    assert len(bases) == 3
    limits = {"RLIMIT_NPROC": 1}
    trials.run_all(
        Case(base.name, base.argv, inputs.putting(base), limits=limits, codes=frozenset({0})) for base in bases
    )
