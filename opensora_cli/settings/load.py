"""Loading of the settings of `osora generate`.

Precedence, highest first: the command line, the description of the video in a file of an earlier run (`--from`), the
environment, `--config FILE`, the preset of the model, the defaults. An earlier run precedes the environment because it
must make the same file again whatever the shell has set.

A sidecar or a file of latents may come from somebody else, and brings the description of its video alone. The command
line, the environment, `--config` and this machine decide where to write, what to replace, which server to ask, which
weights to read and which devices to use.
"""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from opensora_cli.core.choices import MediaFormat, Solver
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.formatting import escaped
from opensora_cli.core.ranks import is_of_launcher
from opensora_cli.core.reading import read_json_object, require_schema
from opensora_cli.core.section import NO_VALUE, changed, is_inside, shown
from opensora_cli.models.registry import ARCHITECTURES, AUTO, DEMO, OPEN_SORA_V2
from opensora_cli.settings.applies import refuse_without_effect
from opensora_cli.settings.components import LoraFile, settings_of
from opensora_cli.settings.flags import FLAGS, option_of
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import SamplingSettings, named_format
from opensora_cli.settings.layers import (
    ConfigFile,
    Given,
    Layer,
    collect_overrides,
    open_config,
    preset_path,
    read_environment,
    read_sections,
    read_settings_file,
    validate,
)

if TYPE_CHECKING:
    from opensora_cli.settings.hardware import PlannedMachine

SIDECAR_SCHEMA = "osora.generate/3"
_FAST_STEPS, _FAST_CACHE = 15, 0.15
ANY_PROMPT = "raining, sea"
"""Prompt of benchmarks, and of plans without a prompt."""
_ANY = {"prompt": Given(ANY_PROMPT, "prompt")}

# References are read, never written, and sent to no server: see `_refuse_sending_files`.
_KEYS = """
model vae text picture.model picture.vae sampling prompt_suffix
prompt prompts_at negative_prompt refine.original
video.resolution video.aspect_ratio video.height video.width video.num_frames video.fps video.resolutions
video.aspect_ratios video.max_frames video.picture_frames video.extend video.causal_lengths
draft.resolution draft.strength condition.mode condition.references condition.fit condition.video_latent_frames
condition.seamless condition.continued condition.easy_latent_frames
picture.first picture.save picture.resolution picture.own_model
output.format output.metadata output.last_frame output.save_latents output.save_state_every output.preview_every
runtime.model_choice runtime.dtype runtime.threads runtime.attention compile
precision.linear memory.fp8_storage parallel.compression
"""
DESCRIPTION = frozenset(_KEYS.split())
"""Settings that a file of an earlier run brings, and sections of numbers and choices. All others are reserved."""
TYPED = frozenset({"refine.prompt", "refine.motion_score"})
"""Settings that only the command line can set beside such a file, whose prompt is rewritten already."""
_SAMPLED_WITH = (
    *("files.transformer", "files.t5", "files.clip", "files.turbo"),
    *("picture.files.transformer", "picture.files.vae", "picture.files.hub_repo", "loras"),
)
"""Files that decoding does not read. A file of latents records them."""
_FILES = ("runtime.weights", "files.vae", "files.hub_repo", *_SAMPLED_WITH)
_MACHINE = frozenset({"runtime.device", "memory", "parallel"})
"""Devices, and how a video is divided and offloaded. A file brings only what is in DESCRIPTION."""


