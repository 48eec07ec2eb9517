"""`python -m hostile KIND NUMBER...`, in `tests`: repeat cases, and print all about them. Failures name both.

`python -m hostile every-call [NAME...]` breaks every call of the commands of `CALLED` in every way, or of some of them.
"""

import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hostile.calls import CALLED, Calls
from hostile.circumstances import circumstance
from hostile.command_lines import command_line
from hostile.damaged import damaged_file
from hostile.hubs import hub_case
from hostile.inputs import Inputs, make_inputs
from hostile.judge import Fault
from hostile.kills import Kills
from hostile.sandbox import Sandbox
from hostile.trial import Case, Trials
from hostile.yaml_texts import yaml_text

KINDS: Mapping[str, Callable[[int, Inputs], Case]] = {
    "command": command_line,
    "settings": yaml_text,
    "damaged": damaged_file,
    "circumstance": circumstance,
    "hub": hub_case,
}


def main(kind: str, *numbers: str) -> None:
    """Run cases of a kind; A-B are all from A to B."""
    with Sandbox() as sandbox, tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(sandbox, Path(folder, "made"))
        if kind == "every-call":
            break_every_call(Calls(Kills(sandbox, inputs)), numbers)
            return
        trials = Trials(sandbox)
        calls = Calls(Kills(sandbox, inputs)) if kind == "calls" else None
        for words in numbers:
            first, _, last = words.partition("-")
            for number in range(int(first), int(last or first) + 1):
                if calls is not None:
                    show(*calls.faults(number))
                    continue
                case = KINDS[kind](number, inputs)
                outcome, faults = trials.run(case)
                if faults or not last:
                    print(f"{case.name}: osora {shlex.join(case.argv)}\n  {outcome}, {outcome.seconds:.1f} s")
                    print(outcome.stdout + outcome.stderr, *faults, sep="\n", flush=True)


def show(title: str, faults: Sequence[Fault]) -> None:
    """Print how a case of broken calls went."""
    print(title, *(f"  {fault}" for fault in faults), sep="\n", flush=True)


def break_every_call(calls: Calls, names: Sequence[str]) -> None:
    """Break every call of commands, and print the counts and the faults."""
    for ended in CALLED:
        if names and ended.base.name not in names:
            continue
        tried = faulty = 0
        for title, faults in calls.every(ended):
            tried += 1
            if faults:
                faulty += 1
                show(title, faults)
        print(f"{ended.base.name}: {tried} cases, {faulty} faulty", flush=True)


main(*sys.argv[1:])
