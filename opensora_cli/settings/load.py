"""Loading of the settings of `osora generate`.

Precedence, highest first: the command line, the description of the video in a file of an earlier run (`--from`), the
environment, `--config FILE`, the preset of the model, the defaults.

An earlier run precedes the environment because it must make the same file again whatever the shell has set. Settings
that such a file may not bring (see `saved.RESERVED`) come from the other sources alone.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import escaped, plain
from opensora_cli.core.reading import read_json_object
from opensora_cli.core.solvers import Solver
from opensora_cli.settings.applies import refuse_without_effect
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

SIDECAR_SCHEMA = "osora.generate/1"
_FAST_STEPS, _FAST_CACHE = 15, 0.15


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """Settings in a file of an earlier run, as `GenerateSettings.model_dump(mode="json")` writes them."""

    source: str
    values: Mapping[str, object]
    is_own: bool = False
    """Whether the launcher of this rank wrote the file. All of its settings are taken then."""
    decodes: bool = False
    """Whether the file has finished latents, which are decoded."""
    output: Path | None = None
    """Place of the result unless the command line names one. None means the usual place."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request before its model is chosen and its settings are validated.

    `overrides` come from the command line (see `layers.collect_overrides`), and `saved` from an earlier run. `config`
    is the name of a preset, a YAML file, or a `.py` file of the reference implementation. Variables in `environment`
    that belong to `others`, the settings of other commands, are ignored.
    """

    overrides: Layer = field(default_factory=dict)
    saved: SavedSettings | None = None
    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[type[Section]] = ()
    on: PlannedMachine | None = None
    """Machine that a dry run plans for. None means this machine."""

    @property
    def given(self) -> dict[str, Given]:
        """All settings above the preset. Files are read once.

        Raises:
            RequestError: A key is unknown, or two files describe the video.
            FileProblem: The file of settings is missing or broken.
        """
        return dict(self._read[0])

    @property
    def notes(self) -> list[str]:
        """One line for each setting of a `.py` file that osora does not have. Errors are those of `given`."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Layer, list[str]]:
        config: Layer = {}
        notes: list[str] = []
        if self.config:
            path = settings_path(self.config, "generate")
            read_reference = partial(read_reference_generation, num_devices=_num_devices(self.overrides))
            values = read_settings(path, read_reference, notes.append)
            config = read_sections(GenerateSettings, values, source=str(path))
        environment = read_environment(GenerateSettings, self.environment, others=self.others)
        below = {**config, **environment} if self.saved is None else self._with_saved(self.saved, config, environment)
        if not self.overrides.keys().isdisjoint(("video.resolution", "video.aspect_ratio")):
            # A size in pixels from below would win over the size that is typed.
            below = {key: given for key, given in below.items() if key not in ("video.height", "video.width")}
        if "prompt" in self.overrides:
            # It belongs to the prompt of the earlier run.
            below.pop("refine.original", None)
        return {**below, **self.overrides}, notes

    def _with_saved(self, saved: SavedSettings, config: Layer, environment: Layer) -> dict[str, Given]:
        """Return the layers below the command line where there is an earlier run."""
        recorded = _read_saved(saved)
        # Sidecars without a first picture do not mention it.
        recorded.setdefault("picture.first", Given(False, saved.source))
        if saved.is_own:
            return recorded
        if key := next((key for key in config if key in DESCRIPTION), None):
            raise RequestError(
                f"--config {self.config} cannot go with {saved.source}, whose description of the video is "
                f"complete: both may have {key}",
                hint="change single settings with flags or --set",
            )
        # Settings that the sidecar omits had no effect and must not come from the shell now.
        below = {key: at for key, at in {**config, **environment}.items() if key in RESERVED - TYPED}
        taken = description(recorded, decodes=saved.decodes)
        if named_format(self.overrides.get("output.path", below.get("output.path"))) is not None:
            taken.pop("output.format", None)
        if saved.output is not None:
            taken["output.path"] = Given(str(saved.output), saved.source)
        return {**below, **taken}


def load_runtime_settings(request: GenerateRequest) -> RuntimeSettings:
    """Return the settings that decide on the model and the device. The preset depends on the model.

    `model_choice` is the model that the settings name, if they name one. Errors are those of `GenerateRequest.given`,
    and RequestError if a value breaks a rule.
    """
    given = request.given
    runtime = validate(_RuntimeOnly, {key: at for key, at in given.items() if key.startswith("runtime.")}).runtime
    named = given.get("model.name")
    if runtime.model_choice is not ModelName.AUTO:
        return runtime
    if named is None:
        # A plan for another machine does not look for weights here.
        return runtime if request.on is None else runtime.replace({"model_choice": ModelName.OPEN_SORA_V2})
    models = [name for name in ModelName if name is not ModelName.AUTO]
    if named.value not in models:
        raise RequestError(f"model.name={named.value} must be one of {', '.join(models)} (from {named.source})")
    return runtime.replace({"model_choice": named.value})


class _RuntimeOnly(Section):
    """Settings that can be validated without a preset."""

    runtime: RuntimeSettings = RuntimeSettings()


