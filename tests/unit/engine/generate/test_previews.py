"""Previews while a video is denoised: the same video, a GIF beside it, and failures end no run."""

import os

import pytest
import torch
from tiny_world import RecordingReporter, demo_settings, flux_settings, names, picture_first_settings, released_settings

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate import previews
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.previews import (
    PreviewMap,
    color_blocks,
    demo_map_file,
    fit_preview_map,
    latent_colors,
    preview_example,
    read_map,
)
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_video
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.similarity import psnr_db
from opensora_cli.settings.load import load_preset

pytestmark = pytest.mark.usefixtures("without_estimates")

NAME = "raining-sea_seed42"
EVERY = {"output__preview_every": "1"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(previews, "_LEAST_CLIPS", 1)
    monkeypatch.setattr(previews, "_LEAST_SIZE", 32)
    return tmp_path / "cache" / "osora" / "previews"


def test_previews_change_no_bit_and_are_kept_beside_the_video(world, tmp_path, cache):
    plain = generate(demo_settings(world, tmp_path / "plain")).videos[0].path
    reporter = RecordingReporter()
    video = generate(demo_settings(world, tmp_path / "out", **EVERY), reporter=reporter).videos[0].path
    assert video.read_bytes() == plain.read_bytes()
    assert names(tmp_path / "out") == [f"{NAME}{ending}" for ending in (".mp4", ".mp4.json", ".preview.gif")]
    # One pixel for each of 16 x 16 latents, and one frame for each latent frame, made larger.
    assert read_video(tmp_path / "out" / f"{NAME}.preview.gif").frames_THWC.shape == (5, 256, 256, 3)
    [kept] = cache.iterdir()
    assert read_map(kept) is not None
    assert [note for note in reporter.notes if note.startswith("previews:")] == [
        "previews: the colors of this autoencoder's latents are not known yet: they are fitted first, and kept in "
        f"{cache}"
    ]


@pytest.mark.slow
def test_a_fitted_map_is_cached_until_the_autoencoder_changes(world, tmp_path, cache):
    settings = demo_settings(world, tmp_path, **EVERY)

    def must_be_fitted():
        reporter = RecordingReporter()
        plan_generation(settings, reporter=reporter)
        return any(note.startswith("previews:") for note in reporter.notes)

    assert must_be_fitted()
    for seed, fits in ((42, True), (43, False)):
        reporter = RecordingReporter()
        generate(settings.replace({"sampling.seed": seed}), reporter=reporter)
        assert ("preview" in reporter.stages) is fits
        assert not must_be_fitted()
    [kept] = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:20])
    assert must_be_fitted()
    kept.write_bytes(whole)
    assert not must_be_fitted()
    os.utime(world.demo / settings.files.vae)
    assert must_be_fitted()


@pytest.mark.parametrize(
    "make", [released_settings, picture_first_settings, pytest.param(flux_settings, marks=pytest.mark.slow)]
)
def test_every_kind_of_model_is_previewed(world, tmp_path, make):
    reporter = RecordingReporter()
    generate(make(world, tmp_path, **EVERY), reporter=reporter)
    assert (tmp_path / f"{NAME}.preview.gif").is_file()
    assert [warning for warning in reporter.warnings if "preview" in warning] == []


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(previews, "write_media", OutputError("no space left")), (PreviewMap, "frames", RuntimeError("out of memory"))],
)
def test_a_preview_that_fails_is_a_warning_once(world, tmp_path, monkeypatch, owner, name, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(owner, name, fail)
    reporter = RecordingReporter()
    result = generate(demo_settings(world, tmp_path, **EVERY), reporter=reporter)
    assert reporter.warnings == [f"there are no more previews: {error}"]
    assert result.videos[0].path.is_file()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_a_warning(world, tmp_path, cache):
    cache.parent.parent.write_text("a file")
    reporter = RecordingReporter()
    generate(demo_settings(world, tmp_path / "out", **EVERY), reporter=reporter)
    [of_prompts, of_previews] = reporter.warnings
    assert of_prompts.startswith("embeddings of prompts are not cached: ")
    assert of_previews.startswith("the colors of previews are not cached: cannot write")


@pytest.mark.slow
def test_maps_show_what_is_decoded(monkeypatch):
    monkeypatch.undo()  # the sizes of a small fit
    settings = load_preset("demo", prompt="any")
    weights = packaged_demo() / settings.files.vae
    vae = load_autoencoder(settings.vae, weights, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        *clips, other = color_blocks(vae)[1]
        latents_CTHW, _ = preview_example(vae, other)
        fitted = fit_preview_map(vae, clips)
        expected = to_uint8(latent_colors(vae, vae.decode(latents_CTHW[None].float())[0]))
    grey = torch.full_like(expected, int(expected.float().mean()))
    for colors in (fitted, read_map(demo_map_file())):
        shown_THWC = colors.frames(latents_CTHW)
        assert shown_THWC.shape == (3, 16, 16, 3)
        assert psnr_db(shown_THWC, expected) > psnr_db(grey, expected) + 6
