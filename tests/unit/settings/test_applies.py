"""Tables of where settings apply, the settings that sidecars have by them, and rules between pairs of settings."""

import pytest
from pydantic import Field

from opensora_cli.core.section import Section, all_keys, find_setting
from opensora_cli.settings import generate, train
from opensora_cli.settings.applies import Pair, pair_problems, used_settings, warnings_without_effect
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import (
    SavedSettings,
    generate_request,
    load_generate_settings,
    load_preset,
)
from opensora_cli.settings.tools import BenchCommSettings, ReconstructSettings
from opensora_cli.settings.train import TrainSettings

SIZE = {"video.height": 288, "video.width": 512}


def made(preset: str = "256px", **changes: object) -> GenerateSettings:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return load_preset(preset, prompt="sea").replace({"condition.mode": "t2v", **changes})


@pytest.mark.parametrize("schema", [GenerateSettings, TrainSettings, ReconstructSettings, BenchCommSettings])
def test_tables_name_settings_that_exist(schema: type[Section]) -> None:
    keys = all_keys(schema)
    assert schema.applies
    for row in schema.applies:
        for place in row.keys.split():
            inside = [key[len(place) + 1 :].split(".")[0] for key in keys if key.startswith(f"{place}.")]
            assert place in keys or inside, place
            assert set(row.but.split()) <= set(inside), place
        assert not row.why or isinstance(row.when, str) or ": " in row.why, row.why


@pytest.mark.parametrize(
    ("settings", "without", "there"),
    [
        (
            made(),
            "parallel from_latents output.overwrite draft picture vae.dc_ae vae.flux_ae video.causal_lengths "
            "files.turbo",
            "prompt negative_prompt condition.mode sampling.flow_shift sampling.guidance_scale video.resolution "
            "vae.sample_size prompt_suffix.motion_score runtime.dtype memory.offload",
        ),
        (
            made(condition__mode="i2v_head", condition__references=("a.png",), **SIZE),
            "video.resolution video.aspect_ratio",
            "condition.references condition.fit video.height",
        ),
        (
            made(model__guidance_embed=True, loras=("a",)),
            "sampling.guidance_scale sampling.text_oscillation sampling.mean_guidance_of",
            "sampling.embedded_guidance loras",
        ),
        (
            made("flux1_dev"),
            "negative_prompt sampling.guidance_scale vae.scale_factor vae.dc_ae",
            "vae.flux_ae.scale_factor sampling.embedded_guidance video.aspect_ratio",
        ),
    ],
)
def test_what_took_part(settings: GenerateSettings, without: str, there: str) -> None:
    def has(key: str) -> bool:
        place = values
        for name in key.split("."):
            if name not in place:
                return False
            place = place[name]
        return True

    values = used_settings(settings)
    assert [key for key in without.split() if has(key)] == []
    assert [key for key in there.split() if not has(key)] == []
    # Enough to make the same again, whatever the shell has set, and with the same settings beside it.
    environment = {"OSORA_VIDEO__HEIGHT": "16", "OSORA_VIDEO__WIDTH": "16", "OSORA_CONDITION__FIT": "pad"}
    # No file brings these.
    adapters = {"loras": Given("a", "--lora")} if settings.loras else {}
    saved = SavedSettings(source="s.json", values=values)
    request = generate_request(adapters, saved=saved, environment=environment)
    again = load_generate_settings(request, model=settings.model.name)
    assert used_settings(again) == values


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, "sampling.image_guidance_scale condition.fit output.preview_every output.save_state_every"),
        ({"sampling__guidance_scale": 1}, "negative_prompt sampling.image_guidance_scale condition.fit"),
        ({"sampling__guidance_scale": 1, "video__extend": 1}, "condition.fit"),
        ({"condition__mode": "i2v_head", "condition__references": ("a.png",)}, "output.preview_every"),
    ],
    ids=str,
)
def test_typed_settings_that_change_nothing_are_named(changes: dict[str, object], keys: str) -> None:
    typed = {
        "negative_prompt": "rain",
        "sampling.image_guidance_scale": 9.0,
        "condition.fit": "pad",
        "output.preview_every": 51 if "output.preview_every" in keys else 50,
        "output.save_state_every": 51 if "output.save_state_every" in keys else 50,
    }
    settings = made(**changes).replace({key: value for key, value in typed.items() if key not in changes})
    lines = [*warnings_without_effect(settings, {key: Given(value, "--set") for key, value in typed.items()})]
    assert sorted(line.partition("=")[0] for line in lines) == sorted(keys.split())
    assert all(" (from --set) has no effect " in line for line in lines)


def test_compression_is_part_of_a_request_for_it_changes_the_result():
    settings = made(parallel__gpus=2, parallel__compression="fp8")
    assert used_settings(settings)["parallel"] == {"compression": "fp8"}
    assert "parallel" not in used_settings(made(parallel__gpus=2))


class Toy(Section):
    rank: int | None = Field(None, ge=0, le=9)
    kind: str = "ddp"
    compile: bool = False


@pytest.mark.parametrize(
    ("first", "second", "given", "named"),
    [
        ("rank", "compile", {"rank": 0, "compile": True}, None),
        ("rank", "compile", {"rank": 4, "compile": True}, "rank=4 does not go with compile=true: fix"),
        ("rank!=none", "compile", {"rank": 0, "compile": True}, "rank=0 does not go with compile=true: fix"),
        ("rank>1", "kind=ddp", {"rank": 1}, None),
        ("rank>1", "kind=ddp", {"rank": 2}, "rank=2 does not go with kind=ddp: fix"),
        ("compile", "kind!=ddp", {"compile": True}, None),
        (
            "compile",
            "kind=zero1|zero2",
            {"compile": True, "kind": "zero2"},
            "compile=true does not go with kind=zero2: fix",
        ),
    ],
)
def test_two_settings_do_not_go_together(first: str, second: str, given: dict[str, object], named: str | None) -> None:
    found = [*pair_problems(Toy.model_validate(given), conflicts=[Pair(first, second, "fix")])]
    assert found == ([] if named is None else [named])


def test_a_setting_needs_another_under_a_condition() -> None:
    rule = Pair("rank", "kind=hybrid", "use hybrid", "compile")
    assert [*pair_problems(Toy(rank=2), needs=[rule])] == []
    assert [*pair_problems(Toy(rank=2, compile=True), needs=[rule])] == ["rank=2 needs kind=hybrid: use hybrid"]
    assert [*pair_problems(Toy(rank=2, compile=True, kind="hybrid"), needs=[rule])] == []


def test_the_tables_name_settings_that_exist_and_the_defaults_break_no_rule() -> None:
    videos, training = load_preset("256px", prompt="sea"), TrainSettings(target="mmdit", data={"table": "clips.csv"})
    for settings, needs, conflicts in (
        (videos, generate._NEEDS, generate._CONFLICTS),
        (training, train._NEEDS, train._CONFLICTS),
    ):
        assert [*pair_problems(settings, needs=needs, conflicts=conflicts)] == []
        for rule in (*needs, *conflicts):
            # A key that does not exist is an error.
            assert all(find_setting(settings, key) for key in (rule.first, rule.second, rule.only) if key)
