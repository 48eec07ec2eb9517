"""Settings of `osora bench-comm`, `osora bench-generate --try` and `osora ckpt`: what they take and refuse."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import all_keys
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, validate
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.tools import BenchCommSettings, ConvertSettings
from opensora_cli.settings.tries import STANDARD, read_tries, refuse_unfit, tried_settings


def test_a_try_is_a_name_or_settings_whose_values_may_be_lists() -> None:
    typed = "sampling.solver=ab2, sampling.timesteps=1,0.9,0.5,0,sampling.num_inference_steps=3"
    assert read_tries(["ab2-15", typed]) == {
        "ab2-15": STANDARD["ab2-15"],
        typed: {"sampling.solver": "ab2", "sampling.timesteps": "1,0.9,0.5,0", "sampling.num_inference_steps": "3"},
    }


def test_the_standard_set_has_fewer_steps_of_the_same_kind_and_fits_the_presets() -> None:
    assert STANDARD["euler-15"]["sampling.solver"] == "euler"
    for changes in STANDARD.values():
        assert set(changes) <= set(all_keys(GenerateSettings))
        load_preset("256px", prompt="sea").replace(changes)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("ab2_15", "--try ab2_15 is no name of the standard set, and no setting", "did you mean ab2-15?"),
        ("x", "--try x is no name", "there are exact, euler-30, "),
        ("sampling.solvr=ab2", "sampling.solvr (from --try sampling.solvr=ab2) is not a setting", "sampling.solver"),
        ("sampling=1", "is a section", ""),
        ("=1", "must be KEY=VALUE,KEY=VALUE, and has '=1'", ""),
        ("sampling.seed=7", "sampling.seed must be the same for all runs", "--set sampling.seed=7"),
        ("video.num_frames=5", "video.num_frames must be the same for all runs", ""),
    ],
)
def test_what_cannot_be_tried(text: str, problem: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tries([text])
    assert problem in caught.value.message
    assert hint in (caught.value.hint or "")


def test_fast_stands_for_what_it_does_beside_this_run() -> None:
    exact = load_preset("demo", prompt="sea").replace({"sampling.num_inference_steps": 40})
    sampling = tried_settings(exact, STANDARD["fast"]).sampling
    assert (sampling.solver, sampling.num_inference_steps, sampling.mean_guidance_of) == ("ab2", 15, 40)
    own = tried_settings(exact, {"sampling.fast": "true", "sampling.num_inference_steps": "12"}).sampling
    assert (own.solver, own.num_inference_steps, own.mean_guidance_of) == ("ab2", 12, 40)
    heun = exact.replace({"sampling.solver": "heun"})
    assert tried_settings(heun, STANDARD["fast"]).sampling.solver == "ab2"
    assert tried_settings(exact, {"sampling.solver": "ab2"}) == exact.replace({"sampling.solver": "ab2"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sampling.num_samples": 2}, "sampling.num_samples=2"),
        ({"sampling.stop_at": 3}, "sampling.stop_at=3"),
        ({"from_latents": "a.safetensors"}, "from_latents=a.safetensors"),
    ],
)
def test_one_whole_video_is_compared(change: dict[str, object], problem: str) -> None:
    settings = load_preset("demo", prompt="sea")
    refuse_unfit(settings)
    with pytest.raises(RequestError, match=f"{problem} cannot be compared"):
        refuse_unfit(settings.replace(change))


def _settings(**values: object) -> BenchCommSettings:
    return validate(BenchCommSettings, {key.replace("__", "."): Given(value, key) for key, value in values.items()})


def test_a_wrong_item_alone_has_no_second_problem() -> None:
    with pytest.raises(RequestError) as caught:
        _settings(collectives="foo")
    assert len(caught.value.message.splitlines()) == 1
    with pytest.raises(RequestError, match="must have at least 1 item"):
        _settings(collectives="")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_bytes": "1KiB", "max_bytes": "8"}, "min_bytes=1024 is over max_bytes=8"),
        ({"max_bytes": "3TiB"}, "max_bytes="),
        ({"warmup": 1}, "warmup=1 must be at least 2"),
        ({"parallel__gpus": 1}, "gpus=1 must be at least 2"),
        ({"parallel__gpus": 4, "parallel__ulysses_degree": 2}, "parallel.ulysses_degree has no effect here"),
        ({"collectives": "all_reduse"}, "did you mean all_reduce"),
    ],
)
def test_wrong_requests(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as failure:
        _settings(**values)
    assert message in failure.value.message


def convert(target: str, **values: object) -> ConvertSettings:
    given = {"source": "a.safetensors", "target": target, **values}
    return validate(ConvertSettings, {key: Given(value, f"--{key}") for key, value in given.items()})


def test_the_target_names_the_format() -> None:
    assert [convert(name).resolved_format for name in ("x.safetensors", "x.SAFETENSORS")] == ["safetensors"] * 2
    assert [convert(name).resolved_format for name in ("x.pt", "x.pth", "x.bin")] == ["torch"] * 3
    folders = ("x", "v1.5", "../.hidden", "runs.old/x", "folder/")
    assert [convert(name).resolved_format for name in folders] == ["safetensors-shards"] * 5


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        ("x.pt", {"format": "safetensors"}, "must agree with the ending of target=x.pt, torch: use another"),
        ("x.safetensors", {"format": "safetensors-shards"}, "must agree with the ending"),
        ("x.pt", {"shard_size": "4GB"}, "has no effect on format=torch: use one of safetensors-shards, colossalai"),
        ("x", {"shard_size": "1" + "0" * 400}, "shard_size='10000000000000000000'... is larger than any file (from --"),
        ("x", {"qkv": "fussed"}, "did you mean fused?"),
        ("x.ckpt", {}, "target=x.ckpt has an ending, .ckpt, that names no format: add --format"),
        ("x.safetensors.index.json", {}, "has an ending, .json, that names no format: add --format"),
        ("x.p\u0442", {}, "that names no format"),
    ],
)
def test_contradictions(target: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        convert(target, **values)
    assert message in caught.value.message


def test_options_are_what_the_result_depends_on() -> None:
    settings = convert("x", shard_size="4GiB", overwrite=True)
    assert settings.shard_size == 2**32
    assert settings.options == {}
    changed = convert("x", select="ema", rename=["a=b", "c,d=e"], dtype="bf16")
    assert changed.options == {"select": "ema", "rename": ["a=b", "c,d=e"], "dtype": "bf16"}
