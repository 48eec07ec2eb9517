"""Comparisons of a tiny model."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from stopping import stop_after
from tiny_world import RecordingReporter, demo_settings, released_settings

from opensora_cli.engine.bench_generate import bench_generate, likeness
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_picture
from opensora_cli.media.similarity import HIGHEST_PSNR_DB, psnr_db, ssim
from opensora_cli.memory.monitor import Spread
from opensora_cli.settings.tries import read_tries

pytestmark = pytest.mark.usefixtures("without_estimates")

FEWER = "sampling.num_inference_steps=2"
FRAMES = torch.randint(0, 256, (3, 16, 20, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
LATENTS = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compared(settings, *tries, reporter=None, repeats=1):
    return bench_generate(settings, read_tries(tries), repeats=repeats, reporter=reporter or RecordingReporter())


def video(latents, frames_THWC):
    return SimpleNamespace(latents=latents, frames_THWC=frames_THWC)


def test_likeness_is_a_mean_over_frames_and_an_error_over_all_segments():
    other, counted = FRAMES // 2, Counter()
    exact = video((LATENTS, 2 * LATENTS), FRAMES)
    found = likeness(video((LATENTS, 3 * LATENTS), other), exact, on_frame=lambda: counted.update("f"))
    pairs = list(zip(other, FRAMES, strict=True))
    expected = sum(psnr_db(*pair) for pair in pairs) / 3, sum(ssim(*pair) for pair in pairs) / 3, 1 / 5**0.5
    assert found == pytest.approx(expected, abs=1e-3)
    assert counted["f"] == 3
    assert likeness(exact, exact, on_frame=int) == (HIGHEST_PSNR_DB, 1.0, 0.0)


def test_small_frames_have_no_ssim_and_zeros_an_absolute_error():
    zeros, ones = (video((each(2),), FRAMES[:, :8]) for each in (torch.zeros, torch.ones))
    assert likeness(ones, zeros, on_frame=int) == (HIGHEST_PSNR_DB, None, pytest.approx(2**0.5))


def test_settings_are_measured_beside_the_exact_run_and_nothing_is_kept(world, tmp_path):
    reporter = RecordingReporter()
    settings = demo_settings(world, tmp_path / "out", sampling__num_inference_steps="4", runtime__threads="1")
    report = compared(settings, FEWER, "sampling.solver=euler", reporter=reporter)
    exact, fewer, same = report.settings
    assert (exact.name, exact.evaluations, exact.speedup, exact.psnr_db) == ("exact", 8, 1.0, None)
    assert (fewer.name, fewer.evaluations, fewer.changes) == (FEWER, 4, {"sampling.num_inference_steps": "2"})
    assert 0 < fewer.psnr_db < 99
    assert 0 < fewer.ssim < 1
    assert 0 < fewer.latents_error < 2
    assert fewer.speedup == pytest.approx(exact.seconds / fewer.seconds, rel=0.05)
    assert (same.evaluations, same.psnr_db, same.latents_error) == (8, 99.0, 0.0)
    for row in report.settings:
        assert row.peak_memory_gib > 0
        stages = {name: seconds for name, seconds in row.stages_s.items() if name != "load"}
        assert stages.keys() == {"text", "denoise", "decode"}
        assert row.seconds == pytest.approx(sum(stages.values()), abs=0.01)
    assert not (tmp_path / "out").exists()
    # Models are loaded once, to warm up.
    assert reporter.stages.count("load") == 3
    assert sum(note.endswith("a few steps to warm up") for note in reporter.notes) == 1


def test_the_videos_are_those_that_generate_makes(world, tmp_path):
    changes = {"sampling__num_inference_steps": "4", "runtime__threads": "1", "video__num_frames": "1"}
    settings = demo_settings(world, tmp_path, output__format="png", **changes)
    exact, fewer = (
        read_picture(generate(each).videos[0].path)
        for each in (settings, settings.replace({"sampling.num_inference_steps": 2}))
    )
    assert compared(settings, FEWER).settings[1].psnr_db == pytest.approx(psnr_db(fewer, exact), abs=0.01)


def test_repeats_go_back_and_forth_and_measure_the_noise_of_the_exact_run(world, tmp_path, monkeypatch):
    reporter, measured = RecordingReporter(), []
    # The clock may give equal seconds.
    monkeypatch.setattr(Spread, "of", lambda seconds: measured.append(seconds) or Spread(2, 2.0, 0.5))
    report = compared(demo_settings(world, tmp_path, video__num_frames="5"), FEWER, reporter=reporter, repeats=2)
    runs = [note.split(": ")[:2] for note in reporter.notes if note.startswith("run ") and note.endswith(" s")]
    names = ["exact", FEWER, FEWER, "exact"]
    assert runs == [[f"run {number} of 4", name] for number, name in enumerate(names, 1)]
    assert [len(seconds) for seconds in measured] == [2, 2]
    assert [(row.seconds, row.deviation_s) for row in report.settings] == [(2.0, 0.5)] * 2
    exact = report.settings[0]
    assert (exact.psnr_db, exact.ssim, exact.latents_error) == (99.0, 1.0, 0.0)


def test_other_kernels_are_warmed_up_too(world, tmp_path):
    reporter = RecordingReporter()
    compared(demo_settings(world, tmp_path, video__num_frames="5"), "runtime.attention=math", reporter=reporter)
    assert sum(note.endswith("a few steps to warm up") for note in reporter.notes) == 2


@pytest.mark.slow
def test_the_standard_set_skips_what_needs_no_fewer_evaluations(world, tmp_path):
    report = compared(demo_settings(world, tmp_path, sampling__num_inference_steps="20", video__num_frames="1"))
    assert report.skipped == {
        "euler-30": "50 evaluations; the exact run takes 35",
        "ab2-30": "50 evaluations; the exact run takes 35",
        "heun-15": "54 evaluations; the exact run takes 35",
    }
    assert [row.name for row in report.settings] == ["exact", "euler-15", "ab2-15", "fast"]


def _with_reference(world, folder):
    return released_settings(world, folder, condition__mode="i2v_head", condition__references=str(world.picture))


def test_an_interrupted_comparison_says_what_was_finished(world, tmp_path, monkeypatch):
    # Two steps warm up, and the exact run has two.
    stop_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt, match="1 of 2 runs were finished; there is no table"):
        compared(demo_settings(world, tmp_path, video__num_frames="5"), "sampling.solver=ab2")
