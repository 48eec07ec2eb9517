"""Settings of `osora vae`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import Field, PositiveInt

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import MAX_FRAMES, FileName, Section
from opensora_cli.models.registry import ARCHITECTURES, DEMO
from opensora_cli.settings.applies import VAE
from opensora_cli.settings.components import VAESettings, settings_of
from opensora_cli.settings.devices import PlacementSettings
from opensora_cli.settings.files import ConfigFile, open_config
from opensora_cli.settings.layers import Given, Layer, read_environment, read_sections, validate
from opensora_cli.settings.reference import read_reference_autoencoder, read_settings

_DEFAULT_PRESET = "demo"
_RELEASED_WEIGHTS = ("OSORA_WEIGHTS", "OSORA_RUNTIME__WEIGHTS")


class VAEWeightsSettings(Section):
    """Location of the weights."""

    file: FileName = Field(ARCHITECTURES[DEMO].files.vae, description="Name of the file in the weights folder.")
    hub_repo: FileName | None = Field(None, description="Hub repository. None means that osora contains it.")


class ClipSettings(Section):
    """Length of clips."""

    num_frames: PositiveInt = Field(33, le=MAX_FRAMES, description="Frames to encode at once. Longer videos are split.")


class VAEOutputSettings(Section):
    """Files of results."""

    folder: FileName = Field("reconstructed", description="Folder of the results.")
    overwrite: bool = Field(False, description="Replace existing files.")
    metadata: bool = Field(True, description="Write a sidecar beside each result.")


class EncodeSettings(Section):
    """Autoencoder and files to encode. Statistics of latents depend on all of these settings."""

    applies = VAE

    files: tuple[str, ...] = Field(min_length=1, description="Pictures and videos.")
    vae: VAESettings = VAESettings()
    weights: VAEWeightsSettings = VAEWeightsSettings()
    clip: ClipSettings = ClipSettings()
    runtime: PlacementSettings = PlacementSettings()


class ReconstructSettings(EncodeSettings):
    """Settings of a reconstruction."""

    output: VAEOutputSettings = VAEOutputSettings()


EncodeSettingsT = TypeVar("EncodeSettingsT", bound=EncodeSettings)


def load_vae_settings(
    schema: type[EncodeSettingsT],
    *,
    config: Path | None,
    overrides: Layer,
    environment: Mapping[str, str],
    report: Callable[[str], None] = lambda line: None,
) -> EncodeSettingsT:
    """Return the settings of a run: `overrides` over the environment over the file over the defaults.

    `config` is a preset by name, a YAML file, a `.py` file of the reference, or a recipe of `osora train` or the
    `settings.json` of its run, for the autoencoder in its folder. None means the demo. `report` gets a line with the
    names in a `.py` file that are not carried over. `OSORA_WEIGHTS`, the folder of the released models, is ignored for
    other weights.

    Raises:
        RequestError: There is no such preset, a key is unknown, or a value breaks a rule.
        FileProblem: The file is missing or broken.
    """
    file = _read(schema, open_config(config or Path(_DEFAULT_PRESET), "vae", "train"), report)
    given_repo = {**file, **overrides}.get("weights.hub_repo")
    if given_repo is None or given_repo.value is None:
        environment = {name: value for name, value in environment.items() if name not in _RELEASED_WEIGHTS}
    variables = read_environment(schema, environment)
    return validate(schema, {**file, **variables, **overrides})


def _read(schema: type[EncodeSettings], file: ConfigFile, report: Callable[[str], None]) -> dict[str, Given]:
    """Return the settings in a file over those in the entry of the model that it names."""
    path, values = file.path, dict(read_settings(file, read_reference_autoencoder, report))
    model, is_trained = values.pop("model", None), "target" in values
    is_name = isinstance(model, Mapping) and (is_trained or model.keys() == {"name"})
    name = str(model.get("name")) if isinstance(model, Mapping) and is_name else ""
    below: dict[str, Given] = {}
    if name in ARCHITECTURES:
        entry, packaged = settings_of(name), ARCHITECTURES[name].is_packaged
        weights = {"file": entry["files"]["vae"], "hub_repo": None if packaged else entry["files"]["hub_repo"]}
        below = read_sections(schema, {"vae": entry["vae"], "weights": {} if is_trained else weights}, source=name)
    elif model is not None and not is_trained:
        raise RequestError(f"model={model} (from {path}) must be the name of one of {', '.join(ARCHITECTURES)}")
    if is_trained:
        values = {"vae": values.get("vae", {}), "runtime": {"weights": values.get("output")}}
    found = {**below, **read_sections(schema, values, source=str(path))}
    if path.suffix == ".py" and not is_trained:
        # The preset of its kind names the released weights.
        preset = open_config(Path(str(found["vae.kind"].value)), "vae")
        found = {**_read(schema, preset, report), **found}
    return found
