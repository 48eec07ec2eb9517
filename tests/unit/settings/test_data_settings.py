"""Which clips a run may ask for."""

import pytest
from pydantic import ValidationError

from opensora_cli.core.conditions import LatentGrid
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.explain import explain

HUNYUAN = LatentGrid(latent_channels=16, time_compression_ratio=4, spatial_compression_ratio=8, is_causal=True)
DC_AE = LatentGrid(latent_channels=128, time_compression_ratio=4, spatial_compression_ratio=32, is_causal=False)


def problems(**values: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        DataSettings.model_validate(values)
    return explain(caught.value)


@pytest.mark.parametrize(
    "written",
    [
        "{256px: {1: [1.0, 8], 33: [0.5, 2]}}",
        {"256px": {"1": ["1.0", "8"], "33": ["0.5", "2"]}},
        {"256px": {1: (1.0, 8), 33: (0.5, 2)}},
    ],
)
def test_buckets_may_be_text_or_mappings(written: object) -> None:
    buckets = DataSettings.model_validate({"buckets": written}).buckets
    assert buckets == {"256px": {1: (1.0, 8), 33: (0.5, 2)}}
    assert (buckets["256px"][33].probability, buckets["256px"][33].batch_size) == (0.5, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"buckets": {}}, "buckets"),
        ({"buckets": {"256px": {}}}, "buckets.256px={} must have at least 1 item"),
        ({"buckets": {"256px": {1: (0.0, 1)}}}, "data.buckets have probability 0"),
        ({"buckets": "foo"}, "buckets=foo must be resolutions, frames, probabilities and batch sizes"),
        ({"buckets": "{64: {1: [1, 1]}}"}, "buckets.64=64 must be a resolution, as in 256px or 720p"),
        ({"buckets": "{64px: 3}"}, "buckets.64px=3 must be a valid dictionary"),
        ({"buckets": "{64px: {a: [1, 1]}}"}, "buckets.64px.a=a must be a whole number"),
        ({"buckets": "{64px: {17: 1}}"}, "buckets.64px.17=1 must be [probability, batch size]"),
        ({"buckets": "{64px: {17: [1, 0.5]}}"}, "buckets.64px.17=0.5 must be a whole number"),
        ({"buckets": "{256px: ["}, "buckets='{256px: [' must be resolutions"),
        ({"fps_max": 0}, "fps_max=0 must be over 0"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, object], message: str) -> None:
    lines = problems(**values)
    assert any(message in line for line in lines), lines


def test_lengths_that_an_autoencoder_has_not() -> None:
    assert DataSettings(table="a.csv").length_problems(HUNYUAN) == []
    data = DataSettings.model_validate({"table": "a.csv", "buckets": {"256px": {1: (1, 1), 32: (1, 1)}}})
    assert data.length_problems(DC_AE) == []
    assert data.length_problems(HUNYUAN) == ["data.buckets: clips of 32 frames do not suit vae.kind: use 29 frames"]
