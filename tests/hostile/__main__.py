"""`python -m hostile KIND NUMBER...`, in `tests`: repeat cases, and print all about them. Failures name both."""

import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hostile.calls import Calls
from hostile.circumstances import circumstance
from hostile.command_lines import command_line
from hostile.damaged import damaged_file
from hostile.inputs import Inputs, make_inputs
from hostile.sandbox import Sandbox
from hostile.trial import Case, Trials

KINDS: Mapping[str, Callable[[int, Inputs], Case]] = {
    "command": command_line,
    "damaged": damaged_file,
    "circumstance": circumstance,
}


def main(kind: str, *numbers: str) -> None:
    """Run cases of a kind; A-B are all from A to B."""
    with Sandbox() as sandbox, tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(sandbox, Path(folder, "made"))
        trials = Trials(sandbox)
        calls = Calls(sandbox, inputs) if kind == "calls" else None
        for words in numbers:
            first, _, last = words.partition("-")
            for number in range(int(first), int(last or first) + 1):
                if calls is not None:
                    title, faults = calls.faults(number)
                    print(title, *(f"  {fault}" for fault in faults), sep="\n", flush=True)
                    continue
                case = KINDS[kind](number, inputs)
                outcome, faults = trials.run(case)
                if faults or not last:
                    print(f"{case.name}: osora {shlex.join(case.argv)}\n  {outcome}, {outcome.seconds:.1f} s")
                    print(outcome.stdout + outcome.stderr, *faults, sep="\n", flush=True)


main(*sys.argv[1:])
