"""Layers: keys, sources, precedence."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, collect_overrides, read_environment, read_sections


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
