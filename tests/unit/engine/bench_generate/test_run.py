"""Comparisons of a tiny model: what is measured, what took effect, and what is left when one ends early."""

import pytest
import torch
from stopping import stop_after
from tiny_world import (
    RecordingReporter,
    dc_ae_settings,
    demo_settings,
    flux_settings,
    picture_first_settings,
    released_settings,
)

from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.engine.bench_generate import run as bench
from opensora_cli.engine.bench_generate.measure import kernels_of, run_once
from opensora_cli.engine.bench_generate.run import bench_generate
from opensora_cli.engine.generate import loaded
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_picture
from opensora_cli.media.similarity import psnr_db
from opensora_cli.settings.bench_generate import BenchGenerateSettings, read_tries

pytestmark = pytest.mark.usefixtures("without_estimates")

FEWER = "sampling.num_inference_steps=2"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compared(settings, *tries, reporter=None, **options):
    """Return the report of a comparison."""
    found = []
    bench_generate(
        settings, read_tries(tries), BenchGenerateSettings(**options), reporter=reporter, publish=found.append
    )
    [report] = found
    return report


def four_steps(world, tmp_path, **changes):
    return demo_settings(world, tmp_path / "out", sampling__num_inference_steps="4", **changes)


def test_a_setting_is_measured_beside_the_exact_run_and_nothing_is_kept(world, tmp_path):
    reporter = RecordingReporter()
    report = compared(four_steps(world, tmp_path), FEWER, reporter=reporter)
    exact, fewer = report.settings
    assert (exact.name, exact.evaluations, exact.speedup, exact.psnr_db) == ("exact", 8, 1.0, None)
    assert (fewer.name, fewer.evaluations, fewer.runs) == (FEWER, 4, 1)
    assert fewer.changes == {"sampling.num_inference_steps": "2"}
    assert 0 < fewer.psnr_db < 99
    assert 0 < fewer.ssim < 1
    assert 0 < fewer.latents_error < 2
    assert fewer.without_effect is None
    assert fewer.speedup == pytest.approx(exact.seconds / fewer.seconds, rel=0.05)
    for row in report.settings:
        assert row.peak_memory_gib > 0
        assert {"text", "denoise", "decode"} <= row.stages_s.keys()
        assert row.seconds == pytest.approx(sum(row.stages_s.values()) - row.loading_s, abs=0.01)
    assert report.is_whole
    assert not (tmp_path / "out").exists()
    # Loaded once, to warm up.
    assert reporter.stages.count("load") == 3
    assert [note for note in reporter.notes if note.startswith("setting")] == [
        "setting 1 of 2: exact, a few steps to warm up",
        "setting 1 of 2: exact",
        f"setting 2 of 2: {FEWER}",
    ]


def test_the_video_is_the_one_that_generate_makes(world, tmp_path):
    settings = four_steps(world, tmp_path, output__format="png", runtime__threads="1")
    plan = make_plan(settings.replace({"condition.mode": "t2v", "output.save_latents": False})).with_threads()
    with loaded.LoadedModels() as models:
        video, figures = run_once(plan, [], models, RecordingReporter())
    made = sorted(generate(settings).videos[0].path.iterdir())
    assert torch.equal(video.frames_THWC, torch.stack([read_picture(path) for path in made]))
    assert figures.evaluations == plan.model_evaluations == 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sampling.solver=euler", "sampling.solver is euler in the exact run, too"),
        ("runtime.attention=sdpa", "the attention is sdpa in both"),
        ("sampling.image_guidance_scale=2.5", "sampling.image_guidance_scale takes no part in such a run"),
        pytest.param("sampling.guidance_interval=0,0.999999", None, marks=pytest.mark.slow),
        ("runtime.attention=math", None),
        pytest.param("runtime.threads=2", None, marks=pytest.mark.slow),
        pytest.param("memory.resident_blocks=1,memory.offload=blocks", None, marks=pytest.mark.slow),
    ],
)
def test_what_changed_nothing_is_reported_with_its_reason(world, tmp_path, text, why):
    report = compared(demo_settings(world, tmp_path, runtime__threads="1", video__num_frames="5"), text)
    row = report.settings[1]
    assert row.without_effect == why
    if why is not None:
        assert (row.psnr_db, row.latents_error) == (99.0, 0.0)
        assert f"{text}: without effect: {why}" in report.lines()


def test_repeats_go_back_and_forth_and_the_median_counts(world, tmp_path):
    reporter = RecordingReporter()
    report = compared(demo_settings(world, tmp_path, video__num_frames="5"), FEWER, reporter=reporter, repeats=3)
    order = [note.split(": ", 1)[1] for note in reporter.notes if ", run " in note]
    exact, tried = "exact", FEWER
    turns = [[exact, tried], [tried, exact], [exact, tried]]
    assert order == [f"{name}, run {turn + 1} of 3" for turn, names in enumerate(turns) for name in names]
    assert [row.runs for row in report.settings] == [3, 3]
    assert report.exact_error == 0.0


