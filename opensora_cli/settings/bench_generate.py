"""Settings of `osora bench-generate`: which settings are compared with the exact run, and what is written."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import Field

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.base import PlotFile, Section
from opensora_cli.settings.explain import Given, nearest
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import check_key
from opensora_cli.settings.load import GenerateRequest, few_evaluations, given_for
from opensora_cli.settings.output import OutputSettings

Changes = Mapping[str, object]
"""By dotted key, what a run has other than the exact one."""

EXACT = "exact"
"""What the run is called with which the others are compared: that of the settings as they are given."""


def _sampled(solver: str, steps: int) -> Changes:
    return {"sampling.solver": solver, "sampling.num_inference_steps": steps, "sampling.timesteps": None}


STANDARD: Mapping[str, Changes] = {
    # Fewer steps of the same kind, which every other setting is to be better than.
    "euler-30": _sampled("euler", 30),
    "euler-15": _sampled("euler", 15),
    "ab2-30": _sampled("ab2", 30),
    "ab2-15": _sampled("ab2", 15),
    "heun-15": _sampled("heun", 15),
    "fast": {"sampling.fast": True},
}
"""What is compared where nothing else is asked for, by name."""

_ANY_PROMPT = "raining, sea"
_SHOWN = "decides what the video shows, and the runs must differ in how it is made alone"
_ONCE = "is the same for all runs"
_NOT_COMPARED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("prompt", "prompts_at", "negative_prompt", "refine", "prompt_suffix", "text", "loras", "model", "files"),
            *("video", "condition", "picture", "draft", "from_latents", "resume"),
            *("sampling.seed", "sampling.num_samples", "sampling.stop_at"),
        ),
        _SHOWN,
    ),
    **dict.fromkeys(
        (
            *("output", "runtime.weights", "runtime.model_choice", "runtime.device", "runtime.prompt_cache"),
            *("runtime.prompt_cache_limit", "sampling.batch_size", "parallel.gpus", "parallel.devices"),
            *("parallel.nnodes", "parallel.data_parallel_degree", "parallel.watch", "parallel.watch_limit_s"),
        ),
        _ONCE,
    ),
}
"""Why a setting, or one of a section, is not tried."""


class BenchGenerateSettings(Section):
    """How often each setting runs, and what is written."""

    repeats: int = Field(
        default=1, ge=1, le=1000, description="runs of each setting that are timed, in turn; the median counts"
    )
    plot: PlotFile | None = Field(default=None, description="file for a chart: .png, .svg or .pdf")
    overwrite: bool = Field(default=False, description="replace an existing file")


def read_tries(texts: Sequence[str]) -> dict[str, Changes]:
    """Return what each `--try` changes, by what it is called: a name of the standard set, or settings as they are
    typed, `KEY=VALUE,KEY=VALUE`.

    Raises:
        RequestError: there is no such name or key, the setting decides what is compared, or one is tried twice.
    """
    tries: dict[str, Changes] = {}
    for text in texts:
        name = text.strip()
        if name in tries:
            raise RequestError(f"--try {name} is given twice", hint="drop one of them")
        tries[name] = _changes(name)
    return tries


def benched_request(request: GenerateRequest) -> GenerateRequest:
    """Return a request of which no file is made, and whose prompt, where it has none, is any that the demo knows.
    Errors are those of `given_for`.
    """
    overrides = {**request.overrides, "output.path": Given(OutputSettings().path, "bench-generate")}
    if given_for(request, "prompt") is None:
        overrides["prompt"] = Given(_ANY_PROMPT, "bench-generate")
    return replace(request, overrides=overrides)


def refuse_unfit(settings: GenerateSettings) -> None:
    """Raise RequestError if settings ask for something other than one whole video from noise."""
    sampling, what = settings.sampling, "bench-generate makes one whole video with each setting"
    for key, is_asked in {
        f"sampling.num_samples={sampling.num_samples}": sampling.num_samples > 1,
        f"sampling.stop_at={sampling.stop_at}": sampling.stop_at is not None,
        f"from_latents={settings.from_latents}": settings.from_latents is not None,
        f"resume={settings.resume}": settings.resume is not None,
        "output.explore=true": settings.output.explore,
    }.items():
        if is_asked:
            raise RequestError(f"{key} cannot be compared: {what}", hint="drop it")


def tried_settings(exact: GenerateSettings, changes: Changes) -> GenerateSettings:
    """Return the settings of the exact run with `changes`, and with all that `sampling.fast` stands for.
    Raises pydantic.ValidationError if they break a rule.
    """
    tried = exact.replace(changes)
    if not tried.sampling.fast or exact.sampling.fast:
        return tried
    few = few_evaluations(tried.sampling, without=exact.sampling.num_inference_steps)
    return tried.replace({key: value for key, value in few.items() if key not in changes})


def layer_of(name: str, changes: Changes) -> dict[str, Given]:
    """Return changes as a layer of settings, whose errors name the `--try`."""
    return {key: Given(value, f"--try {name}") for key, value in changes.items()}


def _changes(text: str) -> Changes:
    if text in STANDARD:
        return STANDARD[text]
    if "=" not in text:
        close = nearest(text, STANDARD)
        there = f"did you mean {close}?" if close else f"there are {', '.join(STANDARD)}"
        raise RequestError(
            f"--try {text} is no name of the standard set, and no setting",
            hint=f"{there}; settings are given as --try sampling.solver=ab2,sampling.num_inference_steps=15",
        )
    changes: dict[str, object] = {}
    # A value may be a list, with commas of its own.
    for pair in re.split(r",(?=[^,=]*[A-Za-z_][^,=]*=)", text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise RequestError(f"--try {text} must be KEY=VALUE,KEY=VALUE, and has {pair!r}")
        source = f"--try {text}"
        check_key(GenerateSettings, key, source=source)
        why = _NOT_COMPARED.get(key) or _NOT_COMPARED.get(key.partition(".")[0])
        if why is not None:
            raise RequestError(f"{source}: {key} {why}", hint=f"drop it, or give it to all runs: --set {key}={value}")
        if key in changes:
            raise RequestError(f"{source} gives {key} twice", hint="drop one of them")
        changes[key] = value
    return changes
