"""Whole generations with a shrunken model: every mode and preset, the same bytes twice, what lies beside a result."""

import errno
import hashlib
import json
import math
import os
import shutil
import socket
from pathlib import Path

import killing
import pytest
import torch
from closeness import assert_close
from pydantic import ValidationError
from tiny_world import RELEASED_SIZES, dc_ae_settings, demo_settings, flux_settings, moving_frames, released_settings

from opensora_cli.core import folder_lock
from opensora_cli.core.conditions import CONDITION_MODES, ConditionMode, Length, Position, ReferenceLengths, Source
from opensora_cli.core.exceptions import MediaError, OsoraError, OsoraWarning, OutputError, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import decode, denoise, models, references
from opensora_cli.engine.generate.dry_run import plan_from_request, plan_generation
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.outputs import choose_outputs
from opensora_cli.engine.generate.planning import make_chain, make_plan
from opensora_cli.engine.generate.references import GivenFramesPSNR, Reference, with_mode
from opensora_cli.engine.generate.resolve import resolve_generate_settings
from opensora_cli.engine.generate.run import (
    generate,
    generate_from_request,
)
from opensora_cli.engine.generate.targets import Claims
from opensora_cli.media.read import read_picture, read_video
from opensora_cli.media.tags import read_tags
from opensora_cli.media.write import write_media
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import GenerateRequest, read_sidecar

pytestmark = pytest.mark.usefixtures("without_estimates")

MODES = list(CONDITION_MODES)


def references_for(world, mode):
    row = CONDITION_MODES[mode]
    if not row.needs_reference:
        return ""
    if row.max_references == 2:
        return f"{world.picture};{world.other_picture}"
    return str(world.picture if row.gives_pictures else world.video)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


@pytest.mark.parametrize(
    "mode",
    [
        mode if mode in ("t2v", "i2v_head", "v2v_head_easy") else pytest.param(mode, marks=pytest.mark.slow)
        for mode in MODES
    ],
)
def test_every_mode_of_the_demo(world, tmp_path, mode):
    settings = demo_settings(world, tmp_path, condition__mode=mode, condition__references=references_for(world, mode))
    result = generate(settings)
    assert read_video(result.videos[0].path).frames_THWC.shape[:3] == (17, 64, 64)


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


def test_a_further_mode_is_a_further_row(world, tmp_path, monkeypatch):
    between = ConditionMode("between", Source.VIDEO, Position.BOTH, Length.VIDEO, "both ends are given")
    monkeypatch.setitem(CONDITION_MODES, between.name, between)
    changes = {"condition__mode": "between", "condition__video_latent_frames": "1"}
    settings = demo_settings(world, tmp_path, **changes, condition__references=references_for(world, "between"))
    result = generate(settings)
    assert result.settings.condition.mode == "between"
    assert result.videos[0].given_frames_psnr_db is not None
    with pytest.raises(ValidationError, match=r"condition\.mode=between gives 4 latent frames"):
        settings.replace({"video.num_frames": 13})
    with pytest.raises(ValidationError, match=r"condition\.mode=between needs a reference: give the video"):
        settings.replace({"condition.references": ()})


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
    again, _ = resolve_generate_settings(GenerateRequest(saved=saved, overrides=overrides), reporter=reporter)
    [video] = generate(again).videos
    assert video.path.read_bytes() == result.videos[1].path.read_bytes()
    # What is an input of the model changes the picture, and what is none does not.
    louder = again.replace({"sampling.embedded_guidance": 9, "output.path": str(tmp_path / "louder.png")})
    assert generate(louder).videos[0].path.read_bytes() != video.path.read_bytes()
    other = again.replace({"sampling.guidance_scale": 9, "negative_prompt": "sea"})
    assert generate(other).videos[0].made_before


@pytest.mark.slow
@pytest.mark.parametrize(("resolution", "size"), [("256px", (192, 336)), ("768px", (576, 1024))])
def test_every_released_preset_at_its_size(world, tmp_path, resolution, size):
    settings = released_settings(
        world,
        tmp_path,
        video__height=None,
        video__width=None,
        video__resolution=resolution,
        video__num_frames="1",
        vae__sample_size="256",
        sampling__num_inference_steps="1",
        output__format="png",
    )
    [video] = generate(settings).videos
    assert tuple(read_picture(video.path).shape) == (*size, 3)


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
    assert (document["schema"], document["model_evaluations"]) == ("osora.generate/1", 12)
    assert document["settings"]["prompt"] == "raining, sea"


@pytest.mark.parametrize("mode", [pytest.param("i2v_tail", marks=pytest.mark.slow), "i2v_loop"])
def test_given_latents_are_put_back_in_every_sample(world, tmp_path, monkeypatch, mode):
    given, decoded = [], []
    encode, decode_latents = references.encode_references, decode.decode_latents
    monkeypatch.setattr(references, "encode_references", lambda *a, **k: given.extend(encode(*a, **k)) or given)
    monkeypatch.setattr(
        decode,
        "decode_latents",
        lambda plan, vae, latents, **k: decoded.append(latents) or decode_latents(plan, vae, latents, **k),
    )
    generate(
        released_settings(
            world,
            tmp_path,
            condition__mode=mode,
            condition__references=references_for(world, mode),
            sampling__num_samples="2",
        )
    )
    assert len(decoded) == 2
    for latents in decoded:
        if mode != "i2v_tail":
            torch.testing.assert_close(latents[:, 0], given[0][:, 0], rtol=0, atol=0)
        torch.testing.assert_close(latents[:, -1], given[-1][:, 0], rtol=0, atol=0)
    assert not torch.equal(decoded[0][:, 1], decoded[1][:, 1])