def is_description(key: str) -> bool:
    """Return whether a file of an earlier run may bring a setting."""
    return is_inside(key, DESCRIPTION)


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """Settings in a file of an earlier run, as `GenerateSettings.model_dump(mode="json")` writes them."""

    source: str
    values: Mapping[str, object]
    is_own: bool = False
    """Whether the launcher of this rank wrote the file. All of its settings are taken then."""
    decodes: bool = False
    """Whether the file has finished latents, which are decoded."""

    @cached_property
    def layer(self) -> dict[str, Given]:
        """Settings by key. Raises RequestError if a key is unknown."""
        # Sidecars without a first picture do not mention it.
        first = {"picture.first": Given(False, self.source)}
        return first | read_sections(GenerateSettings, self.values, source=self.source)

    def description(self) -> dict[str, Given]:
        """Return the settings that a run takes. If it decodes latents, it also records the weights that made them."""
        saved, recorded = self.layer, _SAMPLED_WITH if self.decodes else ()
        taken = {key: at for key, at in saved.items() if is_description(key) or key in recorded}
        if str(_value(taken, "prompt_suffix.motion_score")) == "auto":
            # `auto` would ask a server.
            del taken["prompt_suffix.motion_score"]
        ending = named_format(str(_value(saved, "output.path")))
        usual = MediaFormat.PNG if str(_value(saved, "video.num_frames")) == "1" else MediaFormat.MP4
        if ending not in (None, usual) and not _is_set(_value(taken, "output.format")):
            taken["output.format"] = Given(str(ending), self.source)
        return taken

    def adapters(self) -> tuple[LoraFile, ...]:
        """Return the adapters of the run. Raises FileProblem if they are malformed."""
        files = self.layer["loras"].value if "loras" in self.layer else ()
        try:
            return TypeAdapter(tuple[LoraFile, ...]).validate_python(files)
        except ValidationError as error:
            raise FileProblem(f"{self.source} is damaged: loras is no list of adapters") from error


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Settings from all sources, before a model is chosen and they are validated."""

    overrides: Layer = field(default_factory=dict)
    """Settings of the command line; see `layers.collect_overrides`."""
    saved: SavedSettings | None = None
    """Settings of an earlier run."""
    environment: Layer = field(default_factory=dict)
    config: Layer = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Lines about settings of a `.py` file that osora does not have."""
    on: "PlannedMachine | None" = None
    """Machine that a dry run plans for. None means this machine."""

    @cached_property
    def given(self) -> Layer:
        """All settings above the preset."""
        below = {**self.config, **self.environment} if self.saved is None else self._with_saved(self.saved)
        if not self.overrides.keys().isdisjoint(("video.resolution", "video.aspect_ratio")):
            # A size in pixels from below would win over the size that is typed.
            below = {key: given for key, given in below.items() if key not in ("video.height", "video.width")}
        if "prompt" in self.overrides:
            # The recorded original belongs to the prompt of the earlier run.
            below.pop("refine.original", None)
        given = {**below, **self.overrides}
        if any("picture.first" not in layer and _gives_no_picture(layer) for layer in (self.overrides, given)):
            # The first picture of a preset gives way to references.
            given["picture.first"] = Given(False, "the reference or mode")
        return given

    def text(self, key: str) -> str | None:
        """Return a setting as text before validation; None if it is not given or unset."""
        value = _value(self.given, key)
        return str(value) if _is_set(value) else None

    @property
    def model(self) -> str:
        """Model that the settings name, or AUTO. A wrong name means the demo, whose validation reports the name."""
        # A plan for another machine does not look for weights here.
        usual = AUTO if self.on is None else OPEN_SORA_V2
        for choice in (self.text("runtime.model_choice"), self.text("model.name")):
            if choice not in (None, AUTO):
                return choice if choice in ARCHITECTURES else DEMO
        return usual

    def _with_saved(self, saved: SavedSettings) -> dict[str, Given]:
        """Return the settings below the command line, with those of an earlier run."""
        if saved.is_own:
            return dict(saved.layer)
        if key := next(filter(is_description, self.config), None):
            raise RequestError(
                f"--config {self.config[key].source} cannot go with {saved.source}, whose description of the video is "
                f"complete: both may have {key}",
                hint="change single settings with flags or --set",
            )
        # Settings that the sidecar omits had no effect and must not come from the shell now.
        others = {**self.config, **self.environment}
        below = {key: at for key, at in others.items() if not is_description(key) and key not in TYPED}
        taken = saved.description()
        if named_format(str(_value({**below, **self.overrides}, "output.path"))) is not None:
            taken.pop("output.format", None)
        return {**below, **taken}


