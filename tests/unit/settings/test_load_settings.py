"""From a request to settings: precedence, sidecars, the choice of a preset, and where a wrong value came from."""

import json
from pathlib import Path

import pytest

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.solvers import Solver
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import (
    SIDECAR_SCHEMAS,
    GenerateRequest,
    SavedSettings,
    load_generate_settings,
    load_preset,
    load_runtime_settings,
    read_sidecar,
)

PROMPT = {"prompt": Given("raining, sea", "PROMPT")}


def seed(request: GenerateRequest) -> int:
    return load_generate_settings(request, model=ModelName.DEMO).sampling.seed


def test_precedence(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("sampling:\n  seed: 1\n", encoding="utf-8")
    environment = {"OSORA_SAMPLING__SEED": "2"}
    flag = {**PROMPT, "sampling.seed": Given(4, "--seed")}
    saved = SavedSettings(source="s.json", values={"sampling": {"seed": 3}})
    assert seed(GenerateRequest(overrides=PROMPT)) == 42
    assert seed(GenerateRequest(overrides=PROMPT, config=config)) == 1
    assert seed(GenerateRequest(overrides=PROMPT, config=config, environment=environment)) == 2
    assert seed(GenerateRequest(overrides=PROMPT, environment=environment, saved=saved)) == 3
    assert seed(GenerateRequest(overrides=flag, environment=environment, saved=saved)) == 4


def test_a_file_of_settings_is_read_once(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("sampling:\n  seed: 1\n", encoding="utf-8")
    request = GenerateRequest(overrides=PROMPT, config=config)
    assert load_runtime_settings(request).model_choice is ModelName.AUTO
    config.unlink()
    assert seed(request) == 1


def test_the_machine_comes_from_the_shell_and_config_beside_a_sidecar(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("memory:\n  offload: model\noutput:\n  path: mine\n", encoding="utf-8")
    saved = {"prompt": "x", "runtime": {"weights": "/old", "device": "cpu", "dtype": "float16"}}
    request = GenerateRequest(
        saved=SavedSettings(source="s.json", values=saved),
        environment={
            "OSORA_WEIGHTS": "/new",
            "OSORA_RUNTIME__DEVICE": "cuda",
            "OSORA_RUNTIME__DTYPE": "bfloat16",
            "OSORA_REFINE__PROMPT": "true",
        },
        config=config,
    )
    settings = load_generate_settings(request, model=ModelName.DEMO)
    runtime = settings.runtime
    assert (runtime.weights, runtime.device, runtime.dtype) == ("/new", "cuda", "float16")
    assert (settings.memory.offload, settings.output.path) == ("model", "mine")
    # The prompt of the file is what was refined.
    assert not settings.refine.is_on


def test_a_config_that_describes_a_video_cannot_go_with_a_sidecar(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("sampling:\n  seed: 1\n", encoding="utf-8")
    request = GenerateRequest(saved=SavedSettings(source="s.json", values={}), config=config)
    with pytest.raises(RequestError, match=r"--config .* cannot go with s\.json.*: both may have sampling\.seed"):
        load_runtime_settings(request)


@pytest.mark.parametrize(
    ("model", "resolution", "expected"),
    [
        (ModelName.DEMO, None, "128px"),
        (ModelName.OPEN_SORA_V2, None, "256px"),
        (ModelName.OPEN_SORA_V2, "256px", "256px"),
        (ModelName.OPEN_SORA_V2, "768px", "768px"),
    ],
)
def test_preset_of_a_model_and_resolution(model: ModelName, resolution: str | None, expected: str) -> None:
    overrides = dict(PROMPT)
    if resolution:
        overrides["video.resolution"] = Given(resolution, "--res")
    settings = load_generate_settings(GenerateRequest(overrides=overrides), model=model)
    assert (settings.model.name, settings.video.resolution) == (model, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (Solver.AB2, 15, 50, 0.15)),
        ({"sampling.num_inference_steps": 20, "sampling.step_cache": 0}, (Solver.AB2, 20, 50, 0)),
        ({"sampling.solver": "heun", "sampling.mean_guidance_of": 30}, (Solver.HEUN, 15, 30, 0)),
        ({"sampling.text_oscillation": "false", "sampling.image_oscillation": "false"}, (Solver.AB2, 15, None, 0.15)),
        ({"sampling.fast": "false"}, (Solver.EULER, 50, None, 0)),
    ],
)
def test_fast_sets_what_is_not_set(given: dict[str, object], expected: tuple[object, ...]) -> None:
    overrides = {key: Given(value, "--set") for key, value in {"sampling.fast": "true", **given}.items()}
    request = GenerateRequest(overrides={**PROMPT, **overrides})
    assert _sampled(request) == expected


def test_fast_gives_way_where_it_stands_and_wins_over_what_is_below(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("sampling:\n  num_inference_steps: 40\n  fast: true\n", encoding="utf-8")
    assert _sampled(GenerateRequest(overrides=PROMPT, config=config)) == (Solver.AB2, 40, 50, 0.15)
    typed = {**PROMPT, "sampling.fast": Given(True, "--fast")}
    assert _sampled(GenerateRequest(overrides=typed, config=config)) == (Solver.AB2, 15, 40, 0.15)


def test_what_fast_sets_is_the_same_when_it_is_repeated() -> None:
    fast = {**PROMPT, "sampling.fast": Given(True, "--fast")}
    settings = load_generate_settings(GenerateRequest(overrides=fast), model=ModelName.OPEN_SORA_V2)
    saved = SavedSettings(source="a.json", values=settings.model_dump(mode="json"))
    assert load_generate_settings(GenerateRequest(saved=saved), model=ModelName.OPEN_SORA_V2) == settings


def _sampled(request: GenerateRequest) -> tuple[object, ...]:
    sampling = load_generate_settings(request, model=ModelName.OPEN_SORA_V2).sampling
    return sampling.solver, sampling.num_inference_steps, sampling.mean_guidance_of, sampling.step_cache


def test_unknown_resolution_lists_the_known_ones() -> None:
    overrides = {**PROMPT, "video.resolution": Given("demo", "--res")}
    with pytest.raises(RequestError, match="must be a pixel count"):
        load_generate_settings(GenerateRequest(overrides=overrides), model=ModelName.OPEN_SORA_V2)
    overrides = {**PROMPT, "video.resolution": Given("512px", "--res")}
    with pytest.raises(RequestError, match=r"use 256px or 768px \(from --res\)"):
        load_generate_settings(GenerateRequest(overrides=overrides), model=ModelName.OPEN_SORA_V2)


def test_errors_name_their_source(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("video:\n  num_frames: 16\n", encoding="utf-8")
    request = GenerateRequest(
        overrides={**PROMPT, "sampling.seed": Given("x", "--set")},
        config=config,
        environment={"OSORA_SAMPLING__NUM_INFERENCE_STEPS": "0"},
    )
    with pytest.raises(RequestError) as caught:
        load_generate_settings(request, model=ModelName.DEMO)
    assert set(caught.value.message.splitlines()) == {
        "sampling.num_inference_steps=0 must be at least 1 (from OSORA_SAMPLING__NUM_INFERENCE_STEPS)",
        "sampling.seed=x must be a whole number (from --set)",
    }
    with pytest.raises(RequestError) as caught:
        load_generate_settings(GenerateRequest(overrides=PROMPT, config=config), model=ModelName.DEMO)
    assert caught.value.message.endswith(f"use 17 (from {config})")


@pytest.mark.parametrize(
    ("choice", "name", "expected"),
    [
        (None, None, ModelName.AUTO),
        ("demo", None, ModelName.DEMO),
        (None, "open-sora-v2", ModelName.OPEN_SORA_V2),
        ("auto", "demo", ModelName.DEMO),
        ("demo", "open-sora-v2", ModelName.DEMO),
    ],
)
def test_model_choice(choice: str | None, name: str | None, expected: ModelName) -> None:
    given = {"runtime.model_choice": choice, "model.name": name}
    overrides = {key: Given(value, "--set") for key, value in given.items() if value}
    assert load_runtime_settings(GenerateRequest(overrides=overrides)).model_choice is expected


def test_contradicting_models_are_refused_when_settings_are_loaded() -> None:
    overrides = {**PROMPT, "runtime.model_choice": Given("demo", "--model"), "model.name": Given("open-sora-v2", "a")}
    with pytest.raises(RequestError, match=r"model\.name=open-sora-v2 must be runtime\.model_choice=demo"):
        load_generate_settings(GenerateRequest(overrides=overrides), model=ModelName.DEMO)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("runtime.device", "gpu", r"runtime\.device=gpu must be .* \(from --device\)"),
        ("runtime.model_choice", "dem", r"runtime\.model_choice=dem must be one of .* did you mean demo\?"),
        ("model.name", "dem", r"model\.name=dem must be one of demo, open-sora-v2"),
    ],
)
def test_wrong_runtime_settings(key: str, value: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_runtime_settings(GenerateRequest(overrides={key: Given(value, "--device")}))


@pytest.mark.parametrize("schema", SIDECAR_SCHEMAS)
def test_sidecar_round_trip(tmp_path: Path, schema: str) -> None:
    settings = load_preset("demo", prompt='a "sea"\n in 雨 🌧').replace({"sampling.seed": 5, "output.path": "x.gif"})
    path = tmp_path / "x.json"
    document = {"schema": schema, "settings": settings.model_dump(mode="json"), "timings": {}}
    path.write_text(json.dumps(document), encoding="utf-8")
    request = GenerateRequest(saved=read_sidecar(path), environment={"OSORA_SAMPLING__SEED": "9"})
    runtime = load_runtime_settings(request)
    assert runtime.model_choice is ModelName.DEMO
    # The format is that of the result, and the place is that of other results.
    expected = settings.replace({"output.path": "samples", "output.format": "gif"})
    assert load_generate_settings(request, model=ModelName.DEMO) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is broken: no JSON"),
        (b"\xff\xfe", "is broken: no UTF-8"),
        (b"[" * 100_000, "is broken: JSON that is nested too deep"),
        (b"[]", "is broken: JSON that is no object"),
        (b"{}", "has the schema None"),
        (b'{"schema": "osora.plan/2"}', "has the schema 'osora.plan/2', and must have 'osora.generate/2'"),
        (b'{"schema": "osora.generate/1", "settings": 3}', "has no settings in it"),
    ],
)
def test_what_is_no_sidecar(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FileProblem) as caught:
        read_sidecar(path)
    assert message in caught.value.message


def test_missing_sidecar(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="does not exist"):
        read_sidecar(tmp_path / "gone.json")
    with pytest.raises(FileProblem, match="it is a folder"):
        read_sidecar(tmp_path)


def test_unknown_key_in_a_sidecar() -> None:
    request = GenerateRequest(saved=SavedSettings(source="s.json", values={"video": {"num_frame": 17}}))
    with pytest.raises(RequestError) as caught:
        load_runtime_settings(request)
    assert (caught.value.message, caught.value.hint) == (
        "video.num_frame (from s.json) is not a setting",
        "did you mean video.num_frames?",
    )
