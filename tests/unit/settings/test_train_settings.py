"""Settings of `osora train`: the recipes, where values come from, and the rules between them."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.settings.layers import Given, list_presets
from opensora_cli.settings.train import TrainSettings, load_train_settings

RECIPES = list_presets("train")


def load(
    recipe: str | None, environment: dict[str, str] | None = None, *, saved: Path | None = None, **overrides: str
) -> TrainSettings:
    """Load a recipe, or the settings of a run; keys of `overrides` have `__` for the dot."""
    config = None if recipe is None else Path(recipe)
    given = {key.replace("__", "."): Given(value, "--set") for key, value in overrides.items()}
    return load_train_settings(config=config, overrides=given, environment=environment or {}, saved=saved)


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("target: vae\nloop:\n  steps: 1\n  seed: 1\n  micro_batches: 1\n")
    environment = {"OSORA_LOOP__SEED": "2", "OSORA_LOOP__MICRO_BATCHES": "2"}
    loop = load(str(path), environment, loop__micro_batches="3").loop
    assert (loop.steps, loop.seed, loop.micro_batches) == (1, 2, 3)


def test_variables_of_generate_are_left_alone() -> None:
    assert load("demo_lora", {"OSORA_SAMPLING__SEED": "1", "OSORA_RUNTIME__DEVICE": "cuda"}) == load("demo_lora")
    with pytest.raises(RequestError, match="OSORA_SAMPLING__SEAD in the environment is not a setting"):
        load("demo_lora", {"OSORA_SAMPLING__SEAD": "1"})


class TestFrom:
    """Settings of an earlier run."""

    def test_round_trip(self, tmp_path: Path) -> None:
        for recipe in RECIPES:
            settings = load(recipe, output=str(tmp_path))
            (tmp_path / "settings.json").write_text(json.dumps(settings.model_dump(mode="json")))
            given = {} if settings.clip_cache is None else {"train_mmdit__cache": settings.clip_cache}
            assert load(None, saved=tmp_path / "settings.json", **given) == settings
            assert load(recipe).output == f"runs/{recipe}"

    def test_above_the_environment_and_below_the_command_line(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.json"
        before = load("vae_hunyuan", loop__seed="1", loop__steps="900", output=str(tmp_path / "run"))
        path.write_text(json.dumps(before.model_dump(mode="json")))
        environment = {"OSORA_LOOP__SEED": "2", "OSORA_LOOP__STEPS": "2"}
        loop = load(None, environment, saved=path, loop__steps="901").loop
        assert (loop.seed, loop.steps) == (1, 901)

    def test_writes_into_its_folder_or_where_the_command_line_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run" / "settings.json"
        path.parent.mkdir()
        (tmp_path / "run" / "link").symlink_to(tmp_path)
        for output in (str(tmp_path), "runs/elsewhere", str(tmp_path / "run" / "link" / "x")):
            path.write_text(json.dumps(load("vae_hunyuan", output=output).model_dump(mode="json")))
            with pytest.raises(RequestError, match=r"output=.* is outside the folder of that file") as caught:
                load(None, saved=path)
            assert caught.value.hint == f"to write there, or into another folder: --set output={output}"
            assert load(None, saved=path, output=output).output == output
        monkeypatch.chdir(tmp_path)
        inside = {"output": "run", "train_mmdit__cache": str(tmp_path / "cache")}
        path.write_text(json.dumps(load("demo_lora", **inside).model_dump(mode="json")))
        with pytest.raises(RequestError, match=r"train_mmdit\.cache=.* is outside the folder"):
            load(None, saved=path)
        # The launcher wrote it, from what the user asked for.
        launched = {"OSORA_RANK_LOG": str(path.with_name("rank0.log"))}
        assert load(None, launched, saved=path).train_mmdit.cache == str(tmp_path / "cache")

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "does not exist"), ("{", "is broken"), ("[1]", "is broken"), ("{}", "holds no settings")],
    )
    def test_broken(self, tmp_path: Path, content: str | None, message: str) -> None:
        path = tmp_path / "settings.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(FileProblem, match=message):
            load(None, saved=path)


def test_single_modes_can_be_weighed() -> None:
    settings = load("demo_lora", train_mmdit__mode_weights__t2v="0", train_mmdit__mode_weights__i2v_loop="7")
    by_mode = settings.train_mmdit.mode_weights.by_mode()
    assert "t2v" not in by_mode
    assert by_mode["i2v_loop"] == 7.0
    with pytest.raises(RequestError, match=r"train_mmdit\.mode_weights are all 0"):
        load("demo_lora", **{f"train_mmdit__mode_weights__{mode}": "0" for mode in CONDITION_MODES})


@pytest.mark.parametrize(
    ("recipe", "assignments", "message"),
    [
        ("vae_hunyuan", "parallel.devices=1; device=xpu", "parallel.devices=1 does not go with device=xpu"),
        ("vae_hunyuan", "data.buckets={64px: {16: [1, 1]}}", "16 frames do not suit vae.kind: use 13"),
        ("demo_lora", "data.table=none; data.fps_max=3", "fps_max=3 (from --set) has no effect without"),
        ("demo_lora", "train_vae.kl_weight=1", "kl_weight=1 (from --set) has no effect with target=mmdit"),
        ("vae_hunyuan", "memory.checkpointing=full", "checkpointing=full (from --set) has no effect"),
        ("demo_lora", "memory.checkpoint_double_blocks=1", "no effect with memory.checkpointing=none"),
        (
            "demo_lora",
            "memory.checkpointing=full; memory.checkpoint_single_blocks=9",
            "at most the model's: use 0 to 8",
        ),
        ("demo_lora", "memory.host_weights=mapped", "no effect with memory.offload=none: use blocks"),
        ("demo_lora", "optimizer.muon_learning_rate=1", "has no effect with optimizer.name=adamw"),
        ("vae_hunyuan", "precision.compute=fp8", "precision.compute=fp8 must be one of fp32, bf16"),
        (
            "vae_hunyuan",
            "optimizer.schedule=cosine; optimizer.decay_steps=5",
            "no effect with optimizer.schedule=cosine",
        ),
        ("vae_dc_ae", "train_vae.kl_weight=0.1", "train_vae.kl_weight=0.1 has no effect with vae.kind=dc_ae"),
        ("vae_hunyuan", "train_vae.perceptual_files=a.pth; train_vae.perceptual_weight=0", "no effect with"),
        ("vae_hunyuan", "train_vae.decoder_only=true; train_vae.kl_weight=0.1; init=demo", "decoder_only=true: use 0"),
        ("vae_hunyuan", "train_vae.crop_size=30", "train_vae.crop_size=30 must be a multiple of 8, the side"),
        ("demo_lora", "lora.rank=257", "lora.rank=257 must be at most model.hidden_size=256"),
        ("vae_hunyuan", "samples.every=100", "samples.every=100 (from --set) has no effect with target=vae"),
        ("vae_dc_ae", "train_vae.discriminator.width=8", "discriminator.width=8 (from --set) has no effect"),
    ],
    ids=str,
)
def test_broken_rules(recipe: str, assignments: str, message: str) -> None:
    pairs = [each.partition("=") for each in assignments.split("; ")]
    with pytest.raises(RequestError) as caught:
        load(recipe, **{key.replace(".", "__"): value for key, _, value in pairs})
    assert message in caught.value.message


def test_prompts_of_samples_are_a_text_or_a_list() -> None:
    def prompts(text: str) -> tuple[str, ...]:
        return load("demo_lora", samples__every="100", samples__prompts=text).samples.prompts

    assert prompts("raining, sea") == ("raining, sea",)
    assert prompts('["raining, sea", snow]') == ("raining, sea", "snow")
    with pytest.raises(RequestError, match=r"samples\.every=100 needs samples.prompts"):
        prompts(" ")
    with pytest.raises(RequestError, match=r"samples\.prompts=.* must be a list"):
        prompts('["rain')


def test_sizes_that_are_not_used_may_be_anything() -> None:
    odd = load("vae_hunyuan").replace({"model.in_channels": 8})
    assert odd.model.in_channels == 8
    with pytest.raises(ValidationError):
        odd.replace({"target": "mmdit"})
