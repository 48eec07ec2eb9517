"""A picture that is made first: what asks for it, and that it is given as its file would be."""

import json

import pytest
import torch
from tiny_world import flux_settings, names, picture_first_settings, released_settings

from opensora_cli.core.device import GIB
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.generate import decode, pipeline
from opensora_cli.engine.generate.chain import make_chain
from opensora_cli.engine.generate.dry_run import PlanDocument
from opensora_cli.engine.generate.plan import PICTURE
from opensora_cli.engine.generate.request import picture_settings, refuse_early, resolve, size_of_picture, with_mode
from opensora_cli.engine.generate.run import generate
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, load_preset, read_sidecar

SAVED = {"picture__save": "true", "sampling__num_samples": "2"}
H200 = Hardware(torch.device("cuda", 0), "a large GPU", torch.bfloat16, 139 * GIB, 141 * GIB)


@pytest.mark.parametrize("name", ["t2i2v_256px", "t2i2v_768px"])
def test_the_picture_of_a_preset_is_asked_for_as_one_that_is_made_alone(name):
    video, alone = load_preset(name, prompt="sea"), load_preset("flux1_dev", prompt="sea")
    picture = picture_settings(video.replace({"loras": ("style",), "sampling.seed": 7}))
    sections = "prompt", "model", "vae", "text", "files", "prompt_suffix", "loras"
    assert all(getattr(picture, section) == getattr(alone, section) for section in sections)
    assert picture.sampling == video.sampling.replace({"seed": 7})
    assert (picture.video.height, picture.video.width, picture.video.num_frames) == (576, 1024, 1)
    assert not picture.picture.first
    assert picture_settings(video.replace({"picture.first": False})) is None
    assert picture_settings(video.replace({"from_latents": "a.safetensors"})) is None


@pytest.mark.parametrize(
    ("changes", "size", "note"),
    [
        ({"video.aspect_ratio": "9:16"}, (1024, 576), None),
        (
            {"video.aspect_ratio": "8:5", "picture.resolution": "256px"},
            (208, 320),
            "pictures of 256px have no size of 8:5: the nearest is 320x208, that of 3:2",
        ),
        ({"video.height": 288, "video.width": 512}, (576, 1024), None),
        ({"video.height": 256, "video.width": 512}, (544, 1088), None),
        (
            {"video.height": 240, "video.width": 416},
            (576, 1024),
            "pictures of 768px have no size of 416x240: the nearest is 1024x576, that of 16:9",
        ),
    ],
)
def test_its_shape_is_the_nearest_to_the_videos(changes, size, note):
    settings = load_preset("t2i2v_256px", prompt="sea").replace(changes)
    assert size_of_picture(settings, settings.picture.resolution) == (*size, note)


def test_what_cannot_be_its_size_is_refused():
    with pytest.raises(RequestError, match=r"the picture: model.in_channels=32 must be"):
        picture_settings(load_preset("t2i2v_256px", prompt="sea").replace({"picture.model.in_channels": 32}))


def test_one_plan_has_the_memory_of_both(tmp_path):
    settings = load_preset("t2i2v_256px", prompt="sea")
    settings = with_mode(settings.replace({"runtime.weights": str(tmp_path), "output.path": str(tmp_path)}), None)
    chain = make_chain(settings, hardware=H200, tries_device=False)
    assert chain.video.mode.name == "i2v_head"
    weights = {stage.name: stage.weight_bytes for stage in chain.stages}
    assert [*weights] == [f"picture {name}" for name in ("text", "denoise", "decode")] + [
        *("text", "encode", "denoise", "decode")
    ]
    assert (weights["picture denoise"], weights["picture decode"]) == (2 * 11_901_408_320, 2 * 83_819_683)
    assert chain.peak_bytes == max(stage.total_bytes for stage in chain.stages)
    document = PlanDocument.of(chain)
    assert [job.role for job in document.jobs] == ["picture", "video"]
    assert document.jobs[0].missing_weights[:2] == ("flux1-dev.safetensors", "flux1-dev-ae.safetensors")
    assert "missing   flux1-dev.safetensors" in document.lines()
    assert "missing   Open_Sora_v2.safetensors" in document.lines()
    assert "first     a picture of 1024x576, by flux1-dev in 50 steps" in document.lines()
    assert document.to_json()["jobs"][0]["model"] == "flux1-dev"


@pytest.mark.usefixtures("without_estimates")
def test_missing_weights_of_the_picture_are_named(world, tmp_path, reporter):
    settings = picture_first_settings(world, tmp_path, picture__files__transformer="gone.safetensors")
    with pytest.raises(CheckpointError, match=r"of the flux1-dev model are missing: gone.safetensors") as caught:
        generate(settings)
    download = f"osora ckpt download flux1-dev --to {world.released}"
    assert caught.value.hint == download
    overrides = {"prompt": "sea", "picture.first": True, "runtime.weights": str(tmp_path), "model.name": "open-sora-v2"}
    request = GenerateRequest(overrides={key: Given(value, "the test") for key, value in overrides.items()})
    with pytest.raises(CheckpointError, match="of the flux1-dev model are missing"):
        refuse_early(resolve(request, reporter=reporter), dry_run=False)


