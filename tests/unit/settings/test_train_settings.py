"""Settings of `osora train`: the recipes, where values come from, and the rules between them."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.section import Section
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import list_presets, preset_path, settings_path
from opensora_cli.settings.train import TrainSettings, TrainTarget, load_train_settings
from opensora_cli.settings.train_objectives import ModeWeights

RECIPES = list_presets("train")
STREAMED = {"memory__checkpointing": "true", "memory__offload": "blocks"}


def load(
    recipe: str | None, environment: dict[str, str] | None = None, *, saved: Path | None = None, **overrides: str
) -> TrainSettings:
    """Load a recipe, or the settings of a run; keys of `overrides` have `__` for the dot."""
    config = None if recipe is None else Path(recipe)
    given = {key.replace("__", "."): Given(value, "--set") for key, value in overrides.items()}
    return load_train_settings(config=config, overrides=given, environment=environment or {}, saved=saved)


@pytest.mark.parametrize(
    ("recipe", "target"),
    [("demo", "mmdit"), ("demo_short", "mmdit"), ("demo_text", "text"), ("demo_vae", "vae"), ("demo_decoder", "vae")],
)
def test_recipe_parses(recipe: str, target: str) -> None:
    settings = load(recipe)
    assert settings.target is TrainTarget(target)
    assert settings.output == f"runs/{recipe}"
    assert load(str(preset_path(recipe, "train"))) == settings


def test_the_demo_learns_from_what_the_other_recipes_make() -> None:
    vae, decoder, text, short, demo = (
        load(name) for name in ("demo_vae", "demo_decoder", "demo_text", "demo_short", "demo")
    )
    assert decoder.init == f"{vae.output}/vae.safetensors"
    assert demo.init == f"{short.output}/transformer.safetensors"
    assert demo.weights == short.weights == (decoder.output, text.output)
    assert demo.vae == short.vae == decoder.vae == vae.vae
    assert demo.model == short.model
    for key in ("size", "fps"):
        assert len({getattr(recipe.data.scenes, key) for recipe in (vae, decoder, short, demo)}) == 1
    assert demo.text == text.text
    assert (demo.model.context_in_dim, demo.model.vec_in_dim) == (text.text.t5_width, text.text.clip_width)
    assert set(demo.train_mmdit.mode_weights.by_mode()) == set(CONDITION_MODES)


def test_every_key_is_described() -> None:
    def undescribed(section: type[Section]) -> list[str]:
        missing = []
        for name, details in section.model_fields.items():
            kind = details.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                missing += undescribed(kind)
            elif not details.description:
                missing.append(f"{section.__name__}.{name}")
        return missing

    assert undescribed(TrainSettings) == []


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("target: text\nloop:\n  steps: 1\n  seed: 1\n  micro_batches: 1\n")
    environment = {"OSORA_LOOP__SEED": "2", "OSORA_LOOP__MICRO_BATCHES": "2"}
    loop = load(str(path), environment, loop__micro_batches="3").loop
    assert (loop.steps, loop.seed, loop.micro_batches) == (1, 2, 3)


def test_variables_of_generate_are_left_alone() -> None:
    assert load("demo", {"OSORA_SAMPLING__SEED": "1", "OSORA_RUNTIME__DEVICE": "cuda"}) == load("demo")
    with pytest.raises(RequestError, match="OSORA_SAMPLING__SEAD in the environment is not a setting"):
        load("demo", {"OSORA_SAMPLING__SEAD": "1"})


class TestFrom:
    """Settings of an earlier run."""

    def test_round_trip(self, tmp_path: Path) -> None:
        for recipe in RECIPES:
            settings = load(recipe, output=str(tmp_path))
            (tmp_path / "settings.json").write_text(json.dumps(settings.model_dump(mode="json")))
            cache = settings.train_mmdit.cache
            given = {} if cache is None or settings.target != "mmdit" else {"train_mmdit__cache": cache}
            assert load(None, saved=tmp_path / "settings.json", **given) == settings

    def test_above_the_environment_and_below_the_command_line(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.json"
        before = load("demo_text", loop__seed="1", loop__steps="900", output=str(tmp_path / "run"))
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
            path.write_text(json.dumps(load("demo_text", output=output).model_dump(mode="json")))
            with pytest.raises(RequestError, match=r"output=.* is outside the folder of that file") as caught:
                load(None, saved=path)
            assert caught.value.hint == f"to write there, or into another folder: --set output={output}"
            assert load(None, saved=path, output=output).output == output
        monkeypatch.chdir(tmp_path)
        inside = {"output": "run", "train_mmdit__cache": str(tmp_path / "cache")}
        path.write_text(json.dumps(load("demo", **inside).model_dump(mode="json")))
        with pytest.raises(RequestError, match=r"train_mmdit\.cache=.* is outside the folder"):
            load(None, saved=path)
        # The launcher wrote it, from what the user asked for.
        launched = {"OSORA_RANK_LOG": str(path.with_name("rank0.log"))}
        assert load(None, launched, saved=path).train_mmdit.cache == str(tmp_path / "cache")

    def test_not_with_a_recipe(self) -> None:
        with pytest.raises(RequestError, match=r"--config demo cannot go with --from a\.json"):
            load("demo", saved=Path("a.json"))

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


def test_an_adapter_is_no_larger_than_what_it_is_beside() -> None:
    assert load("demo_lora", lora__rank="256").lora.rank == 256
    with pytest.raises(RequestError, match=r"lora\.rank=257 must be at most model\.hidden_size=256"):
        load("demo_lora", lora__rank="257")


def test_weights_are_one_folder_or_several() -> None:
    assert load("demo", weights="a").weights == ("a",)
    assert load("demo", weights="a, b").weights == ("a", "b")
    # It says where the released model is.
    assert load("demo", {"OSORA_WEIGHTS": "/released"}).weights == load("demo").weights


def test_single_modes_can_be_weighed() -> None:
    settings = load("demo", train_mmdit__mode_weights__t2v="0", train_mmdit__mode_weights__i2v_loop="7")
    by_mode = settings.train_mmdit.mode_weights.by_mode()
    assert "t2v" not in by_mode
    assert by_mode["i2v_loop"] == 7.0


def test_every_mode_has_a_weight() -> None:
    assert list(ModeWeights.model_fields) == list(CONDITION_MODES)


class TestFindRecipe:
    def test_a_file_goes_first_and_a_folder_is_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("demo_vae").mkdir()
        assert settings_path(Path("demo_vae"), "train") == preset_path("demo_vae", "train")
        Path("demo_vae").rmdir()
        Path("demo_vae").write_text("target: vae")
        assert settings_path(Path("demo_vae"), "train") == Path("demo_vae")

    def test_none(self) -> None:
        with pytest.raises(RequestError, match="--config is missing") as caught:
            load(None)
        assert "--config demo_vae" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            "demo_vae",
            {"precision__tf32": "false", "device": "cpu"},
            "precision.tf32=false has no effect with device=cpu: use none",
        ),
        ("demo_vae", {"target": "audio"}, "target=audio must be one of vae, text, mmdit"),
        ("demo_vae", {"loop__steps": "0"}, "loop.steps=0 must be at least 1 (from --set)"),
        ("demo_vae", {"data__scenes__num_frames": "16"}, "clips of 16 frames do not suit vae.kind: use 13 or 17"),
        ("demo_vae", {"data__scenes__size": "62"}, "size=62 must be a multiple of 4, the side of a token: use 64"),
        ("demo", {"data__scenes__size": "68"}, "size=68 must be a multiple of 16, the side of a token: use 80"),
        ("demo", {"data__fps_max": "3"}, "data.fps_max=3 (from --set) has no effect without data.table"),
        ("demo_lora", {"data__scenes__size": "32"}, "has no effect with data.table=clips.csv"),
        ("demo_text", {"init": "a.pt"}, "init=a.pt has no effect with target=text"),
        ("demo_vae", {"device": "gpu"}, "device=gpu must be auto, cpu, cuda or cuda:N"),
        ("demo_vae", {"device": "cuda:1", "parallel__gpus": "2"}, "device=cuda:1 is one GPU, and there are 2 ranks"),
        (
            "demo",
            {f"train_mmdit__mode_weights__{mode}": "0" for mode in CONDITION_MODES},
            "train_mmdit.mode_weights are all 0",
        ),
        ("demo_text", {"text__t5_heads": "3"}, "text.t5_heads=3 must divide text.t5_width=128"),
        ("demo_text", {"train_vae__kl_weight": "1"}, "kl_weight=1 (from --set) has no effect with target=text"),
        ("demo_vae", {"memory__checkpointing": "true"}, "checkpointing=true (from --set) has no effect"),
        (
            "demo",
            {"memory__checkpoint_double_blocks": "1"},
            "memory.checkpoint_double_blocks=1 has no effect with memory.checkpointing=none: use full",
        ),
        ("demo", {"memory__checkpointing": "some"}, "checkpointing=some must be one of none, full, selective, offload"),
        ("demo", {"memory__checkpointing": "auto"}, "memory.checkpointing=auto was removed: use selective"),
        ("demo", {"precision__compute": "fp16"}, "precision.compute=fp16 is not supported: use bf16"),
        (
            "demo",
            {"memory__checkpointing": "true", "memory__activation_buffer": "1GiB"},
            "memory.activation_buffer=1073741824 has no effect with memory.checkpointing=full: use offload",
        ),
        (
            "demo",
            {"memory__checkpointing": "true", "memory__checkpoint_single_blocks": "9"},
            "memory.checkpoint_single_blocks=9 must be at most the model's: use 0 to 8",
        ),
        (
            "demo_lora",
            {"memory__host_weights": "mapped"},
            "memory.host_weights=mapped has no effect with memory.offload=none: use blocks",
        ),
        ("demo_vae", {"weights": "a"}, "weights=a (from --set) has no effect with target=vae"),
        ("demo", {"text__batch_size": "8"}, "text.batch_size=8 (from --set) has no effect with target=mmdit"),
        ("demo_vae", {"watching__peak_tflops": "8"}, "peak_tflops=8 (from --set) has no effect with target=vae"),
        ("demo_text", {"optimizer__muon_learning_rate": "1"}, "has no effect with optimizer.name=adamw"),
        (
            "demo_vae",
            {"train_vae__discriminator__width": "8"},
            "discriminator.width=8 (from --set) has no effect without train_vae.discriminator.weight",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_broken_rules(recipe: str, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        load(recipe, **overrides)
    assert message in caught.value.message
    assert "pydantic" not in caught.value.message


def test_sizes_that_are_not_used_may_be_anything() -> None:
    odd = load("demo_vae").replace({"model.in_channels": 8})
    assert odd.model.in_channels == 8
    assert load("demo_text").target is TrainTarget.TEXT
    with pytest.raises(ValidationError):
        odd.replace({"target": "mmdit"})
