"""Previews while a video is denoised: the same video, a GIF beside it, and failures end no run."""

import pytest
import torch
from tiny_world import RecordingReporter, demo_settings, flux_settings, names, picture_first_settings, released_settings

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate import previews
from opensora_cli.engine.generate.previews import PreviewMap, color_blocks, fit_preview_map, latent_colors
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_video
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.similarity import psnr_db
from opensora_cli.settings.load import load_preset

pytestmark = pytest.mark.usefixtures("without_estimates")

NAME = "raining-sea_seed42"
EVERY = {"output__preview_every": "1"}


@pytest.fixture(autouse=True)
def small_fit(monkeypatch):
    monkeypatch.setattr(previews, "_fitted", {})
    monkeypatch.setattr(previews, "_LEAST_CLIPS", 1)
    monkeypatch.setattr(previews, "_LEAST_SIZE", 32)


def test_previews_change_no_bit_and_are_kept_beside_the_video(world, tmp_path):
    plain = generate(demo_settings(world, tmp_path / "plain")).videos[0].path
    reporter = RecordingReporter()
    video = generate(demo_settings(world, tmp_path / "out", **EVERY), reporter=reporter).videos[0].path
    assert video.read_bytes() == plain.read_bytes()
    assert names(tmp_path / "out") == [f"{NAME}{ending}" for ending in (".mp4", ".mp4.json", ".preview.gif")]
    # One pixel for each of 16 x 16 latents, and one frame for each latent frame, made larger.
    assert read_video(tmp_path / "out" / f"{NAME}.preview.gif").frames_THWC.shape == (5, 256, 256, 3)
    # The map is fitted once.
    again = RecordingReporter()
    generate(demo_settings(world, tmp_path / "again", **EVERY), reporter=again)
    assert ("preview" in reporter.stages, "preview" in again.stages) == (True, False)


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


def test_maps_show_what_is_decoded(monkeypatch):
    monkeypatch.undo()  # the sizes of a small fit
    settings = load_preset("demo", prompt="any")
    weights = packaged_demo() / settings.files.vae
    vae = load_autoencoder(settings.vae, weights, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        *clips, other = color_blocks(vae)[1]
        [latents_CTHW] = vae.encode(other[None])
        shown_THWC = fit_preview_map(vae, clips).frames(latents_CTHW)
        expected = to_uint8(latent_colors(vae, vae.decode(latents_CTHW[None])[0]))
    grey = torch.full_like(expected, int(expected.float().mean()))
    assert shown_THWC.shape == (3, 16, 16, 3)
    assert psnr_db(shown_THWC, expected) > psnr_db(grey, expected) + 6
