"""What a prompt's settings mean."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.load import load_preset

RELEASED = load_preset("256px", prompt="a boat")


def test_an_automatic_motion_score_is_asked_for():
    settings = RELEASED.replace({"prompt_suffix.motion_score": "auto"})
    assert (settings.refine.motion_score, settings.prompt_suffix.motion_score) == (True, 4)
    assert (settings.refine.is_on, settings.refine.prompt, RELEASED.refine.is_on) == (True, False, False)
    # Read back, the settings are the same.
    assert type(settings).model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_suffix.motion_score": "fast"},
        {"refine.timeout_s": 0},
        {"refine.tries": 0},
        {"refine.original": "half \ud800"},
        {"refine": "auto", "prompt_suffix.motion_score": "auto"},
    ],
)
def test_values_that_mean_nothing(changes):
    with pytest.raises((ValidationError, UnicodeEncodeError)):
        RELEASED.replace(changes)
