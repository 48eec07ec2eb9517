"""The preset files, and where they are found."""

from pathlib import Path

import pytest

import opensora_cli
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.files import generate_preset, list_presets, preset_path, presets_folder, read_yaml
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.video import PictureSettings

PRESETS = list_presets("generate")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_parses(name: str) -> None:
    settings = load_preset(name, prompt="raining, sea")
    assert (settings.model.name is ModelName.DEMO) == (name == "demo")
    assert settings.video.resolution == {"demo": "128px", "256px": "256px", "t2i2v_256px": "256px"}.get(name, "768px")
    assert (settings.output_format == "png") == (name == "flux1_dev")
    assert read_yaml(preset_path(name, "generate"))


def test_released_presets_differ_only_in_resolution() -> None:
    small, large = load_preset("256px", prompt="x"), load_preset("768px", prompt="x")
    assert small.replace({"video.resolution": "768px"}) == large


def test_presets_with_a_picture_first_differ_in_nothing_else() -> None:
    for name in ("256px", "768px"):
        with_picture = load_preset(f"t2i2v_{name}", prompt="x")
        assert with_picture.picture == PictureSettings(first=True)
        assert with_picture.replace({"picture.first": False}) == load_preset(name, prompt="x")


@pytest.mark.parametrize("resolution", [None, "512px", "demo"])
def test_unknown_resolution_starts_from_the_first_preset(resolution: str | None) -> None:
    assert generate_preset(ModelName.OPEN_SORA_V2, resolution=resolution) == "256px"
    assert generate_preset(ModelName.DEMO, resolution=resolution) == "demo"
    assert generate_preset(ModelName.OPEN_SORA_V2_DC_AE, resolution=resolution) == "high_compression"


@pytest.mark.parametrize("model", [name for name in ModelName if name is not ModelName.AUTO])
def test_every_model_starts_from_a_preset_of_its_own(model: ModelName) -> None:
    assert load_preset(generate_preset(model, resolution=None), prompt="x").model.name is model


def test_packaged_presets_win_over_those_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "opensora_cli"
    (tmp_path / "configs").mkdir()
    package.mkdir()
    monkeypatch.setattr(opensora_cli, "__file__", str(package / "__init__.py"))
    assert presets_folder() == tmp_path / "configs"
    (package / "configs").mkdir()
    assert presets_folder() == package / "configs"


def test_settings_have_a_description_for_every_key() -> None:
    for section in GenerateSettings.model_fields.values():
        for name, details in getattr(section.annotation, "model_fields", {"": section}).items():
            if name:
                assert details.description, name