def generate_request(
    given: Layer | None = None,
    *,
    below: Layer | None = None,
    assignments: Iterable[str] | Mapping[str, object] = (),
    saved: SavedSettings | None = None,
    config: Path | ConfigFile | None = None,
    environment: Mapping[str, str] = os.environ,
    on: "PlannedMachine | None" = None,
    any_prompt: bool = False,
) -> GenerateRequest:
    """Return the settings from all sources, as the command line and Python programs name them.

    Args:
        given: Options, and the prompt.
        below: Settings that give way to `given` and `assignments` alone.
        assignments: Settings by key; see `collect_overrides`.
        saved: Settings of an earlier run.
        config: Preset by name, YAML file, or `.py` file of the reference implementation.
        on: Machine that a dry run plans for, with any prompt.
        any_prompt: Whether any prompt will do if no source has one.

    Raises:
        RequestError: A key is unknown, or an assignment is wrong.
        FileProblem: A file of settings is missing or broken.
    """
    overrides = {**(below or {}), **collect_overrides(GenerateSettings, given or {}, assignments)}
    if on is not None:
        overrides = {**on.counts(overrides), **overrides}
    layer, notes = {}, list[str]()
    if config is not None:
        from opensora_cli.settings.reference import read_reference_generation, read_settings

        file = open_config(config, "generate")
        values = read_settings(file, read_reference_generation, notes.append)
        layer = read_sections(GenerateSettings, values, source=str(file.path))
    variables = read_environment(GenerateSettings, environment)
    request = GenerateRequest(overrides=overrides, saved=saved, environment=variables, config=layer, notes=notes, on=on)
    if (any_prompt or on is not None) and _value(request.given, "prompt") is None:
        return replace(request, overrides={**overrides, **_ANY})
    return request


def load_generate_settings(request: GenerateRequest, *, model: str) -> GenerateSettings:
    """Return the settings of a request over the preset of `model`."""
    given, below = dict(request.given), _preset_layer(model, request.text("video.resolution"))
    settings = validate(GenerateSettings, given, below=below)
    if settings.sampling.fast:
        # `fast` wins over sources below its own.
        above = request.overrides if "sampling.fast" in request.overrides else given
        own = validate(GenerateSettings, _ANY, below=below) if "sampling.num_inference_steps" in above else settings
        values = few_evaluations(settings.sampling, without=own.sampling.num_inference_steps)
        source = given["sampling.fast"].source
        given |= {key: Given(value, source) for key, value in values.items() if key not in above}
        settings = validate(GenerateSettings, given, below=below)
    saved, typed = request.saved, request.overrides
    if saved is not None and saved.decodes:
        # The settings that made the latents may be given again.
        typed = {key: at for key, at in typed.items() if str(at.value) != str(_value(saved.layer, key))}
    refuse_without_effect(settings, typed)
    if saved is None or saved.is_own:
        return settings
    _refuse_sending_files(saved, request.overrides, settings)
    return _with_saved_files(saved, given, settings)


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


def load_preset(name: str, *, prompt: str = ANY_PROMPT) -> GenerateSettings:
    """Return the settings in the file of a preset. Raises RequestError if there is no such preset."""
    return validate(GenerateSettings, {"prompt": Given(prompt, "prompt")}, below=_preset(name))


@cache
def usual_settings(model: str) -> GenerateSettings:
    """Return the settings of a model's first preset."""
    return validate(GenerateSettings, _ANY, below=_preset_layer(model, None))


def _preset_layer(model: str, resolution: str | None) -> Layer:
    presets = ARCHITECTURES[model].presets
    if not presets:
        return read_sections(GenerateSettings, settings_of(model), source=model)
    return _preset(resolution if resolution in presets else presets[0])


@cache
def _preset(name: str) -> Layer:
    path = preset_path(name, "generate")
    values = read_sections(GenerateSettings, read_settings_file(path), source=str(path))
    model = str(values["model.name"].value)
    return {**read_sections(GenerateSettings, settings_of(model), source=model), **values}


