"""Seeds that are begun to choose from, with a sheet, which go on to the bytes of a run without a pause."""

import pytest
from stopping import continued
from tiny_world import RecordingReporter, demo_settings, names

from opensora_cli.engine.generate import previews
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_picture

pytestmark = pytest.mark.usefixtures("without_estimates")

STEPS, BEGUN = 3, 1
NAMES = [f"raining-sea_seed{seed}" for seed in (42, 43)]
SHEET = f"{NAMES[0]}.explore.png"
EXPLORED = {
    "sampling__num_inference_steps": str(STEPS),
    "sampling__stop_at": str(BEGUN),
    "sampling__num_samples": "2",
    "output__explore": "true",
}


@pytest.fixture(autouse=True)
def small_fit(monkeypatch):
    monkeypatch.setattr(previews, "_LEAST_CLIPS", 1)
    monkeypatch.setattr(previews, "_LEAST_SIZE", 32)


def test_the_chosen_seed_goes_on_to_the_same_bytes(world, tmp_path):
    out, reporter = tmp_path / "out", RecordingReporter()
    settings = demo_settings(world, out, **EXPLORED)
    result = generate(settings, reporter=reporter)
    assert names(out) == sorted(
        [SHEET, *(name + ending for name in NAMES for ending in (".latents.safetensors", ".preview.gif"))]
    )
    assert "decode" not in reporter.stages
    assert result.model_evaluations == reporter.totals["denoise"] == 2 * 2 * BEGUN
    assert result.sheet == out / SHEET
    # Two strips of three frames, below each other.
    assert read_picture(out / SHEET).shape == (8 + 2 * (256 + 34 + 8), 3 * 256 + 2 * 8, 3)
    states = [out / f"{name}.latents.safetensors" for name in NAMES]
    assert result.lines() == [
        str(out / SHEET),
        f"osora generate --from {states[0]} --weights {world.demo}  # seed 42",
        f"osora generate --from {states[1]} --weights {world.demo}  # seed 43",
    ]
    document = result.to_json()
    assert [(seed["seed"], seed["state"], seed["steps"]) for seed in document["explored"]] == [
        (42, str(states[0]), BEGUN),
        (43, str(states[1]), BEGUN),
    ]
    assert (document["sheet"], document["outputs"]) == (str(out / SHEET), [])

    finished = continued(states[1])
    plain = {**EXPLORED, "sampling__seed": "43", "sampling__num_samples": "1"}
    plain = {key: value for key, value in plain.items() if key not in ("sampling__stop_at", "output__explore")}
    [whole] = generate(demo_settings(world, tmp_path / "whole", **plain)).videos
    assert finished.videos[0].path == out / f"{NAMES[1]}.mp4"
    assert finished.videos[0].path.read_bytes() == whole.path.read_bytes()
    assert finished.model_evaluations == 2 * (STEPS - BEGUN)

    # Again: what is explored is kept, and what is finished is explored no more.
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    reporter = RecordingReporter()
    again = generate(settings, reporter=reporter)
    assert (again.model_evaluations, reporter.stages) == (0, [])
    assert [seed.seed for seed in again.explored] == [42]
    assert [(video.seed, video.made_before) for video in again.videos] == [(43, True)]
    assert f"kept: latents of the same request: {states[0]}, after step {BEGUN}" in reporter.notes
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert after.pop(SHEET) != before.pop(SHEET)  # which seed is finished
    assert after == before


@pytest.mark.slow
def test_more_seeds_and_more_steps_begin_what_is_missing(world, tmp_path):
    generate(demo_settings(world, tmp_path / "out", **{**EXPLORED, "sampling__num_samples": "1"}))
    more = generate(demo_settings(world, tmp_path / "out", **EXPLORED))
    assert more.model_evaluations == 2 * BEGUN
    further = generate(demo_settings(world, tmp_path / "out", **{**EXPLORED, "sampling__stop_at": "2"}))
    assert (further.model_evaluations, [seed.steps for seed in further.explored]) == (4, [2, 2])
    # What has come further stays as it is.
    fewer = generate(demo_settings(world, tmp_path / "out", **EXPLORED))
    assert (fewer.model_evaluations, [seed.steps for seed in fewer.explored]) == (0, [2, 2])


def test_a_plan_counts_the_steps_of_explored_seeds(world, tmp_path):
    document = plan_generation(demo_settings(world, tmp_path, **EXPLORED), reporter=RecordingReporter())
    assert document.model_evaluations == 2 * 2 * BEGUN
    assert document.lines()[-3:] == [
        *(f"writes    {tmp_path / name}.latents.safetensors" for name in NAMES),
        f"writes    {tmp_path / SHEET}",
    ]
