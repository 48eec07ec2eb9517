"""From what was typed to the settings of `osora generate`.

Highest first: the command line, the settings of an earlier run (`--from`), the environment (see `read_environment`),
`--config FILE`, the preset of the model, the defaults.

An earlier run goes above the environment because it must give the same file again whatever the shell has set; only
what differs between machines, the place of the weights and what is offloaded, goes below.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.settings.base import Section
from opensora_cli.settings.devices import ParallelSettings, RuntimeSettings, without_retired_keys
from opensora_cli.settings.enums import ModelChoice, ModelName
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import generate_preset, preset_path, read_yaml
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate

SIDECAR_SCHEMA = "osora.generate/1"
MACHINE_KEYS = frozenset(
    {
        "runtime.weights",
        *(f"memory.{name}" for name in ("offload", "resident_blocks", "limit", "host_weights")),
        *(f"parallel.{name}" for name in ParallelSettings.model_fields),
    }
)
"""What depends on the machine: of a saved run these give way to the environment of the one that repeats it."""


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """Settings that an earlier run saved in a file, as `GenerateSettings.model_dump(mode="json")` gives them."""

    source: str
    values: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What was asked for, before a model is chosen and anything is validated.

    `overrides` is what the command line gave (see `layers.collect_overrides`), and `saved` the settings of an earlier
    run. Variables `OSORA_*` of `environment` are read, but not those of `others`, the settings of other commands.
    """

    overrides: Layer = field(default_factory=dict)
    saved: SavedSettings | None = None
    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[type[Section]] = ()


def load_runtime_settings(request: GenerateRequest) -> RuntimeSettings:
    """Return what decides which model runs, and where: this comes before the preset, which depends on the model.

    `model_choice` is the model that the settings name, where they name one.
    Raises RequestError if a key is unknown, or a value breaks a rule, and FileProblem if the settings file is missing
    or broken.
    """
    given = _given(request)
    runtime = validate(_RuntimeOnly, {key: at for key, at in given.items() if key.startswith("runtime.")}).runtime
    named = given.get("model.name")
    if named is None or runtime.model_choice is not ModelChoice.AUTO:
        return runtime
    if named.value not in list(ModelName):
        raise RequestError(f"model.name={named.value} must be one of {', '.join(ModelName)} (from {named.source})")
    return runtime.replace({"model_choice": named.value})


def load_generate_settings(request: GenerateRequest, *, model: ModelName) -> GenerateSettings:
    """Return the settings for `model`, from its preset and everything that was asked for.

    Raises:
        RequestError: a key is unknown, or a value breaks a rule; one line each.
        FileProblem: the settings file is missing or broken.
    """
    given = _given(request)
    resolution = given.get("video.resolution")
    preset = generate_preset(model, resolution=str(resolution.value) if resolution else None)
    return validate(GenerateSettings, given, below=_preset(preset))


def load_preset(name: str, *, prompt: str) -> GenerateSettings:
    """Return the settings of a preset as they are in its file. Raises RequestError if there is no such preset."""
    return validate(GenerateSettings, {"prompt": Given(prompt, "prompt")}, below=_preset(name))


def read_sidecar(path: Path) -> SavedSettings:
    """Return the settings in the JSON file that a run wrote beside its result.
    Raises FileProblem if the file is missing, unreadable, or not a sidecar.
    """
    hint = "--from takes the .json file beside a result"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileProblem(f"{path} does not exist", hint=hint) from None
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise FileProblem(f"{path} is not JSON", hint=hint) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SIDECAR_SCHEMA:
        raise FileProblem(f"{path} has the schema {schema!r}, and must have {SIDECAR_SCHEMA!r}", hint=hint)
    if not isinstance(document.get("settings"), dict):
        raise FileProblem(f"{path} has no settings in it", hint=hint)
    return SavedSettings(source=str(path), values=document["settings"])


class _RuntimeOnly(Section):
    """What can be validated without a preset."""

    runtime: RuntimeSettings = RuntimeSettings()


def _preset(name: str) -> Layer:
    path = preset_path("generate", name)
    return read_sections(GenerateSettings, read_yaml(path), source=str(path))


def _given(request: GenerateRequest) -> dict[str, Given]:
    """Return everything above the preset."""
    if request.saved and request.config:
        raise RequestError(
            f"--config {request.config} cannot go with {request.saved.source}, whose settings are complete",
            hint="change single settings with flags or --set",
        )
    config: dict[str, Given] = {}
    if request.config:
        config = read_sections(GenerateSettings, read_yaml(request.config), source=str(request.config))
    environment = read_environment(GenerateSettings, request.environment, others=request.others)
    saved: dict[str, Given] = {}
    if request.saved:
        saved = read_sections(GenerateSettings, without_retired_keys(request.saved.values), source=request.saved.source)
    machine = {key: saved.pop(key) for key in MACHINE_KEYS & saved.keys()}
    return {**config, **machine, **environment, **saved, **request.overrides}
