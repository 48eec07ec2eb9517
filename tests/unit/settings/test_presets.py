"""The preset files, and where they are found."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.registry import ARCHITECTURES, DEMO
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import list_presets, preset_path, read_settings_file
from opensora_cli.settings.load import ANY_PROMPT, GenerateRequest, load_generate_settings, load_preset, usual_settings

PRESETS = list_presets("generate")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_parses(name: str) -> None:
    settings = load_preset(name, prompt="raining, sea")
    assert (settings.model.name == DEMO) == (name == "demo")
    assert settings.video.resolution == {"demo": "128px", "256px": "256px", "t2i2v_256px": "256px"}.get(name, "768px")
    assert (settings.output_format == "png") == (name == "flux1_dev")
    assert read_settings_file(preset_path(name, "generate"))


@pytest.mark.parametrize("model", ARCHITECTURES)
@pytest.mark.parametrize("resolution", [None, "512px", "demo"])
def test_unknown_resolution_starts_from_the_first_preset_of_a_model(model: str, resolution: str | None) -> None:
    own = load_preset(ARCHITECTURES[model].presets[0], prompt=ANY_PROMPT)
    assert own.model.name == model
    assert usual_settings(model) == own
    overrides = {"prompt": Given(ANY_PROMPT, "prompt")}
    if resolution is not None:
        overrides["video.resolution"] = Given(resolution, "--res")
    if resolution in (None, *own.video.resolutions):
        assert load_generate_settings(GenerateRequest(overrides=overrides), model=model) == own
    else:
        with pytest.raises(RequestError, match=f"{resolution} (does not suit the {model} model|must be a pixel)"):
            load_generate_settings(GenerateRequest(overrides=overrides), model=model)
