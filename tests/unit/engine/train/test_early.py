"""Missing inputs of a training: refused before a run, warned of in a plan, each with the line that gets it."""

from pathlib import Path

import pytest
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.engine.encode.inputs import require_frozen_parts
from opensora_cli.engine.train.early import refuse_early, warn_of_missing_inputs
from opensora_cli.settings.train import TrainSettings, load_train_settings


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(name: str, **changes: object) -> TrainSettings:
    settings = load_train_settings(config=Path(name), overrides={}, environment={})
    return settings.replace({key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (recipe("stage1"), "osora ckpt download open-sora-v2"),
        (recipe("stage1", weights=("my weights",)), "osora ckpt download open-sora-v2 --to 'my weights'"),
        (recipe("high_compression"), "osora ckpt download open-sora-v2-dc-ae"),
        (recipe("demo_lora", weights=("gone",)), "train autoencoder and text encoders first"),
    ],
)
def test_missing_parts_are_named_with_the_way_to_get_them(settings: TrainSettings, command: str) -> None:
    with pytest.raises(CheckpointError, match=r"^weights=.* has no \w+\.safetensors, .+, .+") as caught:
        require_frozen_parts(settings)
    assert caught.value.hint is not None
    assert caught.value.hint.split(", or")[0] == command


def test_a_plan_warns_of_everything_that_a_run_would_be_refused_for() -> None:
    reporter = RecordingReporter()
    warn_of_missing_inputs(recipe("stage1"), reporter)
    assert reporter.warnings == [
        "a run would be refused: clips.csv does not exist",
        "a run would be refused: weights=ckpts has no hunyuan_vae.safetensors, google/t5-v1_1-xxl, "
        "openai/clip-vit-large-patch14; osora ckpt download open-sora-v2",
    ]


def test_half_a_text_encoder_is_missing() -> None:
    for path in ("w/vae.safetensors", "w/t5/config.json", "w/clip/config.json"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    with pytest.raises(CheckpointError, match=r"w/t5 is incomplete; missing: w/t5/model\.safetensors"):
        require_frozen_parts(recipe("demo_lora", weights=("w",)))


def test_the_table_of_validation_is_missed_only_where_it_is_read() -> None:
    settings = recipe("vae_hunyuan", validation__table="held_out.csv")
    with pytest.raises(FileProblem, match=r"clips\.csv does not exist"):
        refuse_early(settings, resume=False, overwrite=False)
    Path("clips.csv").touch()
    refuse_early(settings.replace({"validation.every": None}), resume=False, overwrite=False)
    with pytest.raises(FileProblem, match=r"held_out\.csv does not exist"):
        refuse_early(settings.replace({"validation.every": 5}), resume=False, overwrite=False)


def test_weights_of_the_perceptual_term_are_missed() -> None:
    Path("clips.csv").touch()
    changes = {"train_vae__perceptual_files": ("vgg.pth",), "train_vae__perceptual_weight": 0.5}
    with pytest.raises(CheckpointError, match=r"train_vae\.perceptual_files: vgg\.pth does not exist"):
        refuse_early(recipe("vae_hunyuan", **changes), resume=False, overwrite=False)
