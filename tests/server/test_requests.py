import shlex

import pytest
from served import turbo_weights

from opensora_cli.cli.app import main
from opensora_cli.core.section import all_keys
from opensora_cli.server.requests import _ALLOWED, InvalidField, command_of, read_request, remixed
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given


def read(tmp_path, values, **options):
    return read_request({"prompt": "sea", **values}, model="demo", base={}, folder=tmp_path, **options)


def test_clients_may_choose_settings_that_exist():
    assert {*all_keys(GenerateSettings), *GenerateSettings.model_fields} >= _ALLOWED


def test_fields_become_settings(tmp_path):
    fields = {"seconds": "1", "size": "96x128", "seed": 7, "settings": {"steps": 4, "sampling.guidance_scale": 5}}
    settings, answered = read(tmp_path, fields)
    assert (settings.video.num_frames, settings.video.width, settings.video.height) == (13, 96, 128)
    assert (settings.sampling.seed, settings.sampling.num_inference_steps, settings.sampling.guidance_scale) == (
        7,
        4,
        5,
    )
    assert settings.output.path == str(tmp_path / "video.mp4")
    assert answered["seconds"] == "1.08333"
    assert answered["settings"] == {"steps": 4, "sampling.guidance_scale": 5, "num_frames": 13}


def test_an_extended_video_is_made_again_with_the_same_first_segment(tmp_path):
    settings, first = read(tmp_path, {"settings": {"extend": 1}})
    assert first["num_frames"] > settings.video.num_frames
    assert read(tmp_path, {"settings": first["settings"]})[1] == first
    assert " --num-frames 33 " in command_of(first) + " "


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        ({"size": "96x128"}, {"settings": {"res": "768px"}}, "768px"),
        ({"settings": {"video.width": 96, "video.height": 128}}, {"settings": {"aspect_ratio": "1:1"}}, "256px 1:1"),
        ({"settings": {"width": 96, "height": 128}}, {"size": "64x64"}, "64x64"),
        ({"settings": {"video.width": 96, "height": 128}}, {"settings": {"width": 64}}, "64x128"),
        ({"settings": {"res": "768px"}}, {"size": "64x64"}, "64x64"),
        ({"settings": {"aspect_ratio": "1:1"}}, {"settings": {"res": "768px"}}, "768px 1:1"),
    ],
)
def test_the_size_of_a_remix_replaces_that_of_the_first_video(first, second, size, tmp_path):
    named = {"model": "open-sora-v2", "base": {}, "folder": tmp_path}
    _, before = read_request({"prompt": "sea", **first}, **named)
    settings, after = read_request(remixed(before, second), **named)
    assert f"{after['size']} {settings.video.aspect_ratio}".startswith(size)


def test_a_remix_replaces_settings_by_any_of_their_names(tmp_path):
    _, before = read(tmp_path, {"seed": 7, "settings": {"steps": 3, "sampling.guidance_scale": 5}})
    new = {"seconds": "1", "settings": {"sampling.num_inference_steps": 4, "guidance-scale": 6, "sampling.seed": 8}}
    settings, _ = read(tmp_path, remixed(before, new))
    sampling = settings.sampling
    assert (sampling.num_inference_steps, sampling.guidance_scale, sampling.seed) == (4, 6, 8)
    assert settings.video.num_frames == 13
    assert read(tmp_path, remixed(before, {}))[1] == before


@pytest.mark.parametrize(
    ("server", "values", "size"),
    [
        ({"video.width": 96, "video.height": 128}, {}, "96x128"),
        ({"video.width": 96, "video.height": 128}, {"settings": {"res": "768px"}}, "768px"),
        ({"video.width": 96, "video.height": 128}, {"settings": {"aspect_ratio": "1:1"}}, "256px"),
        ({"video.width": 96, "video.height": 128}, {"size": "64x64"}, "64x64"),
        ({"video.width": 96, "video.height": 128}, {"settings": {"width": 64}}, "64x128"),
        ({"video.resolution": "768px", "video.aspect_ratio": "1:1"}, {"size": "64x64"}, "64x64"),
        ({"video.resolution": "768px", "condition.fit": "pad"}, {}, "768px"),
    ],
)
def test_the_choice_of_a_request_wins_over_that_of_the_server(server, values, size, tmp_path):
    base = {key: Given(value, "--set") for key, value in server.items()}
    _, fields = read_request({"prompt": "sea", **values}, model="open-sora-v2", base=base, folder=tmp_path)
    assert fields["size"] == size


def test_seconds_are_counted_at_the_rate_of_the_request_or_the_server(tmp_path):
    base = {"video.fps": Given("12", "--set")}
    for settings, frames in (({}, 25), ({"fps": 6}, 13), ({"video.fps": 6}, 13)):
        values = {"prompt": "sea", "seconds": "2", "settings": settings}
        assert read_request(values, model="demo", base=base, folder=tmp_path)[1]["num_frames"] == frames


