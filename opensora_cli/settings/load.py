"""From what was typed to the settings of `osora generate`.

Highest first: the command line, the description of the video in the file of an earlier run (`--from`), the environment
(see `read_environment`), `--config FILE`, the preset of the model, the defaults.

An earlier run goes above the environment because it must give the same file again whatever the shell has set. What a
file may not bring (see `saved.DESCRIPTION`) comes from the others alone.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import escaped, plain
from opensora_cli.core.reading import read_json_object
from opensora_cli.core.solvers import Solver
from opensora_cli.settings.base import Section
from opensora_cli.settings.devices import RuntimeSettings, without_retired_keys
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import generate_preset, preset_path, read_yaml, settings_path
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate
from opensora_cli.settings.reference import read_reference_generation, read_settings
from opensora_cli.settings.sampling import SamplingSettings
from opensora_cli.settings.saved import (
    DESCRIPTION,
    RESERVED,
    TYPED,
    description,
    files_needed,
    named_format,
    recorded_adapters,
)
from opensora_cli.settings.used import idle_guidance

SIDECAR_SCHEMA = "osora.generate/1"
_FAST_STEPS, _FAST_CACHE = 15, 0.15


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """Settings that an earlier run saved in a file, as `GenerateSettings.model_dump(mode="json")` gives them."""

    source: str
    values: Mapping[str, object]
    is_own: bool = False
    """Whether all of them are taken: the launcher of this rank wrote them."""
    decodes: bool = False
    """Whether they lie with finished latents, which are decoded."""
    output: Path | None = None
    """Where the result goes unless the command line says otherwise; None: where other results go."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What was asked for, before a model is chosen and anything is validated.

    `overrides` is what the command line gave (see `layers.collect_overrides`), and `saved` the settings of an earlier
    run. `config` is the name of a preset, a YAML file, or a `.py` file of the reference implementation. Variables
    `OSORA_*` of `environment` are read, but not those of `others`, the settings of other commands.
    """

    overrides: Layer = field(default_factory=dict)
    saved: SavedSettings | None = None
    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[type[Section]] = ()
    on: PlannedMachine | None = None
    """GPUs that a dry run plans for, and need not be here; None: this machine."""


def load_runtime_settings(request: GenerateRequest) -> RuntimeSettings:
    """Return what decides which model runs, and where: this comes before the preset, which depends on the model.

    `model_choice` is the model that the settings name, where they name one.
    Raises RequestError if a key is unknown, or a value breaks a rule, and FileProblem if the settings file is missing
    or broken.
    """
    given = _given(request)
    runtime = validate(_RuntimeOnly, {key: at for key, at in given.items() if key.startswith("runtime.")}).runtime
    named = given.get("model.name")
    if named is None and request.on is not None and runtime.model_choice is ModelName.AUTO:
        # No demo is planned for where its weights and GPUs are not looked at.
        return runtime.replace({"model_choice": ModelName.OPEN_SORA_V2})
    if named is None or runtime.model_choice is not ModelName.AUTO:
        return runtime
    if named.value not in (models := [name for name in ModelName if name is not ModelName.AUTO]):
        raise RequestError(f"model.name={named.value} must be one of {', '.join(models)} (from {named.source})")
    return runtime.replace({"model_choice": named.value})


def load_generate_settings(
    request: GenerateRequest, *, model: ModelName, report: Callable[[str], None] = lambda line: None
) -> GenerateSettings:
    """Return the settings for `model`, from its preset and everything that was asked for.

    `report` gets a line for each setting of a `.py` file that has no place here.

    Raises:
        RequestError: a key is unknown, or a value breaks a rule; one line each.
        FileProblem: the settings file is missing or broken.
    """
    _refuse_two_sizes(request.overrides)
    given = _given(request, report)
    resolution = given.get("video.resolution")
    if any("picture.first" not in layer and _gives_no_picture(layer) for layer in (request.overrides, given)):
        # That of a preset gives way, and what is typed wins over files.
        given["picture.first"] = Given(False, "what is given")
    preset = generate_preset(model, resolution=str(resolution.value) if resolution else None)
    below = _preset(preset)
    settings = validate(GenerateSettings, given, below=below)
    if settings.sampling.fast:
        # What comes from below it gives way.
        above = request.overrides if "sampling.fast" in request.overrides else given
        own = load_preset(preset, prompt="any") if "sampling.num_inference_steps" in above else settings
        values = few_evaluations(settings.sampling, without=own.sampling.num_inference_steps)
        source = given["sampling.fast"].source
        given |= {key: Given(value, source) for key, value in values.items() if key not in above}
        settings = validate(GenerateSettings, given, below=below)
    _refuse_idle_refinement(request.overrides, settings)
    _refuse_idle_guidance(request.overrides, settings)
    if request.saved is None or request.saved.is_own:
        return settings
    _refuse_sending_files(request, settings)
    return _with_saved_files(request.saved, given, settings)


def few_evaluations(sampling: SamplingSettings, *, without: int) -> dict[str, object]:
    """Return what `sampling.fast` stands for in a run that is otherwise asked for, and has so many steps `without`."""
    values: dict[str, object] = {"sampling.solver": Solver.AB2}
    if sampling.timesteps is None:
        values["sampling.num_inference_steps"] = _FAST_STEPS
    if sampling.oscillates:
        values["sampling.mean_guidance_of"] = without
    if sampling.solver is not Solver.HEUN:
        values["sampling.step_cache"] = _FAST_CACHE
    return values


def _gives_no_picture(given: Layer) -> bool:
    """Return whether files are given to the video, or a mode that takes no picture is asked for."""
    files, named = given.get("condition.references"), given.get("condition.mode")
    mode = None if named is None else CONDITION_MODES.get(str(named.value))
    return bool(files and files.value) or (mode is not None and not mode.gives_pictures)


def given_for(request: GenerateRequest, key: str) -> Given | None:
    """Return a setting of a request, and where it was given, such as `--threads` or a file; None where it was not.
    It raises what `load_runtime_settings` raises.
    """
    given = _given(request).get(key)
    return None if given is None or given.value is None else given


def source_of(request: GenerateRequest, key: str) -> str | None:
    """Return where a setting was given; see `given_for`."""
    given = given_for(request, key)
    return None if given is None else given.source


def _refuse_two_sizes(overrides: Layer) -> None:
    pixels = [overrides[key] for key in ("video.width", "video.height") if key in overrides]
    for key in ("video.resolution", "video.aspect_ratio"):
        if pixels and (size := overrides.get(key)) is not None:
            shown = f"--set {key}={size.value}" if size.source == "--set" else f"{size.source} {size.value}"
            raise RequestError(f"{shown} has no effect with a width and height in pixels: drop it, or these")


def _refuse_idle_refinement(overrides: Layer, settings: GenerateSettings) -> None:
    switches = ("refine.prompt", "refine.motion_score")
    for key, given in overrides.items():
        if key.startswith("refine.") and key not in switches and not settings.refine.is_on:
            raise RequestError(f"{key}={given.value} has no effect without --refine and --motion-score auto: drop it")


def _refuse_idle_guidance(overrides: Layer, settings: GenerateSettings) -> None:
    idle = idle_guidance(settings)
    for key, given in overrides.items():
        if key in idle:
            shown = key if given.source == "--set" else given.source
            raise RequestError(
                f"{shown} has no effect with the distilled model {settings.model.name}, whose guidance is an input: "
                "drop it, or use --set sampling.embedded_guidance=X"
            )


def _refuse_sending_files(request: GenerateRequest, settings: GenerateSettings) -> None:
    """Refuse to send pictures to a server that only a file has named."""
    files = settings.condition.references
    if request.saved and files and settings.refine.is_on and "condition.references" not in request.overrides:
        named = " ".join(f"--ref {shlex.quote(escaped(file))}" for file in files)
        raise RequestError(
            f"a refined prompt would send files to the server that {request.saved.source} names: {named}",
            hint="give them again to send them, or drop --refine and --motion-score auto",
        )


def _with_saved_files(saved: SavedSettings, given: Layer, settings: GenerateSettings) -> GenerateSettings:
    """Refuse to make a video without the weights and adapters that made it before; they must be given again.

    Adapters that are given again must be those of then, as far as their hashes are known.
    """
    recorded = _read_saved(saved)
    try:
        needed = files_needed(recorded, settings, decodes=saved.decodes, given=given)
        adapters = recorded_adapters(recorded)
    except ValueError as error:
        raise FileProblem(f"{saved.source} is damaged: {error}") from error
    if needed:
        others = {"runtime.weights": "--weights none for the usual folder", "loras": "--set loras= for no adapter"}
        known = [words for key, words in others.items() if key in needed]
        raise RequestError(
            f"{saved.source} was made with {' '.join(needed.values())}, and files are not taken from it",
            hint=f"give {'this' if len(needed) == 1 else 'these'} again, or {' and '.join(known) or 'other files'}",
        )
    if saved.decodes or "loras" not in given or given["loras"].source in ("--set", "set"):
        return settings
    loras = tuple(
        lora.replace({"sha256": lora.sha256 or adapters[path].sha256})
        if (path := str(Path(lora.path).absolute())) in adapters
        else lora
        for lora in settings.loras
    )
    return settings.replace({"loras": loras})


def load_preset(name: str, *, prompt: str) -> GenerateSettings:
    """Return the settings of a preset as they are in its file. Raises RequestError if there is no such preset."""
    return validate(GenerateSettings, {"prompt": Given(prompt, "prompt")}, below=_preset(name))


@cache
def usual_settings(model: ModelName) -> GenerateSettings:
    """Return the settings of a model where nothing is asked for."""
    return load_preset(generate_preset(model, resolution=None), prompt="any")


def read_sidecar(path: Path, *, is_own: bool = False) -> SavedSettings:
    """Return the settings in the JSON file that a run wrote beside its result; `is_own` as in `SavedSettings`.
    Raises FileProblem if the file is missing, unreadable, or not a sidecar.
    """
    hint = "--from takes the .json file beside a result"
    document = read_json_object(path, hint=hint)
    schema = document.get("schema")
    if schema != SIDECAR_SCHEMA:
        raise FileProblem(f"{path} has the schema {plain(repr(schema))}, and must have {SIDECAR_SCHEMA!r}", hint=hint)
    if not isinstance(document.get("settings"), dict):
        raise FileProblem(f"{path} has no settings in it", hint=hint)
    return SavedSettings(source=str(path), values=document["settings"], is_own=is_own)


class _RuntimeOnly(Section):
    """What can be validated without a preset."""

    runtime: RuntimeSettings = RuntimeSettings()


def _preset(name: str) -> Layer:
    path = preset_path(name, "generate")
    return read_sections(GenerateSettings, read_yaml(path), source=str(path))


def _given(request: GenerateRequest, report: Callable[[str], None] = lambda line: None) -> dict[str, Given]:
    """Return everything above the preset."""
    config: dict[str, Given] = {}
    if request.config:
        path = settings_path(request.config, "generate")
        read_reference = partial(read_reference_generation, num_devices=_num_devices(request.overrides))
        config = read_sections(GenerateSettings, read_settings(path, read_reference, report), source=str(path))
    environment = read_environment(GenerateSettings, request.environment, others=request.others)
    below = {**config, **environment}
    if request.saved:
        saved = _read_saved(request.saved)
        # It says nothing of a picture where none was made first.
        saved.setdefault("picture.first", Given(False, request.saved.source))
        if request.saved.is_own:
            below = saved
        else:
            _refuse_description(request, config)
            # What it left out took no part in it, and must not come from the shell now.
            below = {key: at for key, at in below.items() if key in RESERVED - TYPED}
            named = named_format(request.overrides.get("output.path", below.get("output.path")))
            saved = description(saved, decodes=request.saved.decodes)
            if named is not None:
                saved.pop("output.format", None)
            if request.saved.output is not None:
                saved["output.path"] = Given(str(request.saved.output), request.saved.source)
            below |= saved
    if not request.overrides.keys().isdisjoint(("video.resolution", "video.aspect_ratio")):
        # A size in pixels below would win over the one that was asked for.
        below = {key: given for key, given in below.items() if key not in ("video.height", "video.width")}
    if "prompt" in request.overrides:
        # Of an earlier run's prompt.
        below.pop("refine.original", None)
    return {**below, **request.overrides}


def _read_saved(saved: SavedSettings) -> dict[str, Given]:
    return read_sections(GenerateSettings, without_retired_keys(saved.values), source=saved.source)


def _refuse_description(request: GenerateRequest, config: Layer) -> None:
    """Refuse two files that both describe the video."""
    key = next((key for key in config if key in DESCRIPTION), None)
    if key is not None and request.saved is not None:
        raise RequestError(
            f"--config {request.config} cannot go with {request.saved.source}, whose description of the video is "
            f"complete: both may have {key}",
            hint="change single settings with flags or --set",
        )


def _num_devices(overrides: Layer) -> int:
    """Return how many devices the command line asks for; what is wrong in it is an error later."""
    counts = [overrides[key].value for key in ("parallel.gpus", "parallel.nnodes") if key in overrides]
    if "parallel.devices" in overrides and "parallel.gpus" not in overrides:
        counts.append(len(str(overrides["parallel.devices"].value).split(",")))
    return prod(int(str(count)) if str(count).isdigit() else 1 for count in counts)
