"""Settings of `osora ckpt`: what is understood, what contradicts itself."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.layers import Given, validate
from opensora_cli.settings.tools import ConvertSettings


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
