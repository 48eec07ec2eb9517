"""Settings of `osora bench-generate`: the runs that are compared with the exact one."""

import re
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import nearest
from opensora_cli.core.section import changed, shown
from opensora_cli.settings.applies import SAME_FOR_ALL_RUNS, refuse_without_effect
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, check_key, explain
from opensora_cli.settings.load import few_evaluations

Changes = Mapping[str, object]
"""Settings of a run of bench-generate that differ from the exact run, by dotted key."""
Tries = Mapping[str, Changes] | None
"""Changes by name; None means the standard set."""
EXACT = "exact"
"""Name of the run with the settings as they are given, with which the others are compared."""


# Every other setting must be better than fewer Euler steps.
_SAMPLED = (("euler", 30), ("euler", 15), ("ab2", 30), ("ab2", 15), ("heun", 15))
STANDARD: Mapping[str, Changes] = {
    f"{solver}-{steps}": {"sampling.solver": solver, "sampling.num_inference_steps": steps, "sampling.timesteps": None}
    for solver, steps in _SAMPLED
} | {"fast": {"sampling.fast": True}}
"""Settings that are compared if no `--try` is given."""


def read_tries(texts: Sequence[str]) -> Tries:
    """Return the changes of each `--try`: `exact` for none, a name of the standard set, or KEY=VALUE,KEY=VALUE.

    No text means the standard set.
    """
    # The exact run is always made.
    names = [name for name in map(str.strip, texts) if name != EXACT]
    return {name: STANDARD.get(name) or _changes(name) for name in names} if texts else None


def _changes(text: str) -> Changes:
    if "=" not in text:
        close = nearest(text, STANDARD)
        known = f"did you mean {close}?" if close else f"there are {', '.join((EXACT, *STANDARD))}"
        raise RequestError(
            f"--try {text} is no name of the standard set, and no setting",
            hint=f"{known}; settings are given as --try sampling.solver=ab2,sampling.num_inference_steps=15",
        )
    changes: dict[str, object] = {}
    # A value may be a list, with commas of its own.
    for pair in re.split(r",(?=[^,=]*[A-Za-z_][^,=]*=)", text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise RequestError(f"--try {text} must be KEY=VALUE,KEY=VALUE, and has {pair!r}")
        check_key(GenerateSettings, key, source=f"--try {text}")
        if key in SAME_FOR_ALL_RUNS.covered(GenerateSettings):
            hint = f"drop it, or give it to all runs: --set {key}={value}"
            raise RequestError(f"--try {text}: {key} must be the same for all runs", hint=hint)
        changes[key] = value
    return changes


def refuse_unfit(settings: GenerateSettings) -> None:
    """Raise RequestError if settings ask for something other than one whole video from noise."""
    for key, value in changed(settings).items():
        if key in ("from_latents", "resume", "sampling.num_samples", "sampling.stop_at", "output.explore"):
            what = "bench-generate makes one whole video with each setting"
            raise RequestError(f"{key}={shown(value)} cannot be compared: {what}", hint="drop it")


def tried_settings(exact: GenerateSettings, changes: Changes, *, name: str = "") -> GenerateSettings:
    """Return the settings of the exact run with the changes of `--try NAME` and what their `sampling.fast` stands for.

    Raises RequestError if they break a rule, or if a change has no effect.
    """
    if "sampling.fast" in changes and exact.sampling.fast:
        problem = f"--try {name}: sampling.fast has no effect, because the exact run is fast already"
        raise RequestError(problem, hint="compare with a run without --fast")
    given = {key: Given(value, f"--try {name}") for key, value in changes.items()}
    try:
        tried = exact.replace(changes)
        # What a fast exact run stands for is in its settings already.
        if tried.sampling.fast and not exact.sampling.fast:
            few = few_evaluations(tried.sampling, without=exact.sampling.num_inference_steps)
            tried = tried.replace({key: value for key, value in few.items() if key not in changes})
    except ValidationError as error:
        raise RequestError("\n".join(explain(error, given))) from error
    refuse_without_effect(tried, given)
    return tried