class CountingTransformer:
    """Says zero, and remembers what each branch of a batch was shown."""

    def __init__(self):
        self.calls = []

    def __call__(self, packed_latents, **inputs):
        for row in range(packed_latents.shape[0]):
            self.calls.append({name: None if each is None else each[row % len(each)] for name, each in inputs.items()})
        return torch.zeros_like(packed_latents)


@pytest.mark.parametrize(("mode", "evaluations"), [("t2v", 80), ("i2v_loop", 110)])
def test_evaluations_of_the_presets(world, tmp_path, monkeypatch, reporter, mode, evaluations):
    transformer = CountingTransformer()
    monkeypatch.setattr(models, "load_transformer", lambda plan, **_: transformer)
    settings = released_settings(
        world,
        tmp_path,
        condition__mode=mode,
        condition__references=references_for(world, mode),
        sampling__num_inference_steps="50",
    )
    result = generate(settings, reporter=reporter)
    assert len(transformer.calls) == evaluations
    assert result.model_evaluations == evaluations
    assert reporter.totals["denoise"] == reporter.advanced["denoise"] == evaluations


def test_what_the_branches_are_shown(world, tmp_path, monkeypatch):
    transformer = CountingTransformer()
    embeds = PromptEmbeds(torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[3.0], [4.0]]))
    settings = released_settings(
        world,
        tmp_path,
        condition__mode="i2v_head",
        condition__references=str(world.picture),
        sampling__num_inference_steps="1",
    )
    plan = make_plan(settings)
    reference = torch.full((4, 1, 2, 4), 0.5)
    latents = denoise.sample_latents(plan, transformer, embeds, [reference], seed=0)
    shown = [
        (
            call["prompt_embeds_BLC"].item(),
            call["pooled_prompt_embeds_BV"].item(),
            call["conditioning_BNK"].abs().sum().item() > 0,
            call["embedded_guidance_B"],
        )
        for call in transformer.calls
    ]
    assert shown == [(2.0, 4.0, False, None), (2.0, 4.0, True, None), (1.0, 3.0, True, None)]
    assert transformer.calls[0]["timesteps_B"].item() == 1.0
    assert_close(latents[:, :1], reference)


def test_distilled_model_is_told_its_guidance(world, tmp_path):
    transformer = CountingTransformer()
    embeds = PromptEmbeds(torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[3.0], [4.0]]))
    settings = released_settings(
        world, tmp_path, model__guidance_embed="true", model__cond_embed="false", sampling__embedded_guidance="3.5"
    )
    denoise.sample_latents(make_plan(settings), transformer, embeds, None, seed=0)
    assert len(transformer.calls) == 2
    for call in transformer.calls:
        assert call["embedded_guidance_B"].item() == 3.5
        assert call["conditioning_BNK"] is None
        assert call["prompt_embeds_BLC"].item() == 1.0


def test_sidecar_makes_the_same_file_again(world, tmp_path):
    settings = released_settings(world, tmp_path / "a", sampling__num_samples="2", output__overwrite="true")
    video = generate(settings).videos[1]
    document = json.loads(video.sidecar.read_text())
    assert document["schema"] == "osora.generate/1"
    assert document["prompt"] == "raining, sea"
    assert document["full_prompt"] == "raining, sea. 24 FPS. 4 motion score."
    assert (document["seed"], document["settings"]["sampling"]["seed"]) == (43, 43)
    assert "overwrite" not in document["settings"]["output"]
    assert document["versions"]["torch"] == torch.__version__
    assert set(document["timings_s"]) == {"load", "text", "denoise", "decode", "save"}
    assert document["peak_resident_gib"] > 0
    assert document["tf32"] is None
    assert document["settings"]["precision"] == {"tf32": None}
    overrides = {"output.path": Given(str(tmp_path / "b"), "--out")}
    overrides["runtime.weights"] = Given(str(world.released), "--weights")
    request = GenerateRequest(overrides=overrides, saved=read_sidecar(video.sidecar))
    again = generate_from_request(request, reporter=SilentReporter())
    assert [path.name for path in (video.path, again.videos[0].path)] == ["raining-sea_seed43.mp4"] * 2
    assert again.videos[0].path.read_bytes() == video.path.read_bytes()


