"""`osora generate`: every option reaches its setting, and what comes back goes to the right stream."""

import json
from pathlib import Path

import pytest
from cli.fake_engine import FakeEngine

from opensora_cli.cli.app import main
from opensora_cli.cli.generate import given_again
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.settings.components import LoraFile
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA, load_preset

RELEASED = ["--model", "open-sora-v2"]


def settings_of(engine: FakeEngine, *args: str) -> GenerateSettings:
    assert main(["generate", *args]) == 0
    assert engine.settings is not None
    return engine.settings


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["--width", "512", "--height", "288"], "video.width", 512),
        (["--motion-score", "7"], "prompt_suffix.motion_score", 7),
        (["--motion-score", "none"], "prompt_suffix.motion_score", None),
        (["--guidance-scale", "2.5"], "sampling.guidance_scale", 2.5),
        (["--cond", "i2v_tail", "--ref", "a.png"], "condition.mode", "i2v_tail"),
        (["--ref", "a.png", "--ref", "b, c.png"], "condition.references", ("a.png", "b, c.png")),
        (["--ref", "a.png;b.png"], "condition.references", ("a.png", "b.png")),
        (
            ["--lora", "a, b:0.8", "--lora", "C:/style/adapter_model.safetensors:-1"],
            "loras",
            (LoraFile(path="a, b", scale=0.8), LoraFile(path="C:/style/adapter_model.safetensors", scale=-1.0)),
        ),
        (["--set", "loras=a:2;b"], "loras", (LoraFile(path="a", scale=2.0), LoraFile(path="b"))),
        (["-o", "x.webp"], "output.path", "x.webp"),
        (["--no-metadata"], "output.metadata", False),
        (["--set", "sampling.flow_shift=3"], "sampling.flow_shift", 3.0),
        (["--set", "files.vae=a=b.safetensors"], "files.vae", "a=b.safetensors"),
    ],
)
def test_option_reaches_its_setting(engine: FakeEngine, args: list[str], key: str, value: object) -> None:
    changed = settings_of(engine, "x", *RELEASED, *args)
    plain = settings_of(engine, "x", *RELEASED)
    found: object = changed
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    related = {"condition.references": changed.condition.references} if key == "condition.mode" else {}
    if key == "video.width":
        related["video.height"] = 288
    assert changed == plain.replace({key: value, **related})


