"""Whole generations with a shrunken model: every mode and preset, stages, prompts and requests."""

import json
import socket

import pytest
import torch
from tiny_world import RecordingReporter, dc_ae_settings, demo_settings, flux_settings, names, released_settings

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.generate import denoise, models, references
from opensora_cli.engine.generate import request as requests
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.request import resolve
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_picture, read_video
from opensora_cli.media.results import read_tags
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, generate_request, read_sidecar

pytestmark = pytest.mark.usefixtures("without_estimates")

MODES = list(CONDITION_MODES)


def references_for(world, mode):
    row = CONDITION_MODES[mode]
    if not row.needs_reference:
        return ""
    if row.max_references == 2:
        return f"{world.picture};{world.other_picture}"
    return str(world.picture if row.gives_pictures else world.video)


@pytest.mark.parametrize(
    "mode",
    [mode if mode == "v2v_tail_easy" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES],
)
def test_every_mode_of_the_released_model(world, tmp_path, monkeypatch, reporter, mode):
    """With its own lengths: 8 and 16 latent frames given, and one more."""
    if not CONDITION_MODES[mode].gives_pictures:
        monkeypatch.setattr(denoise, "restore_references", lambda *_: pytest.fail("only pictures are put back"))
    settings = released_settings(
        world,
        tmp_path,
        condition__mode=mode,
        condition__references=references_for(world, mode),
        video__num_frames="73",
    )
    result = generate(settings, reporter=reporter)
    clip = read_video(result.videos[0].path)
    assert tuple(clip.frames_THWC.shape) == (73, 16, 32, 3)
    assert clip.fps == 24
    psnr = result.videos[0].given_frames_psnr_db
    assert (psnr is None) == (mode == "t2v")
    assert psnr is None or 3 < psnr < 99
    is_low = psnr is not None and psnr < references.LOW_PSNR_DB
    assert [f"came back at {psnr:.1f} dB" in line for line in reporter.warnings] == [True] * is_low
    assert names(tmp_path) == ["raining-sea_seed42.mp4", "raining-sea_seed42.mp4.json"]


GIVEN = {"condition__video_latent_frames": "2", "condition__easy_latent_frames": "3"}