def read_sidecar(path: Path) -> SavedSettings:
    """Return the settings in the sidecar of a result."""
    hint = "--from takes the .json file beside a result"
    document = read_json_object(path, hint=hint)
    require_schema(document, SIDECAR_SCHEMA, path, hint=hint)
    if not isinstance(document.get("settings"), dict):
        raise FileProblem(f"{path} has no settings in it", hint=hint)
    return SavedSettings(source=str(path), values=document["settings"], is_own=is_of_launcher(path, os.environ))


def flags_again(settings: GenerateSettings, *, decodes: bool) -> list[str]:
    """Return the flags that continuing saved latents of `settings` needs."""
    values = {key: attrgetter(key)(settings) for key in _FILES}
    needed = _files_needed(values, settings.loras, usual_settings(settings.model.name), decodes=decodes)
    options = {row.key: option_of(name) for name, row in FLAGS.items()}
    machine = [
        f"{options[key]} {shown(value)}" if key in options else f"--set {key}={shown(value)}"
        for key, value in changed(settings).items()
        # Only --prompts has rows to spread.
        if is_inside(key, _MACHINE) and not is_description(key) and key != "parallel.data_parallel_degree"
    ]
    return [*needed.values(), *machine]


def _files_needed(
    saved: Mapping[str, object], adapters: Iterable[LoraFile], settings: GenerateSettings, *, decodes: bool
) -> dict[str, str]:
    """Return the flags, by key, for the weights and adapters of an earlier run that differ from those of `settings`."""
    needed = {}
    for key in _FILES:
        value = saved.get(key)
        if not _is_set(value) or (decodes and key in _SAMPLED_WITH):
            continue
        if key == "loras":
            words = [word for lora in adapters for word in ("--lora", lora.shown)]
        elif value == attrgetter(key)(settings):
            continue
        else:
            words = ["--weights", str(value)] if key == "runtime.weights" else ["--set", f"{key}={value}"]
        needed[key] = escaped(shlex.join(words))
    return needed


def _with_saved_files(saved: SavedSettings, given: Layer, settings: GenerateSettings) -> GenerateSettings:
    """Require that the weights and adapters of the earlier run are given again, with the same hashes if recorded."""
    adapters = saved.adapters()
    values = {key: at.value for key, at in saved.layer.items() if key not in given}
    if needed := _files_needed(values, adapters, settings, decodes=saved.decodes):
        others = {"runtime.weights": "--weights none for the usual folder", "loras": "--set loras= for no adapter"}
        known = [words for key, words in others.items() if key in needed]
        raise RequestError(
            f"{saved.source} was made with {' '.join(needed.values())}, and files are not taken from it",
            hint=f"give {'this' if len(needed) == 1 else 'these'} again, or {' and '.join(known) or 'other files'}",
        )
    if saved.decodes or "loras" not in given or given["loras"].source in ("--set", "set"):
        return settings
    hashes = {os.path.abspath(lora.path): lora.sha256 for lora in adapters}
    loras = [lora.replace({"sha256": lora.sha256 or hashes.get(os.path.abspath(lora.path))}) for lora in settings.loras]
    return settings.model_copy(update={"loras": tuple(loras)})


def _refuse_sending_files(saved: SavedSettings, overrides: Layer, settings: GenerateSettings) -> None:
    """Refuse to send pictures to a server if only a file names them."""
    files = settings.condition.references
    if files and settings.refine.is_on and "condition.references" not in overrides:
        named = " ".join(f"--ref {shlex.quote(escaped(file))}" for file in files)
        raise RequestError(
            f"a refined prompt would send files to the server that {saved.source} names: {named}",
            hint="give them again to send them, or drop --refine and --motion-score auto",
        )


def _gives_no_picture(given: Layer) -> bool:
    """Return whether settings name references, or a mode that gives no picture."""
    mode = CONDITION_MODES.get(str(_value(given, "condition.mode")))
    return bool(_value(given, "condition.references")) or (mode is not None and not mode.gives_pictures)


def _value(layer: Layer, key: str) -> object:
    return layer[key].value if key in layer else None


def _is_set(value: object) -> bool:
    """Return whether a value is neither empty nor one of the words for None."""
    return bool(value) and not (isinstance(value, str) and value.strip().lower() in NO_VALUE)