def test_kernels_that_are_others_are_warmed_up_too(world, tmp_path):
    reporter = RecordingReporter()
    compared(demo_settings(world, tmp_path, video__num_frames="5"), "runtime.attention=math", reporter=reporter)
    assert sum(note.endswith("a few steps to warm up") for note in reporter.notes) == 2


def test_the_standard_set_leaves_out_what_needs_no_fewer_evaluations(world, tmp_path):
    with loaded.LoadedModels() as models:
        planned = bench._Bench(RecordingReporter(), None, models)
        planned.plan(demo_settings(world, tmp_path, sampling__num_inference_steps="20"), {})
    assert planned._left_out == {
        "euler-30": "50 evaluations, and the exact run takes 35",
        "ab2-30": "50 evaluations, and the exact run takes 35",
        "heun-15": "54 evaluations, and the exact run takes 35",
    }
    assert [setting.name for setting in planned._settings] == ["exact", "euler-15", "ab2-15", "fast"]


def test_references_are_encoded_for_each(world, tmp_path):
    given = {"condition__mode": "i2v_head", "condition__references": str(world.picture)}
    report = compared(released_settings(world, tmp_path, **given), "sampling.num_inference_steps=1")
    assert [row.evaluations for row in report.settings] == [6, 3]
    assert all("encode" in row.stages_s for row in report.settings)


def test_all_segments_are_compared(world, tmp_path):
    report = compared(demo_settings(world, tmp_path, video__extend="1"), "sampling.num_inference_steps=1")
    # Two segments with two branches at each step.
    assert [row.evaluations for row in report.settings] == [8, 4]
    assert report.settings[1].latents_error > 0


def test_a_picture_that_is_made_first_has_stages_of_its_own(world, tmp_path):
    report = compared(picture_first_settings(world, tmp_path / "out"), "sampling.num_inference_steps=1")
    assert {"picture denoise", "denoise"} <= report.settings[0].stages_s.keys()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [dc_ae_settings, flux_settings])
def test_other_models_are_compared(world, tmp_path, make):
    changes = {"video__num_frames": "1"} if make is flux_settings else {}
    report = compared(make(world, tmp_path, **changes), "sampling.num_inference_steps=1")
    assert [row.evaluations for row in report.settings] in ([2, 1], [4, 2])


def test_what_was_measured_is_published_where_the_comparison_is_interrupted(world, tmp_path, monkeypatch):
    found = []
    settings = demo_settings(world, tmp_path, video__num_frames="5")
    # Two steps to warm up and two of the exact run; then Ctrl-C.
    stop_after(monkeypatch, 5)
    plot = tmp_path / "a.svg"
    options = BenchGenerateSettings(plot=str(plot))
    with pytest.raises(KeyboardInterrupt):
        bench_generate(settings, read_tries(["sampling.solver=ab2"]), options, publish=found.append)
    [report] = found
    assert [row.name for row in report.settings] == ["exact"]
    assert not report.is_whole
    assert "note        it ended early: this is what was measured until then" in report.lines()
    assert plot.exists()


def test_nothing_is_published_before_the_first_run_has_ended(world, tmp_path, monkeypatch):
    stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        compared(demo_settings(world, tmp_path), FEWER)


def test_a_chart_that_is_there_ends_it_before_anything_is_loaded(world, tmp_path):
    (tmp_path / "a.svg").write_text("mine")
    reporter = RecordingReporter()
    with pytest.raises(OutputError, match="exists already"):
        compared(demo_settings(world, tmp_path), FEWER, reporter=reporter, plot=str(tmp_path / "a.svg"))
    assert reporter.stages == []


def test_a_try_that_is_wrong_ends_it_before_anything_is_loaded(world, tmp_path):
    reporter = RecordingReporter()
    with pytest.raises(ValueError, match="num_inference_steps"):
        compared(demo_settings(world, tmp_path), "sampling.num_inference_steps=0", reporter=reporter)
    assert reporter.stages == []


def test_several_videos_are_refused(world, tmp_path):
    with pytest.raises(RequestError, match=r"sampling\.num_samples=2 cannot be compared"):
        compared(demo_settings(world, tmp_path, sampling__num_samples="2"), FEWER)


def test_sampling_shares_kernels(world, tmp_path):
    plan = make_plan(demo_settings(world, tmp_path))
    other = make_plan(plan.settings.replace({"sampling.solver": "ab2"}))
    assert kernels_of(plan) == kernels_of(other)
    assert kernels_of(plan) != kernels_of(make_plan(plan.settings.replace({"runtime.attention": "math"})))


def test_psnr_is_that_of_the_frames(world, tmp_path):
    settings = four_steps(world, tmp_path, output__format="png", runtime__threads="1", video__num_frames="1")
    report = compared(settings, FEWER)
    exact, fewer = (
        read_picture(generate(each).videos[0].path)
        for each in (settings, settings.replace({"sampling.num_inference_steps": 2}))
    )
    assert report.settings[1].psnr_db == pytest.approx(psnr_db(fewer, exact), abs=0.01)