@pytest.mark.slow
def test_sidecar_without_what_took_no_part_makes_the_same_file_again(world, tmp_path):
    idle = {"sampling__image_guidance_scale": "9", "condition__fit": "pad", "condition__video_latent_frames": "3"}
    settings = released_settings(world, tmp_path / "a", vae__sample_tsize="16", sampling__embedded_guidance="1", **idle)
    video = generate(settings).videos[0]
    saved = read_sidecar(video.sidecar)
    assert set(saved.values["condition"]) == {"mode"}
    assert not {"image_guidance_scale", "embedded_guidance"} & saved.values["sampling"].keys()
    environment = {"OSORA_SAMPLING__IMAGE_GUIDANCE_SCALE": "5", "OSORA_VAE__SAMPLE_TSIZE": "64"}
    overrides = {"output.path": Given(str(tmp_path / "b"), "--out")}
    overrides["runtime.weights"] = Given(str(world.released), "--weights")
    request = GenerateRequest(overrides=overrides, saved=saved, environment=environment)
    again = generate_from_request(request, reporter=SilentReporter()).videos[0]
    assert again.path.read_bytes() == video.path.read_bytes()
    assert json.loads(again.sidecar.read_text())["settings"]["vae"] == saved.values["vae"]


def test_sidecar_knows_where_its_references_are(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world.picture.parent)
    result = generate(released_settings(world, tmp_path, condition__references=world.picture.name))
    document = json.loads(result.videos[0].sidecar.read_text())
    assert document["settings"]["condition"]["references"] == [str(world.picture)]
    assert document["condition_mode"] == "i2v_head"
    assert document["given_frames_psnr_db"] == pytest.approx(result.videos[0].given_frames_psnr_db, abs=0.01)


def test_no_metadata(world, tmp_path):
    video = generate(released_settings(world, tmp_path, output__metadata="false")).videos[0]
    assert video.sidecar is None
    assert names(tmp_path) == ["raining-sea_seed42.mp4"]
    assert b"raining" not in video.path.read_bytes()


@pytest.mark.parametrize(
    ("path", "num_samples", "expected"),
    [
        ("clip.mp4", 1, ["clip.mp4"]),
        ("clip.gif", 2, ["clip_000.gif", "clip_001.gif"]),
        ("clip.webp", 1, ["clip.webp"]),
        ("clip.png", 1, ["clip"]),
    ],
)
def test_named_files(world, tmp_path, path, num_samples, expected):
    settings = released_settings(
        world, tmp_path / path, sampling__num_samples=str(num_samples), output__metadata="false"
    )
    result = generate(settings)
    assert names(tmp_path) == expected
    assert result.lines() == [str(tmp_path / name) for name in expected]


def test_png_sequence_keeps_its_name_in_the_sidecar(world, tmp_path):
    video = generate(released_settings(world, tmp_path / "v1.5.png", sampling__num_samples="2")).videos[1]
    assert video.path.name == "v1.5_001"
    document = json.loads(video.sidecar.read_text())
    assert document["settings"]["output"]["path"] == str(tmp_path / "v1.5_001.png")


def nothing_is_loaded(monkeypatch):
    for name in ("load_t5", "load_transformer"):
        monkeypatch.setattr(models, name, lambda *_, **__: pytest.fail("nothing may be loaded"))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["raining-sea_seed43.mp4", "raining-sea_seed43.mp4.json"])
def test_files_that_others_made_stay(world, tmp_path, which):
    (tmp_path / which).write_text("mine")
    two = released_settings(world, tmp_path, sampling__num_samples="2")
    made = generate(two).videos
    assert [video.path.name for video in made] == ["raining-sea_seed42.mp4", "raining-sea_seed43_2.mp4"]
    assert (tmp_path / which).read_text() == "mine"
    made_again = generate(two.replace({"output.overwrite": True})).videos
    assert [(video.path.name, video.made_before) for video in made_again] == [
        (video.path.name, False) for video in made
    ]
    assert (tmp_path / which).read_text() == "mine"


def test_the_same_request_again_computes_nothing_and_another_has_the_next_name(world, tmp_path, monkeypatch, reporter):
    settings = released_settings(world, tmp_path)
    longer = settings.replace({"sampling.num_inference_steps": 3})
    assert [generate(each).videos[0].path.name for each in (settings, longer)] == [
        "raining-sea_seed42.mp4",
        "raining-sea_seed42_2.mp4",
    ]
    bytes_before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    assert len(bytes_before) == 4
    with monkeypatch.context() as patch:
        nothing_is_loaded(patch)
        # Where it is computed, and how, decides no more than rounding.
        again = generate(settings.replace({"memory.offload": "model", "output.save_latents": False}), reporter=reporter)
        [video] = again.videos
        assert (video.path.name, video.made_before, again.model_evaluations) == ("raining-sea_seed42.mp4", True, 0)
        assert reporter.notes[-1].startswith(f"made before by the same request: {video.path}")
        assert generate(longer).to_json()["outputs"][0]["made_before"] is True
        [other] = choose_outputs(make_chain(with_mode(settings.replace({"runtime.attention": "math"}), reporter)))
        assert (other.media.name, other.made_before) == ("raining-sea_seed42_3.mp4", False)
    assert generate(settings.replace({"sampling.num_inference_steps": 4})).lines() == [
        str(tmp_path / "raining-sea_seed42_3.mp4")
    ]
    assert {name: (tmp_path / name).read_bytes() for name in bytes_before} == bytes_before
    for each, name in ((settings, "raining-sea_seed42.mp4"), (longer, "raining-sea_seed42_2.mp4")):
        [file] = choose_outputs(make_chain(with_mode(each.replace({"output.overwrite": True}), reporter)))
        assert (file.media.name, file.made_before) == (name, False)
    unmade = settings.replace({"output.overwrite": True, "sampling.num_inference_steps": 7})
    [video] = generate(unmade).videos
    assert (video.path.name, video.made_before) == ("raining-sea_seed42.mp4", False)