@pytest.mark.usefixtures("without_estimates")
class TestMade:
    def test_the_video_is_that_of_its_picture(self, world, tmp_path, reporter):
        settings = picture_first_settings(world, tmp_path / "both", **SAVED)
        result = generate(settings, reporter=reporter)
        stem = "raining-sea_seed{}{}"
        endings = ".mp4", ".mp4.json", ".picture.png", ".picture.png.json"
        assert names(tmp_path / "both") == [stem.format(seed, end) for seed in (42, 43) for end in endings]
        # The text encoders of both are loaded once, and the models of the video stay from one to the next.
        text, picture = ["load", "text"], ["picture text", "picture load", "picture denoise", "picture load"]
        decoded, video = ["picture decode"] * 2, ["load", "encode", "encode", "load"]
        assert reporter.stages == [*text, *picture, *decoded, *video, *["denoise", "decode", "save"] * 2]
        size = {"video__height": "16", "video__width": "64"}
        alone = generate(flux_settings(world, tmp_path / "alone", sampling__num_samples="2", **size))
        for seed, video, made in zip((42, 43), result.videos, alone.videos, strict=True):
            assert video.picture_file == tmp_path / "both" / stem.format(seed, ".picture.png")
            assert video.picture_file.read_bytes() == made.path.read_bytes()
            given = {"condition__references": str(made.path), "condition__mode": "i2v_head", "sampling__seed": seed}
            [by_hand] = generate(released_settings(world, tmp_path / f"by_hand{seed}", **given)).videos
            assert by_hand.path.read_bytes() == video.path.read_bytes()
            assert by_hand.given_frames_psnr_db == video.given_frames_psnr_db
        sidecar = json.loads(result.videos[0].sidecar.read_text())
        assert sidecar["picture_file"] == stem.format(42, ".picture.png")
        assert {"picture denoise", "denoise", "picture decode"} <= sidecar["timings_s"].keys()

    @pytest.mark.slow
    def test_it_is_made_again_from_the_sidecars(self, world, tmp_path, reporter):
        settings = picture_first_settings(world, tmp_path / "first", picture__save="true")
        [video] = generate(settings).videos
        assert generate(settings).videos[0].made_before
        # The picture of a video that is gone is no obstacle.
        bytes_before = video.path.read_bytes()
        video.path.unlink()
        [again] = generate(settings, reporter=reporter).videos
        assert again.path.read_bytes() == bytes_before
        for sidecar in (video.sidecar, video.picture_file.with_name(f"{video.picture_file.name}.json")):
            overrides = {"output.path": Given(str(tmp_path / "again"), "--out")}
            overrides["runtime.weights"] = Given(settings.runtime.weights, "--weights")
            request = GenerateRequest(saved=read_sidecar(sidecar), overrides=overrides)
            made = resolve(request, reporter=reporter)
            [same] = generate(made).videos
            original = video.path if sidecar == video.sidecar else video.picture_file
            assert same.path.read_bytes() == original.read_bytes()

    def test_another_file_of_its_name_is_kept(self, world, tmp_path, reporter):
        settings = picture_first_settings(world, tmp_path / "boat.mp4", picture__save="true")
        (tmp_path / "boat.picture.png").write_bytes(b"mine")
        with pytest.raises(OutputError, match=r"boat.picture.png exists already"):
            generate(settings, reporter=reporter)
        assert not reporter.stages
        [video] = generate(settings.replace({"output.overwrite": True})).videos
        assert video.picture_file.read_bytes() != b"mine"

    @pytest.mark.slow
    def test_saved_latents_are_decoded_without_it(self, world, tmp_path, monkeypatch, reporter):
        settings = picture_first_settings(world, tmp_path / "made")
        whole = generate(settings).videos[0].path.read_bytes()

        def interrupted(samples, *given, **options):
            if samples[0].chain.find(PICTURE) is not None:
                raise KeyboardInterrupt
            return decode.decode_samples(samples, *given, **options)

        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "decode_samples", interrupted)
            ended = settings.replace({"output.path": str(tmp_path)})
            with pytest.raises(KeyboardInterrupt):
                generate(ended)
        latents = tmp_path / "raining-sea_seed42.latents.safetensors"
        overrides = {"from_latents": Given(str(latents), "x"), "output.path": Given(str(tmp_path / "decoded"), "x")}
        overrides["runtime.weights"] = Given(settings.runtime.weights, "--weights")
        decoded = resolve(GenerateRequest(overrides=overrides), reporter=reporter)
        [video] = generate(decoded).videos
        assert (video.path.read_bytes(), video.picture_file) == (whole, None)
        [video] = generate(ended, reporter=reporter).videos
        assert f"continuing from latents of the same request: {latents}" in reporter.notes
        assert (video.path.read_bytes(), reporter.stages) == (whole, ["load", "decode", "save"])
