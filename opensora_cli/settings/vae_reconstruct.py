"""Settings of `osora vae reconstruct`: which autoencoder, on which files, and where to."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, PositiveInt

from opensora_cli.settings.base import Section
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.devices import PlacementSettings
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import list_presets, preset_path, read_yaml
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate
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
        default=33, description="longest clip that is encoded at once, a longer video in several; bounds the memory"
    )


class VAEOutputSettings(Section):
    """What is written."""

    folder: str = Field(default="reconstructed", min_length=1, description="folder of the results")
    overwrite: bool = Field(default=False, description="replace existing files")
    metadata: bool = Field(default=True, description="write a sidecar beside each result")


class ReconstructSettings(Section):
    """Everything that a reconstruction depends on."""

    files: tuple[str, ...] = Field(min_length=1, description="pictures and videos")
    vae: VAESettings = VAESettings()
    weights: VAEWeightsSettings = VAEWeightsSettings()
    clip: ClipSettings = ClipSettings()
    runtime: PlacementSettings = PlacementSettings()
    output: VAEOutputSettings = VAEOutputSettings()


def load_reconstruct_settings(
    *, config: Path | None, overrides: Layer, environment: Mapping[str, str]
) -> ReconstructSettings:
    """Return the settings of a run: `overrides` above the environment above the file above the defaults.

    `config` is a YAML file, or the name of a packaged preset; None: the demo's. Of a recipe of `osora train`, or the
    `settings.json` of its run, the autoencoder is taken, and the folder in which the run leaves it. `OSORA_WEIGHTS`,
    the folder of the released models, is not meant for weights that come from elsewhere, and then left alone. Raises
    RequestError if there is no such preset, a key is unknown, or a value breaks a rule, and FileProblem if the file is
    missing or broken.
    """
    path = preset_path("vae", _DEFAULT_PRESET) if config is None else _find(config)
    file = _read(path)
    given_repo = {**file, **overrides}.get("weights.hub_repo")
    if given_repo is None or given_repo.value is None:
        environment = {name: value for name, value in environment.items() if name not in _RELEASED_WEIGHTS}
    variables = read_environment(ReconstructSettings, environment, others=(GenerateSettings, TrainSettings))
    return validate(ReconstructSettings, {**file, **variables, **overrides})


def _find(config: Path) -> Path:
    if config.suffix or config.is_file():
        return config
    name = str(config)
    kind = "train" if name in list_presets("train") and name not in list_presets("vae") else "vae"
    return preset_path(kind, name)


def _read(path: Path) -> dict[str, Given]:
    values = read_yaml(path)
    if "target" in values:
        values = {"vae": values.get("vae", {}), "runtime": {"weights": values.get("output")}}
    return read_sections(ReconstructSettings, values, source=str(path))