def test_samples_that_are_there_are_kept_and_the_others_made(world, tmp_path):
    generate(released_settings(world, tmp_path, sampling__seed="43"))
    kept = (tmp_path / "raining-sea_seed43.mp4").stat().st_mtime_ns
    result = generate(released_settings(world, tmp_path, sampling__num_samples="3"))
    assert [(video.seed, video.made_before) for video in result.videos] == [(42, False), (43, True), (44, False)]
    assert (tmp_path / "raining-sea_seed43.mp4").stat().st_mtime_ns == kept
    assert result.model_evaluations == 2 * make_plan(result.settings).model_evaluations


def test_a_named_file_is_made_before_or_refused(world, tmp_path, monkeypatch):
    settings = released_settings(world, tmp_path / "boat.mp4")
    generate(settings)
    nothing_is_loaded(monkeypatch)
    assert generate(settings).videos[0].made_before
    with pytest.raises(OutputError, match=r"boat\.mp4 exists already") as caught:
        generate(settings.replace({"sampling.seed": 1}))
    assert "--overwrite" in caught.value.hint
    assert names(tmp_path) == ["boat.mp4", "boat.mp4.json"]


def test_what_is_damaged_or_made_of_something_else_is_not_made_before(world, tmp_path):
    picture = tmp_path / "given.png"
    picture.write_bytes(world.picture.read_bytes())
    settings = released_settings(world, tmp_path / "out", condition__references=str(picture))
    [video] = generate(settings).videos
    sidecar = json.loads(video.sidecar.read_text())

    def is_made():
        [file] = choose_outputs(make_chain(with_mode(settings, SilentReporter())))
        return file.made_before

    assert is_made()
    for text in ("", "{", "[]", json.dumps({**sidecar, "schema": "x"}), json.dumps({**sidecar, "bytes": 1})):
        video.sidecar.write_text(text)
        assert not is_made()
    video.sidecar.unlink()
    assert not is_made()
    video.sidecar.write_text(json.dumps(sidecar))
    assert is_made()
    picture.write_bytes(world.other_picture.read_bytes())
    assert not is_made()
    picture.write_bytes(world.picture.read_bytes())
    video.path.write_bytes(b"half")
    assert not is_made()


def test_a_png_sequence_is_made_before(world, tmp_path):
    settings = released_settings(world, tmp_path, output__format="png")
    assert generate(settings).lines() == generate(settings).lines() == [str(tmp_path / "raining-sea_seed42")]
    (tmp_path / "raining-sea_seed42" / "frame_0001.png").unlink()
    assert generate(settings).lines() == [str(tmp_path / "raining-sea_seed42_2")]


@pytest.mark.parametrize("target", [pytest.param("", marks=pytest.mark.slow), "boat.mp4"], ids=["folder", "named"])
def test_a_sidecar_without_its_video_is_an_unfinished_result(world, tmp_path, reporter, target):
    """A kill may leave one: no request counts it as made, any takes its name without a flag, and `--from` takes it."""
    settings = released_settings(world, tmp_path / target)
    video = generate(settings).videos[0]
    content = video.path.read_bytes()
    overrides = {
        "output.path": Given(str(tmp_path / target), "--out"),
        "runtime.weights": Given(str(world.released), "x"),
    }
    saved = GenerateRequest(overrides=overrides, saved=read_sidecar(video.sidecar))
    for made in (settings, settings.replace({"sampling.num_inference_steps": 3}), saved):
        video.path.unlink()
        if isinstance(made, GenerateRequest):
            [again] = generate_from_request(made, reporter=reporter).videos
        else:
            plan_generation(made, reporter=reporter)
            [again] = generate(made).videos
        assert (again.path, again.made_before) == (video.path, False)
        assert names(tmp_path) == [video.path.name, video.sidecar.name]
    assert video.path.read_bytes() == content
    assert not [note for note in reporter.notes if "exists already" in note or "made before" in note]


@pytest.mark.slow
def test_overwriting_finds_the_unfinished_result_of_its_own_request(world, tmp_path):
    """Not that of another one, whose name comes first."""
    settings = released_settings(world, tmp_path)
    other = settings.replace({"sampling.num_inference_steps": 3})
    video = [generate(each).videos[0] for each in (settings, other)][1]
    assert video.path.name == "raining-sea_seed42_2.mp4"
    video.path.unlink()
    [file] = choose_outputs(make_chain(with_mode(other.replace({"output.overwrite": True}), SilentReporter())))
    assert (file.media, file.made_before) == (video.path, False)


