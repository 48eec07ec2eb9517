"""The table of options: one for the command line and for Python."""

from pathlib import Path
from types import NoneType
from typing import get_type_hints

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import alternatives
from opensora_cli.settings.flags import FLAGS, Flags, given_flags
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given


def test_keywords_of_python_have_the_types_of_their_settings() -> None:
    """A number is a number or text, a choice is text, and a switch is a bool."""
    hints = get_type_hints(Flags)
    for name, row in ((name, FLAGS[name]) for name in hints):
        section, field = GenerateSettings, None
        for part in row.key.split("."):
            field = section.model_fields[part]
            section = field.annotation
        kinds, typed = set(alternatives(field.annotation)), set(alternatives(hints[name]))
        assert NoneType in typed, name
        assert (bool in kinds) is (typed == {bool, NoneType}), name
        assert str in typed or bool in kinds, name
        assert (float in kinds) is (float in typed), name


def test_options_become_settings() -> None:
    values = {"num_frames": 5, "seed": None, "ref": [], "no_metadata": True, "overwrite": False, "out": Path("a/b.mp4")}
    assert given_flags(values) == {
        "video.num_frames": Given(5, "num_frames"),
        "output.metadata": Given(False, "no_metadata"),
        "output.overwrite": Given(False, "overwrite"),
        "output.path": Given("a/b.mp4", "out"),
    }


@pytest.mark.parametrize("files", ["a.png;b.png", ["a.png", "b.png"], (Path("a.png"), "b.png"), Path("a.png;b.png")])
def test_several_files_are_a_text_or_a_list(files: object) -> None:
    assert given_flags({"ref": files}) == {"condition.references": Given("a.png;b.png", "ref")}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_frame", "did you mean num_frames?"),
        ("num_inference_steps", "did you mean steps?"),
        ("flow_shift", 'did you mean set={"sampling.flow_shift": ...}?'),
        ("qqq", f"there are {', '.join(FLAGS)}"),
    ],
)
def test_what_is_no_option_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not an option of generate$") as caught:
        given_flags({name: 1})
    assert caught.value.hint == hint
