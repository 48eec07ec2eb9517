"""`python -m hostile KIND NUMBER...`, in `tests`: repeat cases, and print all about them. Failures name both.

`python -m hostile each-call [--part I/N] [--after NUMBER]` breaks the calls of `Calls.each`, one after the
other. It can be stopped, and continued after the number of its last case; N processes share the cases.
"""

import shlex
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hostile.calls import Calls
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
        if kind == "each-call":
            break_each_call(Calls(Kills(sandbox, inputs)), numbers)
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


def break_each_call(calls: Calls, arguments: Sequence[str]) -> None:
    """Break one call of each operation in each way, and print the counts and the faults."""
    parser = ArgumentParser("each-call")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--after", type=int, default=0)
    parsed = parser.parse_args(arguments)
    part, parts = map(int, parsed.part.split("/"))
    cases = calls.each()
    tried = faulty = 0
    for number, case in enumerate(cases, start=1):
        if number > parsed.after and number % parts == part % parts:
            title, faults = calls.faults_of(*case)
            tried, faulty = tried + 1, faulty + bool(faults)
            show(f"{number}/{len(cases)} {title}: {len(faults)} faults", faults)
    print(f"{tried} cases of {len(cases)}, {faulty} faulty", flush=True)


main(*sys.argv[1:])
