"""A model is one entry of the registry: settings, plans and training know it without other changes."""

from pathlib import Path

import pytest

from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.registry import ARCHITECTURES, Architecture, TextInputs, WeightNames
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import GenerateRequest, load_generate_settings
from opensora_cli.settings.train import load_train_settings

TINY = Architecture(
    transformer=MMDiTConfig(
        in_channels=16, hidden_size=32, num_heads=2, axes_dim=(4, 6, 6), depth=1, depth_single_blocks=1
    ),
    autoencoder=HunyuanVAEConfig(latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4),
    text=TextInputs(t5_max_length=16, clip_max_length=16),
    files=WeightNames(transformer="tiny.safetensors", hub_repo="somebody/tiny"),
    defaults={"video.num_frames": 9, "sampling.num_inference_steps": 3},
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", TINY)


def _overrides(**values: object) -> dict[str, Given]:
    return {key.replace("__", "."): Given(value, "--set") for key, value in values.items()}


@pytest.mark.usefixtures("without_estimates")
def test_it_is_planned_with_its_sizes_files_and_sampling(tmp_path: Path) -> None:
    overrides = _overrides(
        prompt="sea", runtime__model_choice="tiny", runtime__device="cpu", runtime__weights=str(tmp_path)
    )
    request = GenerateRequest(overrides={**overrides, **_overrides(model__depth=2)})
    settings = load_generate_settings(request, model=request.model)
    # A setting overrides a field of the entry.
    assert (settings.model.depth, settings.model.hidden_size) == (2, 32)
    plan = make_plan(settings)
    assert plan.latent_shape[:2] == (4, 3)
    assert plan.num_steps == 3
    assert plan.weights.missing["transformer"] == ("tiny.safetensors",)


def test_a_recipe_trains_it(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("target: mmdit\nmodel:\n  name: tiny\n  depth: 3\ndata:\n  buckets: {64px: {129: [1, 1]}}\n")
    settings = load_train_settings(config=recipe, overrides={}, environment={})
    assert (settings.model.depth, settings.model.hidden_size) == (3, 32)
    assert settings.vae.sizes == TINY.autoencoder
    assert (settings.text.t5_max_length, settings.train_mmdit.files.t5) == (16, TINY.files.t5)
