"""Help, version and completion: complete, and without anything heavy."""

import json
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from opensora_cli.cli.app import _COMMANDS, _wait_without_spinning, load_commands, main, unwrapped
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate.dry_run import PlanDocument, plan_generation
from opensora_cli.engine.generate.request import resolve
from opensora_cli.engine.listings import NEEDS, describe_presets
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import read_machine
from opensora_cli.settings.layers import Given, list_presets
from opensora_cli.settings.load import generate_request, load_preset

HEAVY = {"torch", "transformers", "av", "numpy", "PIL", "safetensors", "huggingface_hub"}


def modules_after(*commands: list[str]) -> list[set[str]]:
    """Return what is imported after each of several commands in one fresh process."""
    code = (
        "import sys, json; from opensora_cli.cli.app import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    assert main(command) == 0\n"
        "    print('\\nafter: ' + json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("after: ")]
    return [set(json.loads(line.removeprefix("after: "))) for line in lines]


def test_help_version_and_presets_import_nothing_heavy() -> None:
    light = ["--version"], ["--help"]
    lists = ["presets"], ["train", "--list"], ["env-check", "--profile", "local", "--export"]
    every = modules_after(*light, *([*words.split(), "--help"] for words in COMMANDS if words), *lists)
    assert [HEAVY & modules for modules in every] == [set()] * len(every)
    assert [{"pydantic", "opensora_cli.cli.train"} & modules for modules in every[:2]] == [set()] * 2


def test_commands_are_in_groups_and_the_help_ends_with_the_documentation(osora) -> None:
    lines = osora("--help").out.rstrip().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("╭")] == ["Options", "Videos", "Training", "Machines"]
    assert lines[-1].strip() == "Documentation: docs/index.md in the checkout of osora."
    assert "convert-ckpt" not in "".join(lines)
    assert "osora convert-ckpt" in osora("convert-ckpt", "--help").out


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        ("generate", ["Prompt", "Video", "Reference", "Sampling", "Memory and devices", "Output"]),
        ("train", ["Options", "Checkpoints", "Checks", "Memory and devices", "Output"]),
    ],
)
def test_help_fits_two_screens_and_help_all_names_every_option(command: str, panels: list[str], help_of) -> None:
    short, full = help_of(command), "\n".join(help_of(command, option="--help-all"))
    assert len(short) <= 2 * 24
    named = set(re.findall(r"--[a-z0-9-]+", full))
    assert {name for parameter in COMMANDS[command].params for name in parameter.opts if name[:2] == "--"} <= named
    assert set(re.findall(r"--[a-z0-9-]+", "\n".join(short))) < named
    assert re.findall(r"╭─ (.*?) ─", full)[-len(panels) :] == panels


@pytest.mark.parametrize("args", [["-h"], []], ids=" ".join)
def test_help_lists_the_commands(args: list[str], osora) -> None:
    out = osora(*args).out
    assert "generate" in out
    assert ("--install-completion" in out) is bool(args)
    assert len(re.findall(r"^ *osora \w+", out, re.MULTILINE)) == 3  # examples


