"""The table of options: one for the command line and for Python."""

import inspect
from pathlib import Path

import pytest
import typer

from opensora_cli.cli.app import app
from opensora_cli.cli.generate import generate
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.explain import Given
from opensora_cli.settings.flags import FLAGS, given_flags, option_of
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import all_keys

NO_SETTINGS = {"prompt", "prompt_text", "json_", "quiet", "dry_run", "on", "list_presets"}
OF_ROWS = {"prompts", "shard"}
OF_FILES = {"config", "set_", "from_"}
OF_SEVERAL_SETTINGS = {"explore", "explore_steps"}


def test_every_option_of_generate_is_in_the_table() -> None:
    in_no_table = NO_SETTINGS | OF_FILES | OF_ROWS | OF_SEVERAL_SETTINGS
    assert set(inspect.signature(generate).parameters) == {*FLAGS, *in_no_table}
    command = typer.main.get_command(app).commands["generate"]
    assert {option_of(name) for name in FLAGS} <= {option for parameter in command.params for option in parameter.opts}


def test_each_names_a_setting_of_its_own() -> None:
    keys = [flag.key for flag in FLAGS.values()]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= set(all_keys(GenerateSettings))


def test_options_become_settings() -> None:
    values = {"num_frames": 5, "seed": None, "ref": [], "no_metadata": True, "overwrite": False, "out": Path("a/b.mp4")}
    assert given_flags(values, called=option_of) == {
        "video.num_frames": Given(5, "--num-frames"),
        "output.metadata": Given(False, "--no-metadata"),
        "output.overwrite": Given(False, "--overwrite"),
        "output.path": Given("a/b.mp4", "--out"),
    }


@pytest.mark.parametrize("files", ["a.png;b.png", ["a.png", "b.png"], (Path("a.png"), "b.png"), Path("a.png;b.png")])
def test_several_files_are_a_text_or_a_list(files: object) -> None:
    assert given_flags({"ref": files}) == {"condition.references": Given("a.png;b.png", "ref")}


@pytest.mark.parametrize("files", ["", " ;", ["a.png", ""]])
def test_an_empty_file_is_refused(files: object) -> None:
    with pytest.raises(RequestError, match=r"^ref is empty: name a picture or a video, or drop ref$"):
        given_flags({"ref": files})


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
