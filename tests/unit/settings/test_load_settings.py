"""Loading of a request: precedence, sidecars, presets, and sources in messages.

A file of an earlier run brings the description of its video, and nothing of the machine.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from opensora_cli.core.choices import Solver
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.section import all_keys
from opensora_cli.models.registry import ARCHITECTURES, AUTO, DEMO, OPEN_SORA_V2
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, list_presets
from opensora_cli.settings.load import (
    ANY_PROMPT,
    DESCRIPTION,
    SIDECAR_SCHEMA,
    TYPED,
    GenerateRequest,
    SavedSettings,
    flags_again,
    generate_request,
    is_description,
    load_generate_settings,
    load_preset,
    read_sidecar,
    usual_settings,
)

PROMPT = {"prompt": Given("raining, sea", "PROMPT")}


def request(
    config: str | None = None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    saved: SavedSettings | None = None,
    **typed: object,
) -> GenerateRequest:
    """Return a request with a configuration file in `folder` and options such as `sampling__seed`."""
    path = None if config is None or folder is None else folder / "a.yaml"
    if path is not None and config is not None:
        path.write_text(config, encoding="utf-8")
    given = {key.replace("__", "."): Given(value, "--set") for key, value in typed.items()}
    prompt = PROMPT if saved is None else {}
    return generate_request({**prompt, **given}, config=path, environment=environment or {}, saved=saved)


def loaded(asked: GenerateRequest, model: str = DEMO) -> GenerateSettings:
    return load_generate_settings(asked, model=model)


def test_precedence(tmp_path: Path) -> None:
    def seed(**layers: object) -> int:
        return loaded(request(**layers, folder=tmp_path)).sampling.seed  # type: ignore[arg-type]

    environment = {"OSORA_SAMPLING__SEED": "2"}
    saved = SavedSettings(source="s.json", values={"prompt": "sea", "sampling": {"seed": 3}})
    assert seed() == 42
    assert seed(config="sampling:\n  seed: 1\n") == 1
    assert seed(config="sampling:\n  seed: 1\n", environment=environment) == 2
    assert seed(environment=environment, saved=saved) == 3
    assert seed(environment=environment, saved=saved, sampling__seed=4) == 4


def test_machine_settings_come_from_shell_and_config_beside_a_sidecar(tmp_path: Path) -> None:
    values = {"prompt": "x", "runtime": {"weights": "/old", "device": "cpu", "dtype": "float16"}}
    asked = request(
        "memory:\n  offload: model\noutput:\n  path: mine\n",
        folder=tmp_path,
        saved=SavedSettings(source="s.json", values=values),
        environment={
            "OSORA_WEIGHTS": "/new",
            "OSORA_RUNTIME__DEVICE": "cuda",
            "OSORA_RUNTIME__DTYPE": "bfloat16",
            "OSORA_REFINE__PROMPT": "true",
        },
    )
    settings = loaded(asked)
    runtime = settings.runtime
    assert (runtime.weights, runtime.device, runtime.dtype) == ("/new", "cuda", "float16")
    assert (settings.memory.offload, settings.output.path) == ("model", "mine")
    # The prompt in the file is refined already.
    assert not settings.refine.is_on


def test_config_that_describes_a_video_is_refused_beside_a_sidecar(tmp_path: Path) -> None:
    saved = SavedSettings(source="s.json", values={})
    asked = request("sampling:\n  seed: 1\n", folder=tmp_path, saved=saved)
    with pytest.raises(RequestError, match=r"--config .*a\.yaml cannot go with s\.json.* have sampling\.seed"):
        loaded(asked)


@pytest.mark.parametrize(
    ("config", "typed", "expected"),
    [
        ("", {"fast": True}, (Solver.AB2, 15, 50, 0.15)),
        ("", {"fast": True, "num_inference_steps": 20, "step_cache": 0}, (Solver.AB2, 20, 50, 0)),
        ("", {"fast": True, "solver": "heun", "mean_guidance_of": 30}, (Solver.HEUN, 15, 30, 0)),
        ("", {"fast": True, "text_oscillation": "false", "image_oscillation": "false"}, (Solver.AB2, 15, None, 0.15)),
        ("", {"fast": "false"}, (Solver.EULER, 50, None, 0)),
        # It wins over what is below its own source alone.
        ("sampling:\n  num_inference_steps: 40\n  fast: true\n", {}, (Solver.AB2, 40, 50, 0.15)),
        ("sampling:\n  num_inference_steps: 40\n  fast: true\n", {"fast": True}, (Solver.AB2, 15, 40, 0.15)),
    ],
)
def test_fast_sets_what_is_not_set(
    tmp_path: Path, config: str, typed: dict[str, object], expected: tuple[object, ...]
) -> None:
    options = {f"sampling__{key}": value for key, value in typed.items()}
    settings = loaded(request(config, folder=tmp_path, **options), OPEN_SORA_V2)  # type: ignore[arg-type]
    sampling = settings.sampling
    found = sampling.solver, sampling.num_inference_steps, sampling.mean_guidance_of, sampling.step_cache
    assert found == expected
    saved = SavedSettings(source="a.json", values=settings.model_dump(mode="json"))
    assert loaded(request(saved=saved), OPEN_SORA_V2) == settings


def test_errors_name_their_source(tmp_path: Path) -> None:
    config, environment = "video:\n  num_frames: 16\n", {"OSORA_SAMPLING__NUM_INFERENCE_STEPS": "0"}
    with pytest.raises(RequestError) as caught:
        loaded(request(config, folder=tmp_path, environment=environment, sampling__seed="x"))
    assert set(caught.value.message.splitlines()) == {
        "sampling.num_inference_steps=0 must be at least 1 (from OSORA_SAMPLING__NUM_INFERENCE_STEPS)",
        "sampling.seed=x must be a whole number (from --set)",
    }
    with pytest.raises(RequestError) as caught:
        loaded(request(config, folder=tmp_path))
    assert caught.value.message.endswith(f"use 17 (from {tmp_path / 'a.yaml'})")


@pytest.mark.parametrize(
    ("choice", "name", "expected"),
    [
        (None, None, AUTO),
        ("demo", None, DEMO),
        (None, "open-sora-v2", OPEN_SORA_V2),
        ("auto", "demo", DEMO),
        ("demo", "open-sora-v2", DEMO),
        ("dem", None, DEMO),
    ],
)
def test_model_of_a_request(choice: str | None, name: str | None, expected: str) -> None:
    given = {"runtime__model_choice": choice, "model__name": name}
    typed = {key: value for key, value in given.items() if value}
    assert request(**typed).model == expected  # type: ignore[arg-type]


def test_sidecar_round_trip(tmp_path: Path) -> None:
    settings = load_preset("demo", prompt='a "sea"\n in 雨 🌧').replace({"sampling.seed": 5, "output.path": "x.gif"})
    path = tmp_path / "x.json"
    document = {"schema": SIDECAR_SCHEMA, "settings": settings.model_dump(mode="json"), "timings": {}}
    path.write_text(json.dumps(document), encoding="utf-8")
    asked = request(saved=read_sidecar(path), environment={"OSORA_SAMPLING__SEED": "9"})
    assert asked.model == DEMO
    # The format is that of the result, and the place is that of other results.
    assert loaded(asked) == settings.replace({"output.path": "samples", "output.format": "gif"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is broken: no JSON"),
        (b"\xff\xfe", "is broken: no UTF-8"),
        (b"[" * 100_000, "is broken: JSON that is nested too deep"),
        (b"[]", "is broken: JSON that is no object"),
        (
            b'{"schema": "osora.plan/2"}',
            "has the schema 'osora.plan/2', and this version",
        ),
        (b'{"schema": "osora.generate/3", "settings": 3}', "has no settings in it"),
        (None, "does not exist"),
    ],
)
def test_broken_sidecars(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileProblem) as caught:
        read_sidecar(path)
    assert message in caught.value.message


def test_a_benchmark_gets_a_prompt_unless_it_is_given() -> None:
    for given, prompt in (({}, ANY_PROMPT), ({"prompt": Given("", "PROMPT")}, "")):
        assert generate_request(given, any_prompt=True, environment={}).given["prompt"].value == prompt


@pytest.mark.parametrize("name", list_presets("generate"))
def test_preset_parses(name: str) -> None:
    settings = load_preset(name, prompt="raining, sea")
    assert (settings.model.name == DEMO) == (name == "demo")
    assert settings.video.resolution == {"demo": "128px", "256px": "256px", "t2i2v_256px": "256px"}.get(name, "768px")
    assert (settings.output_format == "png") == (name == "flux1_dev")


@pytest.mark.parametrize("model", ARCHITECTURES)
@pytest.mark.parametrize("resolution", [None, "512px", "demo"])
def test_unknown_resolution_starts_from_the_first_preset_of_a_model(model: str, resolution: str | None) -> None:
    own = load_preset(ARCHITECTURES[model].presets[0], prompt=ANY_PROMPT)
    assert own.model.name == model
    assert usual_settings(model) == own
    overrides = {"prompt": Given(ANY_PROMPT, "prompt")}
    if resolution is not None:
        overrides["video.resolution"] = Given(resolution, "--res")
    if resolution in (None, *own.video.resolutions):
        assert load_generate_settings(GenerateRequest(overrides=overrides), model=model) == own
    else:
        with pytest.raises(RequestError, match=f"{resolution} (does not suit the {model} model|must be a pixel)"):
            load_generate_settings(GenerateRequest(overrides=overrides), model=model)


def from_saved(
    values: Mapping[str, object], *, given: Mapping[str, object] | None = None, **details: object
) -> GenerateSettings:
    saved = SavedSettings(source="s.json", values={"prompt": "sea", **values}, **details)  # type: ignore[arg-type]
    overrides = {key: Given(value, f"--{key}") for key, value in (given or {}).items()}
    return load_generate_settings(GenerateRequest(overrides=overrides, saved=saved), model=DEMO)


RESERVED = """
from_latents resume loras refine.prompt refine.motion_score
files.transformer files.vae files.t5 files.turbo files.clip files.hub_repo
picture.files.transformer picture.files.vae picture.files.hub_repo
output.path output.name_from output.overwrite output.explore
runtime.weights runtime.device
memory.offload memory.resident_blocks memory.limit memory.host_weights
parallel.gpus parallel.devices parallel.nnodes parallel.all_to_all parallel.fast_link_ranks
parallel.data_parallel_degree parallel.ulysses_degree parallel.ring_degree
parallel.cfg_parallel_degree parallel.tensor_parallel_degree
"""
"""Files, folders, servers and devices, which a file never names."""


def test_a_new_setting_is_reserved_unless_it_describes_the_video() -> None:
    assert {key for key in all_keys(GenerateSettings) if not is_description(key)} == set(RESERVED.split())
    assert set(RESERVED.split()) >= TYPED
    assert not is_description("video.new")


def test_a_section_that_a_file_brings_as_a_whole_names_no_file() -> None:
    sections = tuple(f"{each}." for each in DESCRIPTION - set(all_keys(GenerateSettings)))
    keys = [key for key in all_keys(GenerateSettings) if key.startswith(sections)]
    with pytest.raises(ValidationError) as caught:
        GenerateSettings(prompt="sea").replace(dict.fromkeys(keys, "/etc/passwd"))
    refused = {".".join(map(str, error["loc"])) for error in caught.value.errors()}
    assert [key for key in keys if not any(place.startswith(key) for place in refused)] == []


def test_reserved_settings_are_not_taken() -> None:
    values = {
        "from_latents": "a.safetensors",
        "resume": "a.safetensors",
        "refine": {"prompt": True, "motion_score": True},
        "prompt_suffix": {"motion_score": "auto"},
        "output": {"path": "/etc/x.mp4", "overwrite": True, "name_from": "prompt", "explore": True},
        "runtime": {"device": "cuda:7"},
        "memory": {"offload": "blocks", "resident_blocks": 1, "limit": 1, "host_weights": "mapped"},
        "parallel": {"gpus": 64, "devices": [1], "nnodes": 9, "ulysses_degree": 64},
    }
    assert from_saved(values) == from_saved({})


def test_a_prompt_that_was_refined_keeps_what_was_typed() -> None:
    assert from_saved({"refine": {"original": "typed"}}).refine.original == "typed"


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"runtime": {"weights": "/my ckpt"}}, "--weights '/my ckpt'"),
        ({"files": {"transformer": "/a.safetensors"}}, "--set files.transformer=/a.safetensors"),
        ({"loras": [{"path": "/a.safetensors", "scale": 1.0}]}, "--lora /a.safetensors"),
        ({"loras": [{"path": "/a", "scale": 0.25}, {"path": "/b:2", "scale": 1}]}, "--lora /a:0.25 --lora /b:2:1"),
        ({"picture": {"files": {"vae": "\x1b[2Ja"}}}, "--set 'picture.files.vae=\\x1b[2Ja'"),
    ],
)
def test_weights_and_adapters_are_to_be_given_again(values: dict[str, object], flags: str) -> None:
    with pytest.raises(RequestError) as caught:
        from_saved(values)
    assert caught.value.message == f"s.json was made with {flags}, and files are not taken from it"


def test_others_may_be_given() -> None:
    values = {"runtime": {"weights": "/a"}, "loras": ["/a"], "files": {"vae": "/a"}}
    settings = from_saved(values, given={"runtime.weights": "none", "loras": "", "files.vae": "vae.safetensors"})
    assert (settings.runtime.weights, settings.loras, settings.files.vae) == (None, (), "vae.safetensors")


def test_an_adapter_that_is_given_again_must_be_the_same() -> None:
    path = str(Path("a").absolute())
    values = {"loras": [{"path": path, "scale": 0.5, "sha256": "0" * 64}]}
    assert [lora.sha256 for lora in from_saved(values, given={"loras": "a:2;b"}).loras] == ["0" * 64, None]


@pytest.mark.parametrize("loras", [3, [3], [{"scale": 1}], {"a": 1}])
def test_damaged_adapters(loras: object) -> None:
    with pytest.raises(FileProblem, match=r"s\.json is damaged: loras is no list"):
        from_saved({"loras": loras})


@pytest.mark.parametrize(
    ("path", "frames", "given", "expected"),
    [
        ("/a/x.gif", 17, {}, "gif"),
        ("/a/x.png", 17, {}, "png"),
        ("/a/x.png", 1, {}, None),
        ("/a/x", 17, {}, None),
        ("/a/x.gif", 17, {"output.path": "b.mp4"}, None),
        ("/a/x.gif", 17, {"output.format": "png"}, "png"),
    ],
)
def test_the_ending_of_the_result_is_taken(
    path: str, frames: int, given: dict[str, object], expected: str | None
) -> None:
    settings = from_saved({"output": {"path": path}, "video": {"num_frames": frames}}, given=given)
    assert settings.output.format == expected


def test_references_of_a_file_are_sent_to_no_server() -> None:
    values = {"condition": {"references": ["/private cat.png"]}}
    assert from_saved(values).condition.references == ("/private cat.png",)
    for wanted in ("refine.prompt", "refine.motion_score"):
        with pytest.raises(RequestError, match="would send files to the server") as caught:
            from_saved(values, given={wanted: True})
        assert "--ref '/private cat.png'" in caught.value.message
    assert from_saved(values, given={"refine.prompt": True, "condition.references": "/b.png"}).refine.is_on


def test_what_made_latents_is_kept_as_a_record_where_they_are_decoded() -> None:
    values = {"loras": [{"path": "/a", "sha256": "0" * 64}], "files": {"t5": "/t5"}}
    given = {"from_latents": "a.latents.safetensors"}
    settings = from_saved(values, given=given, decodes=True)
    assert (settings.loras[0].path, settings.files.t5) == ("/a", "/t5")
    with pytest.raises(RequestError, match=r"made with --set files\.vae=/vae, and"):
        from_saved({"files": {"vae": "/vae"}}, given=given, decodes=True)


def test_the_command_that_continues_has_the_devices_and_the_memory() -> None:
    given = {
        "runtime.device": "cpu",
        "memory.offload": "blocks",
        "memory.limit": "1KiB",
        "memory.host_weights": "mapped",
        "parallel.gpus": 2,
        "parallel.ulysses_degree": 2,
    }
    recorded = {"sampling.seed": 7, "memory.fp8_storage": True, "parallel.compression": "bf16"}
    for_rows = {"parallel.data_parallel_degree": 1}
    settings = usual_settings(DEMO).replace({**given, **recorded, **for_rows})
    expected = [
        "--device cpu",
        "--offload blocks",
        "--memory-limit 1024",
        "--set memory.host_weights=mapped",
        "--gpus 2",
        "--set parallel.ulysses_degree=2",
    ]
    assert flags_again(settings, decodes=False) == flags_again(settings, decodes=True) == expected
    assert flags_again(usual_settings(DEMO), decodes=False) == []