def test_waiting_threads_sleep_unless_the_user_chose() -> None:
    environment: dict[str, str] = {}
    _wait_without_spinning(environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    environment = {"KMP_BLOCKTIME": "7"}
    _wait_without_spinning(environment)
    assert environment == {"KMP_BLOCKTIME": "7"}


def test_list_recipes(osora) -> None:
    lines = osora("train", "--list").out.splitlines()
    assert [line.split()[0] for line in lines] == list_presets("train")
    document = json.loads(osora("train", "--list", "--json").out)
    assert document["schema"] == "osora.recipes/1"
    for recipe, line in zip(document["recipes"], lines, strict=True):
        assert recipe["description"].endswith(".")
        assert "#" not in recipe["description"]
        assert line.endswith(recipe["description"])
        assert Path(recipe["file"]).stem == recipe["name"]


PRESETS = ["256px", "768px", "demo", "flux1_dev", "high_compression", "t2i2v_256px", "t2i2v_768px"]


def test_list_presets(osora) -> None:
    captured = osora("presets")
    assert [line.split(":")[0] for line in captured.out.splitlines() if not line.startswith(" ")] == PRESETS
    assert captured.err == ""
    document = json.loads(osora("presets", "--json").out)
    assert document["schema"] == "osora.presets/2"
    assert [preset["name"] for preset in document["presets"]] == PRESETS
    for preset in document["presets"]:
        assert GenerateSettings(prompt="x", **preset["settings"]).video.resolution in ("128px", "256px", "768px")
        assert preset["least_memory_gib"] <= preset["memory_gib"]
        assert "H200" in preset["fits"]
        assert {*preset["fits"], *preset["fits_with_offload"]} == set(list_presets("hardware"))
    for preset in document["presets"][:2]:
        assert {"4070", "4090", "3090"} <= set(preset["fits_with_offload"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_needs_of_presets_are_those_of_their_plans(name: str) -> None:
    def planned(on: str = "1xH200", **more: str) -> PlanDocument:
        given = {"prompt": "sea", **{key.replace("__", "."): value for key, value in more.items()}}
        request = generate_request(
            {key: Given(value, "test") for key, value in given.items()},
            config=Path(name),
            environment={},
            on=read_machine(on),
        )
        reporter = SilentReporter()
        return plan_generation(resolve(request, reporter=reporter), reporter=reporter, on=request.on)

    whole = planned(memory__offload="none")
    # If nothing fits, the plan is the one with the least memory.
    least = planned(memory__limit="1MiB")
    assert NEEDS[name][:2] == pytest.approx((whole.peak_bytes / 2**30, least.peak_bytes / 2**30), abs=0.1)
    assert planned(memory__limit=f"{NEEDS[name][1] + 0.1}GiB").fits
    (preset,) = (preset for preset in describe_presets().presets if preset.name == name)
    for gpu in (*preset.fits, *preset.fits_with_offload):
        plan = planned(gpu)
        assert (plan.fits, plan.peak_bytes >= whole.peak_bytes) == (True, gpu in preset.fits), gpu


def commands() -> dict[str, object]:
    found, waiting = {}, [("", load_commands())]
    while waiting:
        words, command = waiting.pop()
        found[words] = command
        waiting += [(f"{words} {name}".strip(), below) for name, below in getattr(command, "commands", {}).items()]
    return found


COMMANDS = commands()


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(words: str, *, columns: int = 80, option: str = "--help") -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([*words.split(), option]) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("words", COMMANDS)
def test_help_reads_well_in_80_columns_and_has_no_line_breaks_of_the_source(words: str, help_of) -> None:
    lines, wide = help_of(words), "\n".join(help_of(words, columns=2000))
    assert max(map(len, lines)) <= 80
    assert not re.search(r"<\w+(\[\w+\])?>", "\n".join(lines))
    about, _, examples = unwrapped(COMMANDS[words].help).partition("Examples:")
    assert {line for line in examples.splitlines() if line} <= {line.strip() for line in lines}
    assert [paragraph for paragraph in about.split("\n\n") if paragraph not in wide] == []
    # Most of a row is for the meaning, not for the kind of value.
    for parameter in COMMANDS[words].params:
        assert len(parameter.metavar or "") <= 18, parameter.name


def test_the_short_help_of_a_command_promises_nothing_that_its_own_help_lacks() -> None:
    for name, (_, _, about) in _COMMANDS.items():
        own = " ".join(f"{words} {command.help}" for words, command in COMMANDS.items() if words.startswith(name))
        short, full = (set(re.findall(r"[a-z]+", text.lower())) for text in (about, own))
        assert short <= full, name


def test_help_of_generate_has_the_defaults(help_of) -> None:
    text = "\n".join(help_of("generate", columns=400, option="--help-all"))
    released, demo = (load_preset(name, prompt="x") for name in ("256px", "demo"))
    for flag, key in (("steps", "sampling.num_inference_steps"), ("seed", "sampling.seed"), ("fps", "video.fps")):
        usual, own = (attrgetter(key)(preset) for preset in (released, demo))
        default = usual if usual == own else f"{usual}; demo {own}"
        assert re.search(rf"│ +--{flag}[ ,].* Default: {default}\. +│", text)
    assert re.search(r"│ --threads .* Default: OMP_NUM_THREADS, or by work and cores\. +│", text)
