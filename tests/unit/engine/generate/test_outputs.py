"""Files of results: names, sidecars, earlier and other runs, and what lies beside a video."""

import errno
import json
import os
from pathlib import Path

import killing
import pytest
import torch
from tiny_world import demo_settings, names, released_settings

from opensora_cli.core import files as core_files
from opensora_cli.core.exceptions import OsoraWarning, OutputError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate import models
from opensora_cli.engine.generate.chain import make_chain
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.request import resolve, with_mode
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.generate.sidecar import choose_outputs
from opensora_cli.media.read import read_picture
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import generate_request, read_sidecar

pytestmark = pytest.mark.usefixtures("without_estimates")


def chosen(settings):
    return choose_outputs(make_chain(with_mode(settings, SilentReporter())))


def again_from(sidecar, world, folder, environment=None):
    """Return the video that `--from` makes in another folder."""
    overrides = {
        "output.path": Given(str(folder), "--out"),
        "runtime.weights": Given(str(world.released), "--weights"),
    }
    request = generate_request(overrides, saved=read_sidecar(sidecar), environment=environment or {})
    [video] = generate(resolve(request, reporter=SilentReporter()), reporter=SilentReporter()).videos
    return video


def test_sidecar_makes_the_same_file_again(world, tmp_path):
    settings = released_settings(world, tmp_path / "a", sampling__num_samples="2", output__overwrite="true")
    video = generate(settings).videos[1]
    document = json.loads(video.sidecar.read_text())
    assert document["schema"] == "osora.generate/3"
    assert document["prompt"] == "raining, sea"
    assert document["full_prompt"] == "raining, sea. 24 FPS. 4 motion score."
    assert (document["seed"], document["settings"]["sampling"]["seed"]) == (43, 43)
    assert "overwrite" not in document["settings"]["output"]
    assert document["versions"]["torch"] == torch.__version__
    assert set(document["timings_s"]) == {"load", "text", "denoise", "decode", "save"}
    assert document["peak_resident_gib"] > 0
    again = again_from(video.sidecar, world, tmp_path / "b")
    assert [path.name for path in (video.path, again.path)] == ["raining-sea_seed43.mp4"] * 2
    assert again.path.read_bytes() == video.path.read_bytes()


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


def nothing_is_loaded(monkeypatch):
    for name in ("load_t5", "load_transformer"):
        monkeypatch.setattr(models, name, lambda *_, **__: pytest.fail("nothing may be loaded"))


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
        [other] = chosen(settings.replace({"runtime.attention": "math"}))
        assert (other.media.name, other.made_before) == ("raining-sea_seed42_3.mp4", False)
    assert {name: (tmp_path / name).read_bytes() for name in bytes_before} == bytes_before
    [video] = generate(settings.replace({"output.overwrite": True, "sampling.num_inference_steps": 7})).videos
    assert (video.path.name, video.made_before) == ("raining-sea_seed42.mp4", False)


def test_a_png_sequence_is_made_before(world, tmp_path):
    settings = released_settings(world, tmp_path, output__format="png")
    assert generate(settings).lines() == generate(settings).lines() == [str(tmp_path / "raining-sea_seed42")]
    (tmp_path / "raining-sea_seed42" / "frame_0001.png").unlink()
    assert generate(settings).lines() == [str(tmp_path / "raining-sea_seed42_2")]


def test_a_dry_run_only_notes_what_is_there(world, tmp_path, reporter):
    settings = released_settings(world, tmp_path)
    video = generate(settings).videos[0].path
    before = names(tmp_path)
    other = {"sampling.num_inference_steps": 3}
    named = {"output.path": str(video)}
    for changes in ({}, other, named, {**named, **other}, {"output.overwrite": True}):
        plan_generation(settings.replace(changes), reporter=reporter)
    video.unlink()
    video.with_suffix(".latents.safetensors").write_text("of another request")
    plan_generation(settings.replace(other), reporter=reporter)
    again = "(--overwrite makes it again)"
    assert reporter.notes == [
        f"made before by the same request: {video} {again}",
        f"made before by the same request: {video} {again}",
        f"{video} exists already; use --overwrite, or another --out",
    ]
    assert before == [video.name, f"{video.name}.json"]


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


def test_a_last_frame_that_an_unfinished_run_left_is_replaced(world, tmp_path):
    settings = demo_settings(world, tmp_path / "a.mp4", output__last_frame="true")
    [video] = generate(settings).videos
    whole = killing.tree(tmp_path)
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


def test_a_whole_result_is_made_before_whatever_lies_beside_it(world, tmp_path, monkeypatch, reporter):
    """What a killed run left is removed, and a last frame that is missing is warned of."""
    generate(demo_settings(world, tmp_path / "a.mp4"))
    made = names(tmp_path)
    (tmp_path / ".osora-762069bc07a6e1b5.lock").touch()
    monkeypatch.setattr(core_files, "_looked_through", set())  # as in another process
    [video] = generate(demo_settings(world, tmp_path / "a.mp4", output__last_frame="true"), reporter=reporter).videos
    assert video.made_before
    assert names(tmp_path) == made
    assert reporter.warnings == [
        f"{tmp_path / 'a.last.png'} is not there: the video was made without it; --overwrite makes both"
    ]