def test_references_are_hashed_once_for_all_looks_at_the_names(world, tmp_path, monkeypatch):
    digest, hashed = hashlib.file_digest, []
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or digest(file, name))
    picture = tmp_path / "given.png"
    picture.write_bytes(world.picture.read_bytes())
    settings = released_settings(world, tmp_path / "out", condition__references=str(picture), sampling__num_samples="2")
    plan_generation(settings, reporter=SilentReporter())
    assert not generate(settings).videos[0].made_before
    assert generate(settings).videos[0].made_before
    assert hashed == [str(picture)]
    picture.write_bytes(world.other_picture.read_bytes())
    assert not choose_outputs(make_chain(with_mode(settings, SilentReporter())))[0].made_before
    assert hashed == [str(picture)] * 2


def test_a_dry_run_only_notes_what_is_there(world, tmp_path, reporter):
    settings = released_settings(world, tmp_path)
    video = generate(settings).videos[0].path
    before = names(tmp_path)
    other = {"sampling.num_inference_steps": 3}
    named = {"output.path": str(video)}
    for changes in ({}, other, named, {**named, **other}, {"output.overwrite": True}):
        plan_generation(settings.replace(changes), reporter=reporter)
    assert reporter.notes == [
        f"made before by the same request: {video}",
        f"{video} exists already: the result would be raining-sea_seed42_2.mp4",
        f"made before by the same request: {video}",
        f"{video} exists already; use --overwrite, or another --out",
    ]
    assert names(tmp_path) == before


def test_what_another_run_has_claimed_is_not_taken(world, tmp_path):
    """Another request in the same folder has the next name, and the same one is not made twice."""
    settings = released_settings(world, tmp_path)
    other = settings.replace({"sampling.num_inference_steps": 3})
    with Claims() as claims:
        [first] = choose_outputs(make_chain(with_mode(settings, SilentReporter())), claims=claims)
        for same in (settings, settings.replace({"output.overwrite": True})):
            with pytest.raises(
                OutputError, match=rf"another run is making the same result in .*: process {os.getpid()} on "
            ):
                generate(same)
        assert generate(other).videos[0].path.name == "raining-sea_seed42_2.mp4"
        for request in (settings, other):
            with pytest.raises(OutputError, match=rf"is being made by another run: process {os.getpid()} on "):
                generate(request.replace({"output.path": str(first.media)}))
    assert names(tmp_path) == ["raining-sea_seed42_2.mp4", "raining-sea_seed42_2.mp4.json"]
    assert generate(settings).videos[0].path == first.media


