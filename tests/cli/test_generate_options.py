"""`osora generate`: every option reaches its setting, and what comes back goes to the right stream."""

import json

import pytest
from cli.fake_engine import FakeEngine

from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

RELEASED = ["--model", "open-sora-v2"]


def settings_of(engine: FakeEngine, *args: str) -> GenerateSettings:
    assert main(["generate", *args]) == 0
    assert engine.settings is not None
    return engine.settings


def test_prompt_alone_is_the_demo_preset(engine):
    assert settings_of(engine, "raining, sea") == load_preset("demo", prompt="raining, sea")


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        (["--motion-score", "none"], {"prompt_suffix.motion_score": None}),
        (["--ref", "a.png", "--ref", "b, c.png"], {"condition.references": ("a.png", "b, c.png")}),
        (["--ref", "a.png;b.png"], {"condition.references": ("a.png", "b.png")}),
        (["--lora", "a, b:0.8", "--lora", "C:/b.safetensors:-1"], {"loras": ("a, b:0.8", "C:/b.safetensors:-1")}),
        (["--set", "loras=a:2;b"], {"loras": ("a:2", "b")}),
        (["--no-metadata"], {"output.metadata": False}),
        (["--set", "model.depth=1", "--set", "files.vae=a=b.pt"], {"model.depth": 1, "files.vae": "a=b.pt"}),
    ],
)
def test_option_reaches_its_setting(engine, args, changes):
    plain = settings_of(engine, "x", *RELEASED)
    assert settings_of(engine, "x", *RELEASED, *args) == plain.replace(changes)


def test_a_preset_is_chosen_by_name(engine):
    expected = load_preset("768px", prompt="sea")
    assert settings_of(engine, "sea", "--config", "768px") == expected
    assert settings_of(engine, "sea", "--preset", "768px", "--res", "256px") == load_preset("256px", prompt="sea")
    for name in ("demo", "high_compression"):
        assert settings_of(engine, "sea", "--preset", name) == load_preset(name, prompt="sea")
    for given in (["--ref", "a.png"], ["--cond", "t2v"]):
        # In place of the picture that the preset makes first.
        assert not settings_of(engine, "sea", "--preset", "high_compression", *given).picture.first
    assert settings_of(engine, "sea", "--preset", "high_compression", "--cond", "i2v_tail").picture.first


@pytest.mark.parametrize(
    "prompt", ["a 'quoted' \"sea\"", "line\nbreak", "海と雨 🌧️", "word " * 1000, "50% {braces} [brackets] $HOME ;", "-"]
)
def test_any_prompt_arrives_as_it_is(engine, prompt):
    assert settings_of(engine, prompt).prompt == prompt


def test_prompt_that_looks_like_an_option(engine):
    assert settings_of(engine, "--seed", "3", "--", "--a sea--").prompt == "--a sea--"


def test_data_goes_to_stdout_and_notes_to_stderr(engine, capsys):
    def chatter(reporter: Reporter) -> None:
        reporter.note("a note")
        reporter.warn("a warning")
        with reporter.stage("denoise", total=2, unit="steps") as stage:
            stage.advance(2)

    engine.while_running = chatter
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr() == ("samples/原野.mp4\n", "a note\nwarning: a warning\n")
    assert main(["generate", "a 🌊", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["prompt"] == "a 🌊"
    assert captured.out.isascii()
    assert main(["generate", "x", "--quiet"]) == 0
    assert capsys.readouterr() == ("samples/原野.mp4\n", "")
    assert main(["generate", " ", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: prompt is empty")


def test_dry_run_only_plans_and_prints_a_plan_that_does_not_fit(engine, capsys):
    assert main(["generate", "x"]) == 0
    assert not engine.planned
    engine.shortage = HardwareError("weights and latents need 40 GiB", hint="use --model demo")
    capsys.readouterr()
    assert main(["generate", "x", "--dry-run", "--json"]) == 4
    assert engine.planned
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "fake/1"
    assert captured.err == "error: weights and latents need 40 GiB\n       use --model demo\n"


def test_exploring_is_samples_that_stop_early(engine):
    settings = settings_of(engine, "raining, sea", "--explore", "6", "--explore-steps", "8")
    assert (settings.output.explore, settings.sampling.num_samples, settings.sampling.stop_at) == (True, 6, 8)
