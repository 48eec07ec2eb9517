"""Settings that a file of an earlier run may bring: the description of its video, and nothing of the machine."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.section import all_keys
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import (
    DESCRIPTION,
    TYPED,
    GenerateRequest,
    SavedSettings,
    is_description,
    load_generate_settings,
)


def load(
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
    assert load(values) == load({})


def test_a_prompt_that_was_refined_keeps_what_was_typed() -> None:
    assert load({"refine": {"original": "typed"}}).refine.original == "typed"


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
        load(values)
    assert caught.value.message == f"s.json was made with {flags}, and files are not taken from it"


def test_others_may_be_given() -> None:
    values = {"runtime": {"weights": "/a"}, "loras": ["/a"], "files": {"vae": "/a"}}
    settings = load(values, given={"runtime.weights": "none", "loras": "", "files.vae": "vae.safetensors"})
    assert (settings.runtime.weights, settings.loras, settings.files.vae) == (None, (), "vae.safetensors")


def test_an_adapter_that_is_given_again_must_be_the_same() -> None:
    path = str(Path("a").absolute())
    values = {"loras": [{"path": path, "scale": 0.5, "sha256": "0" * 64}]}
    assert [lora.sha256 for lora in load(values, given={"loras": "a:2;b"}).loras] == ["0" * 64, None]


@pytest.mark.parametrize("loras", [3, [3], [{"scale": 1}], {"a": 1}])
def test_damaged_adapters(loras: object) -> None:
    with pytest.raises(FileProblem, match=r"s\.json is damaged: loras is no list"):
        load({"loras": loras})


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
    settings = load({"output": {"path": path}, "video": {"num_frames": frames}}, given=given)
    assert settings.output.format == expected


def test_references_of_a_file_are_sent_to_no_server() -> None:
    values = {"condition": {"references": ["/private cat.png"]}}
    assert load(values).condition.references == ("/private cat.png",)
    for wanted in ("refine.prompt", "refine.motion_score"):
        with pytest.raises(RequestError, match="would send files to the server") as caught:
            load(values, given={wanted: True})
        assert "--ref '/private cat.png'" in caught.value.message
    assert load(values, given={"refine.prompt": True, "condition.references": "/b.png"}).refine.is_on


def test_what_made_latents_is_kept_as_a_record_where_they_are_decoded() -> None:
    values = {"loras": [{"path": "/a", "sha256": "0" * 64}], "files": {"t5": "/t5"}}
    given = {"from_latents": "a.latents.safetensors"}
    settings = load(values, given=given, decodes=True)
    assert (settings.loras[0].path, settings.files.t5) == ("/a", "/t5")
    with pytest.raises(RequestError, match=r"made with --set files\.vae=/vae, and"):
        load({"files": {"vae": "/vae"}}, given=given, decodes=True)