def load_generate_settings(
    request: GenerateRequest, *, model: ModelName, report: Callable[[str], None] = lambda line: None
) -> GenerateSettings:
    """Return the settings of a request over the preset of `model`.

    `report` gets one line for each setting of a `.py` file that osora does not have.

    Raises:
        RequestError: A key is unknown, a value breaks a rule, or a typed setting has no effect.
        FileProblem: A file of settings is missing or broken.
    """
    given = request.given
    for line in request.notes:
        report(line)
    if any("picture.first" not in layer and _gives_no_picture(layer) for layer in (request.overrides, given)):
        # The first picture of a preset gives way to references.
        given["picture.first"] = Given(False, "the reference or mode")
    resolution = given.get("video.resolution")
    preset = generate_preset(model, resolution=str(resolution.value) if resolution else None)
    below = _preset(preset)
    settings = validate(GenerateSettings, given, below=below)
    if settings.sampling.fast:
        # `fast` wins over sources below its own.
        above = request.overrides if "sampling.fast" in request.overrides else given
        own = load_preset(preset, prompt="any") if "sampling.num_inference_steps" in above else settings
        values = few_evaluations(settings.sampling, without=own.sampling.num_inference_steps)
        source = given["sampling.fast"].source
        given |= {key: Given(value, source) for key, value in values.items() if key not in above}
        settings = validate(GenerateSettings, given, below=below)
    refuse_without_effect(settings, request.overrides)
    if request.saved is None or request.saved.is_own:
        return settings
    _refuse_sending_files(request, settings)
    return _with_saved_files(request.saved, given, settings)


def few_evaluations(sampling: SamplingSettings, *, without: int) -> dict[str, object]:
    """Return the settings that `sampling.fast` stands for in a run with `without` steps otherwise."""
    values: dict[str, object] = {"sampling.solver": Solver.AB2}
    if sampling.timesteps is None:
        values["sampling.num_inference_steps"] = _FAST_STEPS
    if sampling.oscillates:
        values["sampling.mean_guidance_of"] = without
    if sampling.solver is not Solver.HEUN:
        values["sampling.step_cache"] = _FAST_CACHE
    return values


def _gives_no_picture(given: Layer) -> bool:
    """Return whether references or a mode without a picture are asked for."""
    files, named = given.get("condition.references"), given.get("condition.mode")
    mode = None if named is None else CONDITION_MODES.get(str(named.value))
    return bool(files and files.value) or (mode is not None and not mode.gives_pictures)


def given_for(request: GenerateRequest, key: str) -> Given | None:
    """Return the value and source of a setting, or None if it is not given. Errors are those of `given`."""
    given = request.given.get(key)
    return None if given is None or given.value is None else given


def _refuse_sending_files(request: GenerateRequest, settings: GenerateSettings) -> None:
    """Refuse to send pictures to a server if only a file names them."""
    files = settings.condition.references
    if request.saved and files and settings.refine.is_on and "condition.references" not in request.overrides:
        named = " ".join(f"--ref {shlex.quote(escaped(file))}" for file in files)
        raise RequestError(
            f"a refined prompt would send files to the server that {request.saved.source} names: {named}",
            hint="give them again to send them, or drop --refine and --motion-score auto",
        )


def _with_saved_files(saved: SavedSettings, given: Layer, settings: GenerateSettings) -> GenerateSettings:
    """Require that the weights and adapters of the earlier run are given again, with the same hashes if recorded."""
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
    """Return the settings in the file of a preset. Raises RequestError if there is no such preset."""
    return validate(GenerateSettings, {"prompt": Given(prompt, "prompt")}, below=_preset(name))


@cache
def usual_settings(model: ModelName) -> GenerateSettings:
    """Return the settings of a model's first preset."""
    return load_preset(generate_preset(model, resolution=None), prompt="any")


@cache
def _preset(name: str) -> Layer:
    path = preset_path(name, "generate")
    return read_sections(GenerateSettings, read_yaml(path), source=str(path))


def read_sidecar(path: Path, *, is_own: bool = False) -> SavedSettings:
    """Return the settings in the sidecar of a result. `is_own` is the field of `SavedSettings`.

    Raises:
        FileProblem: The file is missing, unreadable or not a sidecar.
    """
    hint = "--from takes the .json file beside a result"
    document = read_json_object(path, hint=hint)
    schema = document.get("schema")
    if schema != SIDECAR_SCHEMA:
        raise FileProblem(f"{path} has the schema {plain(repr(schema))}, and must have {SIDECAR_SCHEMA!r}", hint=hint)
    if not isinstance(document.get("settings"), dict):
        raise FileProblem(f"{path} has no settings in it", hint=hint)
    return SavedSettings(source=str(path), values=document["settings"], is_own=is_own)


def _read_saved(saved: SavedSettings) -> dict[str, Given]:
    return read_sections(GenerateSettings, without_retired_keys(saved.values), source=saved.source)


def _num_devices(overrides: Layer) -> int:
    """Return the number of devices on the command line. Validation reports wrong numbers later."""
    counts = [overrides[key].value for key in ("parallel.gpus", "parallel.nnodes") if key in overrides]
    if "parallel.devices" in overrides and "parallel.gpus" not in overrides:
        counts.append(len(str(overrides["parallel.devices"].value).split(",")))
    return prod(int(str(count)) if str(count).isdigit() else 1 for count in counts)
