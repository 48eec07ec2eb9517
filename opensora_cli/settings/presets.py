"""Where the preset files are."""

from pathlib import Path

import opensora_cli
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import nearest


def presets_folder() -> Path:
    """Return the folder of all presets: inside an installed package, or beside it in a source checkout."""
    package = Path(opensora_cli.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def list_presets(kind: str) -> list[str]:
    """Return the names of the presets of a `kind`, which is a command such as `generate`."""
    return sorted(path.stem for path in (presets_folder() / kind).glob("*.yaml"))


def preset_path(kind: str, name: str) -> Path:
    """Return the file of a preset.

    Raises:
        RequestError: there is no such preset.
    """
    names = list_presets(kind)
    if name not in names:
        close = nearest(name, names)
        raise RequestError(
            f"preset {name!r} is not one of {', '.join(names)}", hint=f"did you mean {close}?" if close else None
        )
    return presets_folder() / kind / f"{name}.yaml"


def generate_preset(model: ModelName, *, resolution: str | None) -> str:
    """Return the name of the preset to start from.

    The demo's preset has its name; the released model has one for each of its resolutions, of that name. An unknown
    resolution gets the first of these, whose settings then list the known ones in their error.
    """
    if model is ModelName.DEMO:
        return model.value
    released = [name for name in list_presets("generate") if name not in list(ModelName)]
    return resolution if resolution in released else released[0]
