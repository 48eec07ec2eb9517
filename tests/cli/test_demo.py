"""The demo model that comes with osora, as a newcomer meets it."""

import importlib.resources
import json
from pathlib import Path

import pytest
import torch

from opensora_cli.cli.app import main
from opensora_cli.media.read import read_picture, read_video

MOST_BYTES = 40_000_000
PROMPT = "raining, sea with a zeppelin"


@pytest.mark.slow
def test_the_video_has_the_size_that_it_promises_and_shows_a_rainy_sea(tmp_path):
    out = tmp_path / "sea.mp4"
    assert main(["generate", PROMPT, "--out", str(out), "--model", "demo"]) == 0
    frames_THWC = read_video(out).frames_THWC.float()
    assert frames_THWC.shape == (33, 128, 128, 3)
    sky, water = frames_THWC[:, 8:48].mean(dim=(0, 1, 2)), frames_THWC[:, 88:].mean(dim=(0, 1, 2))
    # Water is bluer than it is red, at any time of day, and darker than the sky above it unless it is night.
    assert water[2] > water[0] + 15
    assert sky.sum() > 0.5 * water.sum()
    # It rains: the upper half, where nothing else moves, changes from frame to frame.
    assert torch.diff(frames_THWC[:, :48], dim=0).abs().mean() > 2


@pytest.mark.slow
def test_turbo_is_as_sharp_as_the_guided_video(tmp_path, capsys):
    few = ["--steps", "4", "--set", "sampling.guidance_scale=1"]
    detail, evaluations = {}, {}
    for name, options in {"usual": [], "turbo": ["--turbo"], "few": few}.items():
        out = tmp_path / f"{name}.mp4"
        prompt = "snowing, city, day, a blue car moving right"
        assert main(["generate", prompt, "--out", str(out), "--model", "demo", "--json", *options]) == 0
        frames_THWC = read_video(out).frames_THWC.float()
        detail[name] = sum(float(frames_THWC.diff(dim=dim).abs().mean()) for dim in (1, 2))
        evaluations[name] = json.loads(capsys.readouterr().out)["model_evaluations"]
    assert evaluations == {"usual": 50, "turbo": 4, "few": 4}
    assert detail["turbo"] > 0.9 * detail["usual"] > detail["few"]


def test_is_small_enough_to_be_embedded():
    folder = Path(str(importlib.resources.files("opensora_cli") / "assets" / "demo"))

    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= MOST_BYTES


@pytest.mark.slow
def test_a_picture_is_made_first_and_is_the_first_frame(tmp_path, osora):
    out = tmp_path / "boat.mp4"
    small = ["--model", "demo", "--device", "cpu", "--num-frames", "5", "--steps", "8", "--out", str(out)]
    command = ["generate", "a red boat on the sea", *small, "--t2i2v", "--save-picture", "--json"]
    plan = json.loads(osora(*command, "--dry-run").out)
    picture, video = plan["jobs"]
    assert (video["condition_mode"], picture["num_frames"]) == ("i2v_head", 1)
    assert plan["peak_bytes"] >= max(stage["total_bytes"] for stage in picture["stages"])
    [made] = json.loads(osora(*command).out)["outputs"]
    assert made["picture_file"] == str(tmp_path / "boat.picture.png")
    picture_HWC, first_HWC = read_picture(tmp_path / "boat.picture.png"), read_video(out).frames_THWC[0]
    assert (picture_HWC.float() - first_HWC.float()).square().mean().sqrt() < 25
    assert made["given_frames_psnr_db"] > 20
