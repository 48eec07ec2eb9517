"""Settings of `osora vae`: which autoencoder, on which files, and where results go."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import Field, PositiveInt

from opensora_cli.settings.base import MAX_FRAMES, Section
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.devices import PlacementSettings
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import preset_path, read_yaml, settings_path
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate
from opensora_cli.settings.reference import read_reference_autoencoder, read_settings
from opensora_cli.settings.train import TrainSettings

_DEFAULT_PRESET = "demo"
_RELEASED_WEIGHTS = ("OSORA_WEIGHTS", "OSORA_RUNTIME__WEIGHTS")
_TRAINED_FILE = "vae.safetensors"


class VAEWeightsSettings(Section):
    """Where the weights are."""

    file: str = Field(default=_TRAINED_FILE, min_length=1, description="name of the file, below the weights folder")
    hub_repo: str | None = Field(
        default=None, min_length=1, description="Hub repository that has it; none: it comes with osora, as the demo's"
    )


class ClipSettings(Section):
    """How videos are cut."""

    num_frames: PositiveInt = Field(
        default=33,
        le=MAX_FRAMES,
        description="longest clip that is encoded at once, a longer video in several; bounds the memory",
    )


class VAEOutputSettings(Section):
    """What is written."""

    folder: str = Field(default="reconstructed", min_length=1, description="folder of the results")
    overwrite: bool = Field(default=False, description="replace existing files")
    metadata: bool = Field(default=True, description="write a sidecar beside each result")


class EncodeSettings(Section):
    """An autoencoder, and the files that it encodes: everything that statistics of latents depend on."""

    files: tuple[str, ...] = Field(min_length=1, description="pictures and videos")
    vae: VAESettings = VAESettings()
    weights: VAEWeightsSettings = VAEWeightsSettings()
    clip: ClipSettings = ClipSettings()
    runtime: PlacementSettings = PlacementSettings()


class ReconstructSettings(EncodeSettings):
    """Everything that a reconstruction depends on."""

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
    """Return the settings of a run: `overrides` above the environment above the file above the defaults.

    `config` is a YAML file, a `.py` file of the reference implementation, or the name of a packaged preset; None: the
    demo's. `report` gets a line for each setting of a `.py` file that has no place here. Of a recipe of `osora train`,
    or the `settings.json` of its run, the autoencoder is taken, and the folder in which the run leaves it.
    `OSORA_WEIGHTS`, the folder of the released models, is not meant for weights that come from elsewhere, and then left
    alone. Raises
    RequestError if there is no such preset, a key is unknown, or a value breaks a rule, and FileProblem if the file is
    missing or broken.
    """
    path = preset_path(_DEFAULT_PRESET, "vae") if config is None else settings_path(config, "vae", "train")
    file = _read(schema, path, report)
    given_repo = {**file, **overrides}.get("weights.hub_repo")
    if given_repo is None or given_repo.value is None:
        environment = {name: value for name, value in environment.items() if name not in _RELEASED_WEIGHTS}
    others = (GenerateSettings, TrainSettings, ReconstructSettings)
    variables = read_environment(schema, environment, others=others)
    return validate(schema, {**file, **variables, **overrides})


def _read(schema: type[EncodeSettings], path: Path, report: Callable[[str], None]) -> dict[str, Given]:
    values = read_settings(path, read_reference_autoencoder, report)
    is_trained = "target" in values
    if is_trained:
        values = {"vae": values.get("vae", {}), "runtime": {"weights": values.get("output")}}
    found = read_sections(schema, values, source=str(path))
    if path.suffix == ".py" and not is_trained:
        # Where the released weights of its kind are, unless the file names others.
        preset = preset_path(str(found["vae.kind"].value), "vae")
        found = {**read_sections(schema, read_yaml(preset), source=str(preset)), **found}
    return found