def test_a_preset_is_chosen_by_name(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_preset("768px", prompt="sea")
    assert settings_of(engine, "sea", "--config", "768px") == expected
    assert settings_of(engine, "sea", "--preset", "768px", "--res", "256px") == load_preset("256px", prompt="sea")
    for name in ("demo", "high_compression"):
        assert settings_of(engine, "sea", "--preset", name) == load_preset(name, prompt="sea")
    for given in (["--ref", "a.png"], ["--cond", "t2v"]):
        # In place of the picture that the preset makes first.
        assert not settings_of(engine, "sea", "--preset", "high_compression", *given).picture.first
    assert settings_of(engine, "sea", "--preset", "high_compression", "--cond", "i2v_tail").picture.first
    capsys.readouterr()
    assert main(["generate", "sea", "--preset", "dmeo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: preset 'dmeo' is not one of 256px, 768px, demo, flux1_dev, ")
    assert "did you mean demo?" in error
    assert main(["generate", "sea", "--preset", "gone.yaml"]) == 3


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--guidance-scale", "5"], "--guidance-scale 5"),
        (["--set", "negative_prompt=fog"], "negative_prompt=fog (from --set)"),
    ],
)
def test_guidance_by_branches_and_a_distilled_model(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert main(["generate", "sea", "--model", "flux1-dev", "--num-frames", "1", *args]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named} has no effect with the distilled model flux1-dev")


@pytest.mark.parametrize("args", [["--res", "768px"], ["--aspect-ratio", "1:1"]], ids=" ".join)
def test_a_size_in_pixels_and_another_one(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main(["generate", "sea", *RELEASED, "--width", "512", "--height", "288", *args]) == 2
    assert f"{args[0]} {args[1]} has no effect with a width and height in pixels" in capsys.readouterr().err
    pixels = ["--set", "video.width=512", "--set", "video.height=288"]
    assert main(["generate", "sea", *RELEASED, *pixels, *args]) == 2
    assert f"{args[0]} {args[1]} has no effect with a width and height in pixels" in capsys.readouterr().err
    assert main(["generate", "sea", *RELEASED, "--width", "512"]) == 2
    assert "video.width=512 must come with video.height" in capsys.readouterr().err
    # Of two layers, the upper one decides.
    config = tmp_path / "a.yaml"
    config.write_text("video:\n  height: 288\n  width: 512\n")
    video = settings_of(engine, "sea", *RELEASED, "--config", str(config), *args).video
    assert (video.height, video.width) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "1/2"], "--shard has no effect without --prompts"),
        (["sea", "--prompts", "p.txt"], "PROMPT cannot go with --prompts"),
        (["--prompts", "p.txt", "--from-latents", "a"], "--from-latents cannot go with --prompts"),
        (["--prompts", "p.txt", "--shard", "3/2"], "--shard 3/2 must count from 1/2 to 2/2"),
        (["--prompts", "p.xlsx"], "--prompts p.xlsx must end in .txt, .csv, .jsonl or .parquet"),
    ],
)
def test_a_file_of_prompts_goes_with_few_others(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("boat.png", "--ref boat.png"),
        ("a clip.mp4", "--ref 'a clip.mp4'"),
        ("mine.yaml", "--config mine.yaml"),
        ("256px.py", "--config 256px.py"),
        ("sea_seed42.mp4.json", "--from sea_seed42.mp4.json"),
        ("sea_seed42.latents.safetensors", "--from sea_seed42.latents.safetensors"),
        ("style.safetensors", "--lora style.safetensors"),
        ("clips.csv", "many prompts are read with --prompts clips.csv"),
        ("sea", "give the words themselves, in quotes"),
    ],
)
def test_a_file_is_not_a_prompt(
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings_of(engine, name).prompt == name  # there is no such file
    (tmp_path / name).write_text("any")
    capsys.readouterr()
    assert main(["generate", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {name} is a file, and no prompt\n")
    assert hint in captured.err
    assert settings_of(engine, "--prompt-text", name).prompt == name
    assert main(["generate", "a sea", "--prompt-text", name]) == 2
    assert "the prompt is given twice" in capsys.readouterr().err


def test_a_folder_is_no_prompt_where_it_is_named_as_a_path(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word stays a prompt, whatever folder has its name; a separator makes it a path, if there is such a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sea" / "deep").mkdir(parents=True)
    for prompt in ("sea", "a sea/lake", "sea and a boat"):
        assert settings_of(engine, prompt).prompt == prompt
    capsys.readouterr()
    for name in ("sea/", "sea/deep", "./sea", ".", "..", str(tmp_path)):
        assert main(["generate", name]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {name} is a folder, and no prompt\n")
        assert f"give the words themselves, in quotes; --prompt-text {name} insists" in err
        assert settings_of(engine, "--prompt-text", name).prompt == name


def test_from_latents_needs_no_prompt(engine: FakeEngine) -> None:
    assert settings_of(engine, "--from-latents", "a.safetensors").from_latents == "a.safetensors"


@pytest.mark.parametrize(
    "prompt",
    ["a 'quoted' \"sea\"", "line\nbreak", "海と雨 🌧️", "word " * 1000, "50% {braces} [brackets] $HOME ;", "-"],
)
def test_any_prompt_arrives_as_it_is(engine: FakeEngine, prompt: str) -> None:
    assert settings_of(engine, prompt).prompt == prompt


def test_prompt_that_looks_like_an_option(engine: FakeEngine) -> None:
    assert settings_of(engine, "--seed", "3", "--", "--a sea--").prompt == "--a sea--"


def test_adapters_in_yaml(engine: FakeEngine, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("loras:\n  - style:0.5\n  - path: a:1\n    scale: -2\n")
    expected = LoraFile(path="style", scale=0.5), LoraFile(path="a:1", scale=-2.0)
    assert settings_of(engine, "x", "--config", str(config)).loras == expected
    assert settings_of(engine, "x", "--config", str(config), "--set", "loras=").loras == ()


def test_config_and_environment(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text("sampling:\n  seed: 1\n  num_inference_steps: 2\n  guidance_scale: 3\n")
    config = tmp_path / "a.yaml"
    config.write_text("extends: base.yaml\nprompt: from yaml\nsampling:\n  seed: 4\n")
    monkeypatch.setenv("OSORA_SAMPLING__GUIDANCE_SCALE", "5")
    monkeypatch.setenv("OSORA_WEIGHTS", "/weights")
    monkeypatch.setenv("OSORA_OPTIMIZER__LEARNING_RATE", "1")  # of training, which generation leaves alone
    settings = settings_of(engine, "--config", str(config), "--steps", "6")
    assert settings.prompt == "from yaml"
    sampling = settings.sampling
    assert (sampling.seed, sampling.guidance_scale, sampling.num_inference_steps) == (4, 5.0, 6)
    assert settings.runtime.weights == "/weights"


def test_sidecar_gives_the_same_settings_and_flags_change_them(engine: FakeEngine, tmp_path: Path) -> None:
    first = settings_of(engine, "raining, sea", *RELEASED, "--res", "768px", "--seed", "9", "--ref", "a.png")
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": SIDECAR_SCHEMA, "settings": first.model_dump(mode="json")}))
    assert settings_of(engine, "--from", str(path)) == first
    assert settings_of(engine, "snow", "--from", str(path), "--seed", "1") == first.replace(
        {"prompt": "snow", "sampling.seed": 1}
    )


def test_lines_go_to_stdout_and_notes_to_stderr(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.while_running = chatter
    assert main(["generate", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "samples/原野.mp4\n"
    assert captured.err.splitlines() == ["a note", "warning: a warning"]


def test_json_is_the_only_thing_on_stdout(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.while_running = chatter
    assert main(["generate", "a 🌊", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["prompt"] == "a 🌊"
    assert captured.out.isascii()
    assert "a note" in captured.err


def test_quiet_leaves_only_the_data(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.while_running = chatter
    assert main(["generate", "x", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("samples/原野.mp4\n", "")
    assert isinstance(engine.reporter, SilentReporter)


def test_quiet_keeps_errors(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", " ", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: prompt is empty")


def test_dry_run_only_plans(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--dry-run"]) == 0
    assert engine.planned
    assert capsys.readouterr().out == "samples/原野.mp4\n"
    engine.planned = False
    assert main(["generate", "x"]) == 0
    assert not engine.planned


def test_dry_run_prints_the_plan_even_if_it_does_not_fit(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.shortage = HardwareError("weights and latents need 40 GiB", hint="use --model demo")
    assert main(["generate", "x", "--dry-run", "--json"]) == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "fake/1"
    assert captured.err == "error: weights and latents need 40 GiB\n       use --model demo\n"


def chatter(reporter: Reporter) -> None:
    reporter.note("a note")
    reporter.warn("a warning")
    with reporter.stage("denoise", total=2, unit="steps") as stage:
        stage.advance()
        stage.advance()


def test_exploring_is_samples_that_stop_early(engine: FakeEngine) -> None:
    settings = settings_of(engine, "raining, sea", "--explore", "6", "--explore-steps", "8")
    assert (settings.output.explore, settings.sampling.num_samples, settings.sampling.stop_at) == (True, 6, 8)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--explore", "6"], "--explore needs --explore-steps: give both, or none"),
        (["--explore-steps", "8"], "--explore-steps needs --explore: give both, or none"),
        (["--explore", "6", "--explore-steps", "50"], "sampling.stop_at=50 must be less than"),
        *(
            (["--explore", "6", "--explore-steps", "8", *other], f"{other[0]} cannot go with --explore")
            for other in (
                ["--stop-at", "8"],
                ["--num-samples", "2"],
                ["--resume", "a.latents.safetensors"],
                ["--from-latents", "a.latents.safetensors"],
                ["--prompts", "prompts.txt"],
            )
        ),
    ],
)
def test_contradictions_of_exploring_are_refused(
    engine: FakeEngine, args: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "raining, sea", *args]) == 2
    assert problem in capsys.readouterr().err
    assert engine.settings is None


def test_a_rank_is_given_what_was_typed():
    assert given_again("video.fps", 12) == ["--set=video.fps=12"]
    assert given_again("condition.references", "a.png;b c.png") == ["--set=condition.references=a.png;b c.png"]
    assert given_again("prompts_at", ["1s=a; b", "2s=c"]) == ["--prompt-at=1s=a; b", "--prompt-at=2s=c"]