@pytest.mark.parametrize(
    ("server", "settings", "name"),
    [
        ({}, {"num_frames": 1}, "video.png"),
        ({"video.num_frames": 1}, {}, "video.png"),
        ({"video.num_frames": 1}, {"video.num_frames": 5}, "video.mp4"),
        ({"output.format": "gif"}, {}, "video.gif"),
    ],
)
def test_the_file_has_the_format_of_the_video(server, settings, name, tmp_path):
    base = {key: Given(value, "--set") for key, value in server.items()}
    values = {"prompt": "sea", "settings": settings}
    found, _ = read_request(values, model="demo", base=base, folder=tmp_path)
    assert found.output.path == str(tmp_path / name)


def test_a_remix_and_the_command_have_the_settings_of_the_server(tmp_path):
    base = {"sampling.num_inference_steps": "4", "video.resolution": "64px", "memory.offload": "none"}
    base = {key: Given(value, "--set") for key, value in base.items()}
    values = {"prompt": "sea", "size": "96x128", "seed": 7}
    settings, fields = read_request(values, model="demo", base=base, folder=tmp_path)
    assert fields["settings"] == {"num_frames": 33, "sampling.num_inference_steps": "4"}
    assert "--set sampling.num_inference_steps=4" in command_of(fields)
    again, _ = read(tmp_path, remixed(fields, {}))
    assert (again.sampling, again.video.width) == (settings.sampling, 96)
    assert read(tmp_path, remixed(fields, {"settings": {"steps": 5}}))[0].sampling.num_inference_steps == 5


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"prompt": " "}, "prompt", "is empty"),
        ({"prompt": "x" * 5000}, "prompt", "5000 characters"),
        ({"prompt": ["x"]}, "prompt", "must be text"),
        ({"seconds": "1000"}, "seconds", "at most 2.75"),
        ({"seconds": "soon"}, "seconds", "is no number"),
        ({"seconds": "nan"}, "seconds", "must be above 0"),
        ({"seconds": "1", "settings": {"fps": [1]}}, "seconds", "fps="),
        ({"seconds": "1", "settings": {"fps": "0"}}, "seconds", "fps=0"),
        ({"size": "big"}, "size", "WIDTHxHEIGHT"),
        ({"model": "sora-2"}, "model", "is not loaded"),
        ({"output": "x"}, "output", "is not a field"),
        ({"settings": ["steps"]}, "settings", "must be an object"),
        ({"settings": {"config": "/etc/passwd"}}, "settings", "no preset of demo: demo"),
        ({"settings": {"out": "/etc/passwd"}}, "settings", "chosen by the server"),
        ({"settings": {"condition.references": "x.png"}}, "settings", "chosen by the server"),
        ({"settings": {"refine": True}}, "settings", "chosen by the server"),
        ({"settings": {"num_samples": 3}}, "settings", "chosen by the server"),
        ({"settings": {"memory.offload": "blocks"}}, "settings", "chosen by the server"),
    ],
)
def test_wrong_fields_are_named(values, field, message, tmp_path):
    with pytest.raises(InvalidField, match=message) as caught:
        read(tmp_path, values)
    assert caught.value.field == field


def test_a_preset_of_the_model_is_taken(tmp_path):
    values = {"prompt": "sea", "settings": {"config": "768px", "num_frames": 5}}
    settings, fields = read_request(values, model="open-sora-v2", base={}, folder=tmp_path)
    assert (settings.video.resolution, settings.num_frames) == ("768px", 5)
    assert "--config 768px" in command_of(fields)


def test_turbo_takes_the_steps_of_the_adapter(tmp_path):
    base = {"runtime.weights": Given(str(turbo_weights(tmp_path / "weights")), "--set")}
    settings, fields = read_request(
        {"prompt": "sea", "settings": {"turbo": True}}, model="demo", base=base, folder=tmp_path
    )
    assert (settings.sampling.turbo, settings.sampling.num_inference_steps) == (True, 3)
    assert "--turbo" in shlex.split(command_of(fields))


def test_the_command_makes_the_same_video(tmp_path, monkeypatch):
    settings = {"steps": 2, "num-frames": 5, "sampling.guidance_scale": 5}
    values = {"prompt": "it's raining", "size": "96x128", "seed": 7, "settings": settings}
    _, fields = read(tmp_path, values)
    command = command_of(fields)
    assert command.startswith("osora generate 'it'\"'\"'s raining' --model demo --seed 7")
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[1:], "--dry-run", "--quiet"]) == 0
