"""Layers: keys, sources, precedence, and strict YAML: scalars stay text, and files may extend others."""

import os
from pathlib import Path

import pytest

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, collect_overrides, read_environment, read_sections, read_settings_file


def texts(layer: dict[str, Given]) -> dict[str, object]:
    return {key: at.value for key, at in layer.items()}


def test_sections_become_dotted_keys() -> None:
    layer = read_sections(GenerateSettings, {"prompt": "x", "video": {"fps": "12"}, "text": ""}, source="a.yaml")
    assert layer == {"prompt": Given("x", "a.yaml"), "video.fps": Given("12", "a.yaml")}


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"video": {"frames": "3"}}, "video.frames (from a.yaml) is not a setting", "did you mean video.num_frames?"),
        ({"vidoe": {"fps": "3"}}, "vidoe (from a.yaml) is not a setting", "did you mean video?"),
        ({"num_frames": "3"}, "num_frames (from a.yaml) is not a setting", "did you mean video.num_frames?"),
        ({"qqq": "3"}, "qqq (from a.yaml) is not a setting", "there are prompt, prompts_at, negative_prompt"),
        ({"video": "3"}, "video=3 (from a.yaml) is a section", "put its keys below it"),
    ],
)
def test_wrong_sections(values: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_sections(GenerateSettings, values, source="a.yaml")
    assert caught.value.message == message
    assert hint in (caught.value.hint or "")


def test_environment() -> None:
    environment = {
        "HOME": "/root",
        "OSORA_SAMPLING__SEED": "1",
        "OSORA_PROMPT_SUFFIX__MOTION_SCORE": "none",
        "OSORA_NEGATIVE_PROMPT": "blurry",
        "OSORA_WEIGHTS": "/weights",
        "OSORA_VIDEO__FPS": "",
        "OSORA_HOME": "/elsewhere",
    }
    layer = read_environment(GenerateSettings, environment)
    assert texts(layer) == {
        "sampling.seed": "1",
        "prompt_suffix.motion_score": "none",
        "negative_prompt": "blurry",
        "runtime.weights": "/weights",
    }
    assert layer["sampling.seed"].source == "OSORA_SAMPLING__SEED"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("OSORA_SAMPLING__SED", "did you mean OSORA_SAMPLING__SEED?"),
        ("OSORA_SAMPLING_SEED", "did you mean OSORA_SAMPLING__SEED?"),
        ("OSORA_WEIGTHS", "did you mean OSORA_WEIGHTS?"),
        ("OSORA_QQQ__ZZZ", "unset it"),
    ],
)
def test_misspelt_environment(name: str, hint: str) -> None:
    with pytest.raises(RequestError, match=f"{name} in the environment is not a setting") as caught:
        read_environment(GenerateSettings, {name: "1"})
    assert caught.value.hint == hint


def test_overrides_keep_flags_and_the_last_assignment() -> None:
    flags = {"sampling.seed": Given(3, "--seed")}
    layer = collect_overrides(GenerateSettings, flags, ["video.fps=5", " video.fps =6", "negative_prompt=a=b"])
    assert texts(layer) == {"sampling.seed": 3, "video.fps": "6", "negative_prompt": "a=b"}


@pytest.mark.parametrize(
    ("assignment", "message", "hint"),
    [
        ("sampling.seed", "--set sampling.seed must be section.key=value", "as in --set"),
        ("=3", "--set =3 must be section.key=value", "as in --set"),
        ("model.deph=1", "model.deph (from --set) is not a setting", "did you mean model.depth?"),
        ("num_steps=1", "num_steps (from --set) is not a setting", "did you mean sampling.num_inference_steps?"),
        ("condition=1", "condition (from --set) is a section", "set one of its keys: condition.mode,"),
        ("model.zzz=1", "model.zzz (from --set) is not a setting", "there are model.in_channels, "),
        ("sampling.seed=4", "--set sampling.seed=4 contradicts --seed, which is 3", "drop one of them"),
    ],
)
def test_wrong_assignments(assignment: str, message: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        collect_overrides(GenerateSettings, {"sampling.seed": Given(3, "--seed")}, [assignment])
    assert caught.value.message == message
    assert hint in (caught.value.hint or "")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_scalars_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "ratio: 16:9\nrate: 1e-4\nanswer: no\noctal: 010\nlist: [1, on]\n")
    expected = {"ratio": "16:9", "rate": "1e-4", "answer": "no", "octal": "010", "list": ["1", "on"]}
    assert read_settings_file(path) == expected


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_empty_file(tmp_path: Path, text: str) -> None:
    assert read_settings_file(write(tmp_path, "a.yaml", text)) == {}


def test_extends_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, "base/a.yaml", "model:\n  depth: 1\n  axes_dim: [1, 2]\nprompt: x\n")
    write(tmp_path, "base/b.yaml", "extends: a.yaml\nmodel:\n  depth: 2\n")
    path = write(tmp_path, "c.yaml", "model:\n  axes_dim: [3]\nextends: base/b.yaml\n")
    assert read_settings_file(path) == {"model": {"depth": "2", "axes_dim": ["3"]}, "prompt": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt: a\nprompt: b\n", "line 2, is not valid YAML: 'prompt' is there twice: keep one"),
        ("video:\n  fps: 1\n  fps: 1\n", "line 3, is not valid YAML: 'fps' is there twice"),
        ("a: [1\nb: 2\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("[a]: 1\n", "line 1, is not valid YAML: a key must be a word"),
        ("\t- a", "is not valid YAML"),
        ("- a\n- b\n", "must hold `key: value` lines"),
        ("just text\n", "must hold `key: value` lines"),
        ("extends: [a, b]\n", "`extends:` must name one file"),
        ("extends:\n", "`extends:` must name one file"),
        ("extends: gone.yaml\n", "gone.yaml does not exist"),
        ("extends: a.yaml\n", "a.yaml extends itself: a.yaml -> a.yaml"),
        ("extends: b.yaml\n", "b.yaml extends itself: b.yaml -> c.yaml -> b.yaml"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "b.yaml", "extends: c.yaml\n")
    write(tmp_path, "c.yaml", "extends: b.yaml\n")
    with pytest.raises(FileProblem) as caught:
        read_settings_file(write(tmp_path, "a.yaml", text))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: " + "[" * 600 + "]" * 600, "is not valid YAML: it is nested too deeply"),
        ("a: &a [*a]\n", "line 1, is not valid YAML: an alias"),
        ("a: &a [x]\nb: [*a, *a]\n", r"line 2, is not valid YAML: an alias \(\*name\) stands for a value: write the"),
        ("# " + "x" * 500_000, "has more than 500,000 bytes"),
        ("extends: a\\0b.yaml", "does not exist"),
        ('extends: "a\\0b.yaml"', "no file can have this name"),
        ('extends: "\\ud800.yaml"', "no file can have this name"),
        (f"extends: {'n' * 5000}.yaml", "File name too long"),
        ("extends: loop.yaml", "Too many levels of symbolic links"),
        ("extends: pipe.yaml", "it is a pipe"),
        ("extends: /dev/zero", "it is a device"),
    ],
)
def test_hostile_files_are_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(FileProblem, match=message) as caught:
        read_settings_file(write(tmp_path, "a.yaml", content))
    assert len(caught.value.message) < 1500
    assert len(caught.value.message.splitlines()) == 1