@pytest.mark.parametrize(
    "mode", [mode if mode == "i2v_loop" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_every_mode_of_high_compression(world, tmp_path, reporter, mode):
    given = references_for(world, mode)
    settings = dc_ae_settings(world, tmp_path, condition__mode=mode, condition__references=given, **GIVEN)
    [video] = generate(settings, reporter=reporter).videos
    assert tuple(read_video(video.path).frames_THWC.shape) == (24, 16, 32, 3)
    assert (video.given_frames_psnr_db is None) == (mode == "t2v")
    assert reporter.advanced["decode"] == reporter.totals["decode"] > 1


def test_a_clip_of_any_length_is_cut_out_of_whole_latent_frames(world, tmp_path):
    settings = dc_ae_settings(world, tmp_path, output__format="png")
    [whole] = generate(settings).videos
    [cut] = generate(settings.replace({"video.num_frames": 21, "video.causal_lengths": True})).videos
    assert names(cut.path) == names(whole.path)[:21]
    assert all((cut.path / name).read_bytes() == (whole.path / name).read_bytes() for name in names(cut.path))


def test_pictures_alone(world, tmp_path, reporter):
    settings = flux_settings(world, tmp_path / "pictures", sampling__num_samples="2")
    result = generate(settings, reporter=reporter)
    assert result.model_evaluations == 2 * 2  # steps, without branches
    first, second = (read_picture(video.path) for video in result.videos)
    assert tuple(first.shape) == (24, 40, 3)
    assert not torch.equal(first, second)
    assert names(tmp_path / "pictures") == [
        f"raining-sea_seed{seed}.png{ending}" for seed in (42, 43) for ending in ("", ".json")
    ]
    saved = read_sidecar(result.videos[1].sidecar)
    overrides = {"output.path": Given(str(tmp_path / "again.png"), "--out")}
    overrides["runtime.weights"] = Given(result.settings.runtime.weights, "--weights")
    again = resolve(GenerateRequest(saved=saved, overrides=overrides), reporter=reporter)
    [video] = generate(again).videos
    assert video.path.read_bytes() == result.videos[1].path.read_bytes()


def test_stages_and_their_progress(world, tmp_path, reporter):
    settings = released_settings(
        world, tmp_path, condition__references=str(world.picture), sampling__num_inference_steps="12"
    )
    result = generate(settings, reporter=reporter)
    shown = ["load", "text", "load", "encode", "load", "denoise", "decode", "save"]
    assert reporter.stages == shown
    assert reporter.notes[0] == "condition: i2v_head, which suits the reference given"
    assert reporter.totals["denoise"] == result.model_evaluations
    for stage in ("denoise", "decode"):
        assert reporter.advanced[stage] == reporter.totals[stage]
    assert set(result.timings_s) == set(shown)
    assert result.peak_resident_gib > 0


def test_no_request_is_made(world, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a request was made"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a request was made"))
    assert generate(released_settings(world, tmp_path)).videos[0].path.exists()


def test_samples_are_what_their_seeds_make_alone(world, tmp_path):
    several = generate(released_settings(world, tmp_path / "several", sampling__seed="5", sampling__num_samples="3"))
    assert [video.path.name for video in several.videos] == [f"raining-sea_seed{seed}.mp4" for seed in (5, 6, 7)]
    alone = generate(released_settings(world, tmp_path / "alone", sampling__seed="7"))
    assert several.videos[2].path.read_bytes() == alone.videos[0].path.read_bytes()
    assert several.videos[0].path.read_bytes() != several.videos[1].path.read_bytes()
    document = json.loads(json.dumps(several.to_json(), allow_nan=False))
    assert [output["seed"] for output in document["outputs"]] == [5, 6, 7]
    assert (document["schema"], document["model_evaluations"]) == ("osora.generate/3", 12)
    assert document["settings"]["prompt"] == "raining, sea"


class TestPrompts:
    def test_five_thousand_characters(self, world, tmp_path, reporter):
        prompt = "a boat on the sea at night, " * 180
        assert len(prompt) > 5000
        result = generate(released_settings(world, tmp_path, prompt=prompt), reporter=reporter)
        assert reporter.warnings == ["the prompt is too long and is cut: T5 after 16 tokens, CLIP after 16 tokens"]
        assert len(result.videos[0].path.name) < 255
        assert json.loads(result.videos[0].sidecar.read_text())["prompt"] == prompt

    def test_any_text(self, world, tmp_path):
        prompt = '../../etc/passwd 夜の海に赤い船 🚢 say "sea", it\'s\n\tnight'
        result = generate(released_settings(world, tmp_path / "out", prompt=prompt, sampling__num_inference_steps="1"))
        assert result.videos[0].path.parent == tmp_path / "out"
        tags = read_tags(result.videos[0].path)
        assert (tags["prompt"], tags["seed"]) == (prompt, "42")

    def test_a_dry_run_warns_as_the_run_does(self, world, tmp_path, reporter, monkeypatch):
        monkeypatch.setattr(models, "load_t5", lambda *_, **__: pytest.fail("nothing may be loaded"))
        plan_generation(demo_settings(world, tmp_path, prompt="a dragon, tea, Reining, Zebra"), reporter=reporter)
        # Its words are not listed.
        plan_generation(released_settings(world, tmp_path, prompt="a dragon " * 9), reporter=reporter)
        assert reporter.warnings == [
            'the demo model does not know "dragon", "tea", "Reining", "Zebra"; '
            "it knows places: sea, desert; weathers: raining",
            "the prompt is too long and is cut: T5 after 16 tokens, CLIP after 16 tokens",
        ]
        nowhere = released_settings(world, tmp_path, prompt="a dragon " * 9, runtime__weights=str(tmp_path))
        plan_generation(nowhere, reporter=reporter)
        assert len(reporter.warnings) == 3
        assert "weights of the open-sora-v2 model are missing" in reporter.warnings[2]


def test_a_seamless_loop_leaves_out_its_last_frame(world, tmp_path, reporter):
    loop = {"condition__mode": "i2v_loop", "condition__references": str(world.picture)}
    whole = generate(demo_settings(world, tmp_path / "whole", **loop)).videos[0]
    settings = demo_settings(world, tmp_path / "loop", **loop, condition__seamless="true")
    [video] = generate(settings, reporter=reporter).videos
    assert f"seamless: the last frame, which repeats the first, is dropped: {settings.video.num_frames - 1} frames" in (
        reporter.notes
    )
    assert json.loads(video.sidecar.read_text())["num_frames"] == settings.video.num_frames - 1
    assert len(read_video(video.path).frames_THWC) == settings.video.num_frames - 1
    # The last given frame is compared before it is left out.
    assert video.given_frames_psnr_db == whole.given_frames_psnr_db
    with pytest.raises(RequestError, match=r"condition\.seamless=true has no effect with condition\.mode=i2v_head"):
        generate(demo_settings(world, tmp_path, condition__references=str(world.picture), condition__seamless="true"))


def test_a_request_that_no_model_allows_is_refused_before_torch_chooses_one(monkeypatch):
    def choose_model(*_, loading, **__):
        with loading():
            raise AssertionError("torch was asked")

    monkeypatch.setattr(requests, "choose_model", choose_model)
    typed = {"prompt": Given("sea", "PROMPT")}
    wrong = generate_request({**typed, "runtime.device": Given("gpu", "--device")}, environment={})
    with pytest.raises(RequestError, match=r"runtime\.device=gpu must be .* \(from --device\)"):
        requests.resolve(wrong, reporter=RecordingReporter())
    large = generate_request({**typed, "video.resolution": Given("768px", "--res")}, environment={})
    with pytest.raises(AssertionError, match="torch was asked"):
        requests.resolve(large, reporter=RecordingReporter())