def test_latents_of_another_request_keep_their_name(world, tmp_path, monkeypatch, reporter):
    settings = released_settings(world, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode_latents", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            generate(settings, reporter=reporter)
    assert names(tmp_path) == ["raining-sea_seed42.latents.safetensors"]
    [other] = generate(settings.replace({"sampling.num_inference_steps": 3})).videos
    assert other.path.name == "raining-sea_seed42_2.mp4"


def test_results_of_another_run_that_was_faster_stay(world, tmp_path, monkeypatch, reporter):
    decode_latents = decode.decode_latents

    def meanwhile(*args, **options):
        (tmp_path / "raining-sea_seed42.mp4").write_text("of another run")
        return decode_latents(*args, **options)

    monkeypatch.setattr(decode, "decode_latents", meanwhile)
    with pytest.raises(OutputError, match="exists already"):
        generate(released_settings(world, tmp_path), reporter=reporter)
    assert (tmp_path / "raining-sea_seed42.mp4").read_text() == "of another run"
    assert "--from-latents" in reporter.warnings[-1]
    assert (tmp_path / "raining-sea_seed42.latents.safetensors").exists()


class TestPrompts:
    def test_five_thousand_characters(self, world, tmp_path, reporter):
        prompt = "a boat on the sea at night, " * 180
        assert len(prompt) > 5000
        result = generate(released_settings(world, tmp_path, prompt=prompt), reporter=reporter)
        assert reporter.warnings == ["the prompt is too long and is cut: T5 after 16 tokens, CLIP after 16 tokens"]
        assert len(result.videos[0].path.name) < 255
        assert json.loads(result.videos[0].sidecar.read_text())["prompt"] == prompt

    @pytest.mark.parametrize("prompt", ["夜の海に赤い船 🚢", 'say "sea", it\'s\n\tnight', "../../etc/passwd"])
    def test_any_text(self, world, tmp_path, prompt):
        result = generate(released_settings(world, tmp_path / "out", prompt=prompt, sampling__num_inference_steps="1"))
        assert result.videos[0].path.parent == tmp_path / "out"
        tags = read_tags(result.videos[0].path)
        assert (tags["prompt"], tags["seed"]) == (prompt, "42")

    def test_unknown_words_of_the_demo(self, world, tmp_path, reporter):
        generate(demo_settings(world, tmp_path, prompt="a dragon, Reining, Zebra"), reporter=reporter)
        assert reporter.warnings == [
            'the demo model does not know "dragon", "Reining" (nearest: "raining"), "Zebra"; '
            "it knows places: sea, desert; weathers: raining"
        ]

    def test_a_dry_run_warns_as_the_run_does(self, world, tmp_path, reporter, monkeypatch):
        monkeypatch.setattr(models, "load_t5", lambda *_, **__: pytest.fail("nothing may be loaded"))
        plan_generation(demo_settings(world, tmp_path, prompt="a dragon, raining, Zebra"), reporter=reporter)
        plan_generation(released_settings(world, tmp_path, prompt="a dragon " * 9), reporter=reporter)
        assert reporter.warnings == [
            'the demo model does not know "dragon", "Zebra"; it knows places: sea, desert; weathers: raining',
            "the prompt is too long and is cut: T5 after 16 tokens, CLIP after 16 tokens",
        ]
        nowhere = released_settings(world, tmp_path, prompt="a dragon " * 9, runtime__weights=str(tmp_path))
        plan_generation(nowhere, reporter=reporter)
        assert len(reporter.warnings) == 2

    @pytest.mark.slow
    def test_many_unknown_words_are_one_warning(self, world, tmp_path, reporter):
        prompt = " ".join(f"word{i}" for i in range(14))
        generate(demo_settings(world, tmp_path, prompt=prompt), reporter=reporter)
        assert len(reporter.warnings) == 1
        assert '"word9" and 4 more words' in reporter.warnings[0]

    def test_the_released_model_is_not_asked(self, world, tmp_path, reporter):
        generate(released_settings(world, tmp_path, prompt="a dragon"), reporter=reporter)
        assert reporter.warnings == []

    def test_the_negative_prompt_gets_no_suffix(self, world, tmp_path, monkeypatch):
        encoded = []
        encode = models.T5Encoder.encode
        monkeypatch.setattr(
            models.T5Encoder, "encode", lambda self, texts: encoded.append(texts) or encode(self, texts)
        )
        generate(released_settings(world, tmp_path, negative_prompt="night", prompt_suffix__motion_score="2"))
        assert encoded == [["raining, sea. 24 FPS. 2 motion score."], ["night"]]


class TestReferences:
    @pytest.mark.parametrize(
        ("files", "mode"),
        [(["picture"], "i2v_head"), (["picture", "other_picture"], "i2v_loop"), (["video"], "v2v_head")],
    )
    def test_suggested_mode(self, world, tmp_path, reporter, files, mode):
        references = ";".join(str(getattr(world, name)) for name in files)
        settings = released_settings(world, tmp_path, condition__references=references, video__num_frames="37")
        assert plan_generation(settings, reporter=reporter).video.mode.name == mode

    def test_no_mode_suits(self, world, tmp_path, reporter):
        settings = released_settings(world, tmp_path, condition__references=f"{world.video};{world.picture}")
        with pytest.raises(RequestError, match="no condition mode suits these 2 references") as caught:
            plan_generation(settings, reporter=reporter)
        assert "--cond" in caught.value.hint

    def test_suggested_mode_is_validated(self, world, tmp_path, reporter):
        settings = released_settings(world, tmp_path, condition__references=str(world.video))
        with pytest.raises(RequestError, match=r"video\.num_frames=9 leaves nothing to make"):
            plan_generation(settings, reporter=reporter)

    def test_too_short_video(self, world, tmp_path):
        settings = released_settings(
            world, tmp_path, condition__mode="v2v_tail", condition__references="short.mp4", video__num_frames="73"
        )
        write_media([moving_frames(20)], tmp_path / "short.mp4", fps=24, format="mp4")
        settings = settings.replace({"condition.references": (str(tmp_path / "short.mp4"),)})
        with pytest.raises(MediaError, match="has 20 frames, but 33 are needed") as caught:
            generate(settings)
        assert caught.value.hint == "give a longer video, or use --cond i2v_tail, which needs 1 frame"
        with pytest.raises(MediaError) as caught:
            references.read_references(
                [tmp_path / "short.mp4"], CONDITION_MODES["v2v_head_easy"], height=16, width=32,
                lengths=ReferenceLengths(video=4, easy=5),
            )  # fmt: skip
        assert "--cond v2v_head, which needs 17 frames" in caught.value.hint

    def test_broken_references_stop_the_dry_run_too(self, world, tmp_path, reporter):
        (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
        for mode in (None, "i2v_head"):
            settings = released_settings(
                world, tmp_path, condition__mode=mode, condition__references=str(tmp_path / "broken.png")
            )
            with pytest.raises(MediaError):
                plan_generation(settings, reporter=reporter)

    def test_picture_for_a_video_mode(self, world, tmp_path):
        settings = released_settings(
            world,
            tmp_path,
            condition__mode="v2v_head",
            condition__references=str(world.picture),
            video__num_frames="73",
        )
        with pytest.raises(MediaError, match="is a picture, not a video"):
            generate(settings)

    def test_a_video_under_a_mode_for_pictures_is_reported(self, world, tmp_path, reporter):
        for files in (f"{world.video}", f"{world.video};{world.picture}", f"{world.picture}"):
            settings = demo_settings(world, tmp_path, condition__mode="i2v_loop", condition__references=files)
            plan_generation(settings, reporter=reporter)
        assert reporter.warnings == [
            f"{world.video} is a video, and i2v_loop takes its {frames} frame alone; a v2v mode takes more of it"
            for frames in ("first and last", "first")
        ]

    def test_a_reference_of_another_rate_is_resampled_if_asked(self, tmp_path, reporter):
        frames_THWC = moving_frames(40)
        write_media([frames_THWC], tmp_path / "fast.gif", fps=20, format="gif")
        mode, at = CONDITION_MODES["v2v_head"], {"height": 16, "width": 32, "lengths": ReferenceLengths(video=2)}
        [kept], [matched] = (
            references.read_references(
                [tmp_path / "fast.gif"], mode, fps=10, resample=resample, reporter=reporter, **at
            )
            for resample in (False, True)
        )
        assert kept.pixels_CTHW.shape == matched.pixels_CTHW.shape
        [longer] = references.read_references(
            [tmp_path / "fast.gif"], mode, **{**at, "lengths": ReferenceLengths(video=4)}
        )
        # Every second frame.
        torch.testing.assert_close(matched.pixels_CTHW, longer.pixels_CTHW[:, ::2], rtol=0, atol=0)
        [warning] = reporter.warnings
        assert "--ref-fps match" in warning

    def test_other_rate_is_reported(self, world, tmp_path, reporter):
        settings = released_settings(
            world,
            tmp_path,
            condition__mode="v2v_head",
            condition__references=str(world.video),
            video__num_frames="73",
            video__fps="12",
        )
        plan_generation(settings, reporter=reporter)
        assert len(reporter.warnings) == 1
        assert (
            "24 frames a second and the video 12: what it shows will move at 50% of its speed" in reporter.warnings[0]
        )


class TestRequests:
    def test_auto_says_in_one_line(self, world, tmp_path, reporter, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        request = GenerateRequest(
            overrides={
                "prompt": Given("sea", "PROMPT"),
                "output.path": Given(str(tmp_path), "--out"),
                "runtime.weights": Given(str(world.released), "--weights"),
            }
        )
        settings, choice = resolve_generate_settings(request, reporter=reporter)
        assert settings.model.name == "demo"
        assert choice == "model: demo (there is no CUDA device)"
        assert reporter.notes == []
        plan_from_request(request, reporter=reporter)
        assert reporter.notes == [choice]

    def test_the_choice_is_not_reported_before_an_error(self, world, tmp_path, reporter, monkeypatch):
        def request(**more):
            given = {"prompt": "sea", "output.path": str(tmp_path), "runtime.device": "cpu", **more}
            return GenerateRequest(overrides={key: Given(value, "the test") for key, value in given.items()})

        for wrong in ({"video.resolution": "768px"}, {"condition.references": str(tmp_path / "gone.png")}):
            for run in (plan_from_request, generate_from_request):
                with pytest.raises(OsoraError):
                    run(request(**wrong), reporter=reporter)
        (tmp_path / "sea.mp4").write_text("there already")
        with pytest.raises(OutputError, match="exists already"):
            generate_from_request(request(**{"output.path": str(tmp_path / "sea.mp4")}), reporter=reporter)
        assert reporter.notes == []

    def test_missing_weights_are_reported_before_anything_is_planned(self, tmp_path, reporter, monkeypatch):
        warned = []

        def planned(*args, **options):
            warned.append(list(reporter.warnings))
            return make_chain(*args, **options)

        monkeypatch.setattr("opensora_cli.engine.generate.dry_run.make_chain", planned)
        given = {"prompt": "sea", "runtime.model_choice": "open-sora-v2", "runtime.device": "cpu"}
        given |= {"runtime.weights": str(tmp_path), "output.path": str(tmp_path)}
        request = GenerateRequest(overrides={key: Given(value, "the test") for key, value in given.items()})
        plan_from_request(request, reporter=reporter)
        assert warned == [reporter.warnings]
        assert "a run would be refused: weights of the open-sora-v2 model are missing" in warned[0][0]

    def test_weights_from_the_environment(self, world, tmp_path, reporter):
        request = GenerateRequest(
            overrides={
                "prompt": Given("sea", "PROMPT"),
                "runtime.model_choice": Given("open-sora-v2", "--model"),
                **{key: Given(value, "--set") for key, value in RELEASED_SIZES.items()},
                "video.height": Given("16", "--set"),
                "video.width": Given("32", "--set"),
                "video.num_frames": Given("9", "--num-frames"),
            },
            environment={"OSORA_WEIGHTS": str(world.released), "OSORA_OUTPUT__PATH": str(tmp_path)},
        )
        assert plan_from_request(request, reporter=reporter).missing_weights == ()
        assert reporter.notes == []


def test_a_seamless_loop_leaves_out_its_last_frame(world, tmp_path, reporter):
    loop = {"condition__mode": "i2v_loop", "condition__references": str(world.picture)}
    whole = generate(demo_settings(world, tmp_path / "whole", **loop)).videos[0]
    settings = demo_settings(world, tmp_path / "loop", **loop, condition__seamless="true")
    [video] = generate(settings, reporter=reporter).videos
    assert (
        f"seamless: the last frame, which repeats the first, is left out: {settings.video.num_frames - 1} frames"
        in (reporter.notes)
    )
    assert json.loads(video.sidecar.read_text())["num_frames"] == settings.video.num_frames - 1
    assert len(read_video(video.path).frames_THWC) == settings.video.num_frames - 1
    # The last given frame is compared before it is left out.
    assert video.given_frames_psnr_db == whole.given_frames_psnr_db
    with pytest.raises(RequestError, match=r"condition\.seamless=true has no effect with condition\.mode=i2v_head"):
        generate(demo_settings(world, tmp_path, condition__references=str(world.picture), condition__seamless="true"))


def test_the_last_frame_is_kept_beside_the_video(world, tmp_path):
    png = {"output__path": str(tmp_path / "a.png"), "output__last_frame": "true"}
    frames = generate(demo_settings(world, tmp_path, **png)).videos[0].path
    last = tmp_path / "a.last.png"
    kept = read_picture(last)
    assert torch.equal(kept, read_picture(sorted(frames.iterdir())[-1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.json", "a.last.png"]
    last.write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"a\.last\.png exists already"):
        generate(demo_settings(world, tmp_path / "a.mp4", output__last_frame="true"))
    assert last.read_bytes() == b"theirs"
    generate(demo_settings(world, tmp_path, **png, output__overwrite="true"))
    assert torch.equal(read_picture(last), kept)


@pytest.mark.parametrize("evidence", ["sidecar", "latents"])
def test_a_last_frame_that_an_unfinished_run_left_is_in_nobodys_way(world, tmp_path, monkeypatch, evidence):
    metadata = "true" if evidence == "sidecar" else "false"
    latents = "true" if evidence == "latents" else "false"
    wanted = {"output__last_frame": "true", "output__metadata": metadata, "output__save_latents": latents}
    settings = demo_settings(world, tmp_path / "a.mp4", **wanted)
    [video] = generate(settings).videos
    whole = killing.tree(tmp_path)
    if evidence == "sidecar":
        video.path.unlink()
    else:
        shutil.rmtree(tmp_path)
        monkeypatch.setattr(Events, "complete", lambda *_: None)
        [video] = generate(settings).videos
        monkeypatch.undo()
        assert (tmp_path / "a.latents.safetensors").exists()
        video.path.unlink()
    [again] = generate(settings).videos
    assert not again.made_before
    found = killing.tree(tmp_path)
    assert found.keys() == whole.keys()
    assert all(found[name] == whole[name] for name in ("a.mp4", "a.last.png"))


def test_latents_that_cannot_be_removed_do_not_end_a_run_whose_video_is_there(world, tmp_path, monkeypatch):
    def fail(path, missing_ok=False):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.warns(OsoraWarning, match=r"a\.latents\.safetensors .* cannot be removed"):
        [video] = generate(demo_settings(world, tmp_path / "a.mp4")).videos
    monkeypatch.undo()
    assert video.path.exists()
    [again] = generate(demo_settings(world, tmp_path / "a.mp4")).videos
    assert again.made_before


def test_what_a_killed_run_left_beside_a_whole_result_is_removed_by_the_next(world, tmp_path, monkeypatch):
    settings = demo_settings(world, tmp_path / "a.mp4")
    generate(settings)
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / ".osora-762069bc07a6e1b5.lock").touch()
    monkeypatch.setattr(folder_lock, "_looked_through", set())  # as in another process
    [again] = generate(settings).videos
    assert again.made_before
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_last_frame_that_is_missing_beside_a_video_made_before_is_warned_of(world, tmp_path, reporter):
    generate(demo_settings(world, tmp_path / "a.mp4"))
    [video] = generate(demo_settings(world, tmp_path / "a.mp4", output__last_frame="true"), reporter=reporter).videos
    assert video.made_before
    assert reporter.warnings == [
        f"{tmp_path / 'a.last.png'} is not there: the video was made without it; --overwrite makes both"
    ]


@pytest.mark.parametrize(("psnr_db", "warns"), [(16.0, True), (23.9, True), (24.1, False)])
def test_given_frames_that_do_not_come_back_are_warned_of(reporter, psnr_db, warns):
    decode.report_given_frames(psnr_db, 7, reporter, made_first=False)
    [line] = reporter.warnings if warns else reporter.notes
    assert line.startswith(f"given frames came back at {psnr_db} dB PSNR (seed 7)")
    assert len(reporter.warnings + reporter.notes) == 1


@pytest.mark.parametrize("pieces", [[4], [1, 3], [1, 1, 1, 1]])
def test_psnr_of_given_frames(pieces):
    # Only the first and the last count.
    frames = torch.tensor([100, 0, 0, 100], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 2, 2, 3)
    head = Reference(torch.full((3, 1, 2, 2), 110 / 127.5 - 1), at_head=True)
    tail = Reference(torch.full((3, 1, 2, 2), 100 / 127.5 - 1), at_head=False)

    def measured(*references):
        psnr = GivenFramesPSNR(references, num_frames=4)
        for piece in frames.split(pieces):
            psnr.add(piece)
        return psnr.db

    assert measured() is None
    assert measured(tail) == 99
    assert measured(head) == pytest.approx(10 * math.log10(255**2 / 100))
    assert measured(head, tail) == pytest.approx(10 * math.log10(255**2 / 50))
