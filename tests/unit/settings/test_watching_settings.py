"""Settings of watching, validation and samples: what is refused, and what follows from the data."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from tiny_training import mmdit_settings

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.explain import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

OUTPUT = Path("run")
TABLE = {"data.table": "clips.csv", "data.buckets": {"256px": {13: [1.0, 2]}}}
SHOWN = {"samples.every": 2, "samples.prompts": ("rain",)}
SIZE = {"samples.num_frames": 13, "samples.height": 32, "samples.width": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"watching.profile_steps": (3, 2)}, "watching.profile_steps=3,2 must be two steps of the run"),
        ({"watching.profile_steps": (3, 5)}, "the earlier one first: 1 to 4"),
        ({"watching.profile_steps": "3"}, "watching.profile_steps"),
        ({**TABLE, "validation.every": 2, "validation.table": "clips.csv"}, "must be another table than data.table"),
        ({**TABLE, **SHOWN, "samples.num_frames": 13}, "give samples.num_frames, samples.height and samples.width"),
        ({**SHOWN, **SIZE, "samples.num_frames": 15}, "samples.num_frames=15 does not suit vae.kind: use 13"),
        ({**SHOWN, **SIZE, "samples.height": 36}, "height=36 must be a multiple of 8: use 40"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        mmdit_settings(OUTPUT).replace(changes)


def test_from_the_command_line() -> None:
    def load(recipe: str, **overrides: str) -> TrainSettings:
        given = {key.replace("__", "."): Given(value, "--set") for key, value in overrides.items()}
        return load_train_settings(config=Path(recipe), overrides=given, environment={})

    settings = load("demo_lora", watching__profile_steps="10,12", samples__every="100", samples__prompts="[rain, snow]")
    assert settings.watching.profile_steps == (10, 12)
    assert settings.samples.prompts == ("rain", "snow")
    for text, prompts in (("raining, sea", ("raining, sea",)), ('["raining, sea", snow]', ("raining, sea", "snow"))):
        assert load("demo_lora", samples__every="100", samples__prompts=text).samples.prompts == prompts
    with pytest.raises(RequestError, match=r"samples\.every=1 needs samples.prompts"):
        load("demo_lora", samples__every="1", samples__prompts=" ")
    with pytest.raises(RequestError, match=r"samples\.prompts=.* must be a list"):
        load("demo_lora", samples__prompts='["rain')
    with pytest.raises(RequestError, match=r"samples.every=100 .* has no effect with target=vae"):
        load("vae_hunyuan", samples__every="100")
