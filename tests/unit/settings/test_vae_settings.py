"""The choice of an autoencoder: its sections, its presets, and where it is refused."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from opensora_cli.engine.components.architectures import autoencoder_on_meta
from opensora_cli.settings.components import VAEKind
from opensora_cli.settings.layers import Given
from opensora_cli.settings.tools import ReconstructSettings, load_vae_settings
from opensora_cli.settings.train import TrainSettings


def load(
    config: Path | str | None, *, environment: dict[str, str] | None = None, **given: object
) -> ReconstructSettings:
    overrides = {key.replace("__", "."): Given(value, "--set") for key, value in given.items()}
    return load_vae_settings(
        ReconstructSettings,
        config=None if config is None else Path(config),
        overrides={"files": Given(("a.mp4",), "FILE"), **overrides},
        environment=environment or {},
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "dcae"}, "hunyuan"),
        ({"dc_ae": {"latent_channels": 64}}, "vae.dc_ae.latent_channels=64 has no effect with vae.kind=hunyuan"),
        ({"kind": "dc_ae", "flux_ae": {"ch": 64}}, "vae.flux_ae.ch=64 has no effect with vae.kind=dc_ae"),
        ({"kind": "dc_ae", "latent_channels": 8}, "vae.latent_channels=8 has no effect with vae.kind=dc_ae: drop it"),
        ({"kind": "dc_ae", "dc_ae": {"temporal": "true,false"}}, "vae.dc_ae.temporal has 2 entries and must have 6"),
        ({"kind": "dc_ae", "dc_ae": {"block_types": "res,vit"}}, "block_types"),
    ],
)
def test_what_contradicts_itself_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReconstructSettings.model_validate({"files": "a.mp4", "vae": values})


@pytest.mark.parametrize(
    ("name", "kind", "parameters"),
    [
        ("hunyuan", VAEKind.HUNYUAN, 246_478_803),
        ("dc_ae", VAEKind.DC_AE, 459_462_147),
        ("flux_ae", VAEKind.FLUX_AE, 83_819_683),
        ("demo", VAEKind.HUNYUAN, None),
    ],
)
def test_preset_parses(name: str, kind: VAEKind, parameters: int | None) -> None:
    settings = load(name)
    assert settings.vae.kind is kind
    assert (settings.weights.hub_repo is None) == (name == "demo")
    model = autoencoder_on_meta(settings.vae)
    assert parameters in (None, sum(parameter.numel() for parameter in model.parameters()))


def test_the_demo_is_the_default_and_not_looked_for_among_released_weights() -> None:
    environment = {"OSORA_WEIGHTS": "/released", "OSORA_CLIP__NUM_FRAMES": "9", "OSORA_SAMPLING__SEED": "1"}
    assert load(None, environment=environment) == load("demo", clip__num_frames="9")
    assert load("hunyuan", environment=environment).runtime.weights == "/released"
    assert load(None, environment=environment, runtime__weights="mine").runtime.weights == "mine"


def test_the_autoencoder_that_a_run_trained_can_be_taken(tmp_path: Path) -> None:
    vae = {"kind": "dc_ae", "dc_ae": {"scaling_factor": 0.5}}
    data = {"buckets": {"256px": {16: (1.0, 1)}}}
    trained = TrainSettings.model_validate({"target": "vae", "output": "runs/mine", "vae": vae, "data": data})
    (tmp_path / "settings.json").write_text(json.dumps(trained.model_dump(mode="json")), encoding="utf-8")
    settings = load(tmp_path / "settings.json")
    assert settings.vae == trained.vae
    assert settings.runtime.weights == "runs/mine"
