"""A run that is stopped while it denoises goes on from the step that it has reached, to the same bytes."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, safe_open, save_file
from small_stages import small_stages
from stopping import continued, stopped
from tiny_world import RecordingReporter, demo_settings, names

from opensora_cli.core.exceptions import CheckpointError, HardwareError, OutputError, RequestError
from opensora_cli.engine.components import attention
from opensora_cli.engine.generate import denoise
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.request import with_mode
from opensora_cli.engine.generate.run import generate
from opensora_cli.media.read import read_video

pytestmark = pytest.mark.usefixtures("without_estimates")

NAME = "raining-sea_seed42"
STATE = f"{NAME}.latents.safetensors"
STEPS = 4
T2V = {"sampling__num_inference_steps": str(STEPS)}


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """The video of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    return generate(demo_settings(world, folder, **T2V)).videos[0].path.read_bytes()


def go_on(state, **overrides):
    reporter = RecordingReporter()
    return continued(state, reporter, **overrides), reporter


def steps_in(state):
    with safe_open(state, "pt") as file:
        return file.metadata().get("steps_done")


@pytest.mark.parametrize("steps", [2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 3))])
def test_what_is_stopped_after_a_step_goes_on_to_the_same_bytes(world, tmp_path, whole, steps):
    folder = tmp_path / "my out"
    words = stopped(demo_settings(world, folder, **T2V), steps)
    state = folder / STATE
    assert words == f"continue with: osora generate --from {shlex.quote(str(state))} --weights {world.demo}"
    assert (names(folder), steps_in(state)) == ([STATE], str(steps))
    result, reporter = go_on(state)
    assert result.videos[0].path == folder / f"{NAME}.mp4"
    assert result.videos[0].path.read_bytes() == whole
    assert f"continuing from latents of the same request: {state}, after step {steps}" in reporter.notes
    assert result.model_evaluations == reporter.totals["denoise"] == 2 * (STEPS - steps)
    assert names(folder) == [f"{NAME}.mp4", f"{NAME}.mp4.json"]


def test_a_resumed_run_keeps_the_attention_backend_of_its_state(world, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(attention, "attention_order", lambda device: ("math",))
        video = generate(demo_settings(world, tmp_path / "whole", **T2V)).videos[0].path.read_bytes()
        stopped(demo_settings(world, tmp_path, **T2V), 2)
    result, _ = go_on(tmp_path / STATE)
    assert result.attention is not None
    assert result.attention.line() == "math (auto: the backend of the run that this one continues)"
    assert result.videos[0].path.read_bytes() == video


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_so_it_does_with_a_solver_that_looks_back(world, tmp_path, whole, steps):
    settings = demo_settings(world, tmp_path / "whole", **T2V, sampling__solver="ab2")
    video = generate(settings).videos[0].path.read_bytes()
    assert video != whole
    stopped(settings.replace({"output.path": str(tmp_path / "out")}), steps)
    state = tmp_path / "out" / STATE
    saved = load_file(state)
    assert saved["past"].shape == (2, *saved["latents"].shape)
    result, _ = go_on(state)
    assert result.videos[0].path.read_bytes() == video


@pytest.mark.parametrize("steps", [5, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (9, 11))])
def test_so_it_does_with_a_step_cache(world, tmp_path, steps):
    few = {"sampling__num_inference_steps": "14", "sampling__step_cache": "0.3", "sampling__solver": "ab2"}
    settings = demo_settings(world, tmp_path / "whole", **few)
    result = generate(settings)
    plan = make_plan(with_mode(settings, RecordingReporter()))
    assert 0 < len(plan.reused_steps) < 14
    assert result.model_evaluations == plan.model_evaluations < 26
    stopped(settings.replace({"output.path": str(tmp_path / "out")}), steps)
    rest, reporter = go_on(tmp_path / "out" / STATE)
    assert rest.videos[0].path.read_bytes() == result.videos[0].path.read_bytes()
    assert rest.model_evaluations == reporter.totals["denoise"]


def test_the_same_command_goes_on_and_can_be_stopped_again(world, tmp_path, whole):
    settings = demo_settings(world, tmp_path / "clip.mp4", **T2V)
    stopped(settings, 1)
    stopped(settings, 2)
    assert steps_in(tmp_path / "clip.latents.safetensors") == "3"
    result = generate(settings)
    assert (result.model_evaluations, result.videos[0].path.read_bytes()) == (2, whole)
    assert names(tmp_path) == ["clip.mp4", "clip.mp4.json"]


def test_states_are_saved_as_often_as_is_asked_for(world, tmp_path, monkeypatch, whole):
    saved, save = [], denoise.save_latents

    def recording(path, latents, settings, **options):
        saved.append(options["steps"])
        save(path, latents, settings, **options)

    monkeypatch.setattr(denoise, "save_latents", recording)
    result = generate(demo_settings(world, tmp_path, **T2V, output__save_state_every="2"))
    assert saved == [2, None]
    assert result.videos[0].path.read_bytes() == whole


def test_overwriting_goes_on_only_where_it_is_asked_for(world, tmp_path, whole):
    settings = demo_settings(world, tmp_path / "clip.mp4", **T2V, output__overwrite="true")
    (tmp_path / "clip.mp4").write_bytes(b"old")
    stopped(settings, 2)
    state = tmp_path / "clip.latents.safetensors"
    with pytest.raises(OutputError, match=r"clip\.mp4 exists already"):
        go_on(state)
    assert (tmp_path / "clip.mp4").read_bytes() == b"old"
    result, _ = go_on(state, output__overwrite=True)
    assert (result.model_evaluations, (tmp_path / "clip.mp4").read_bytes()) == (4, whole)
    assert names(tmp_path) == ["clip.mp4", "clip.mp4.json"]


def test_an_error_in_the_middle_keeps_what_is_done(world, tmp_path, monkeypatch, reporter, whole):
    velocity, left = denoise.GuidedVelocity, [2]

    class Failing(velocity):
        def __call__(self, *args, **options):
            if not left[0]:
                raise HardwareError("rank 1 was lost")
            left[0] -= 1
            return super().__call__(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(denoise, "GuidedVelocity", Failing)
        with pytest.raises(HardwareError, match="rank 1 was lost"):
            generate(demo_settings(world, tmp_path, **T2V), reporter=reporter)
    assert reporter.warnings == [f"continue with: osora generate --from {tmp_path / STATE} --weights {world.demo}"]
    result, _ = go_on(tmp_path / STATE)
    assert result.videos[0].path.read_bytes() == whole


@pytest.fixture(scope="module")
def kept(world, tmp_path_factory):
    """The state of a run after two steps."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
        stopped(demo_settings(world, folder, **T2V), 2)
    return folder / STATE


@pytest.fixture
def state(kept, tmp_path):
    """A copy of that state."""
    return Path(shutil.copy(kept, tmp_path))


def test_a_state_is_no_finished_latents(state, reporter):
    with pytest.raises(RequestError, match=f"was saved after step 2 of {STEPS}") as caught:
        continued(state, reporter, key="from_latents")
    assert caught.value.hint == f"continue with osora generate --from {state}"
    with pytest.raises((RequestError, ValueError), match="drop one of them"):
        go_on(state, from_latents=str(state))


def rewritten(state, **metadata):
    with safe_open(state, "pt") as file:
        before = file.metadata()
    after = {key: value for key, value in {**before, **metadata}.items() if value is not None}
    save_file(load_file(state), state, metadata=after)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"steps_done": "-1"}, "is damaged: steps_done is '-1'"),
        ({"steps_done": "9999999"}, "is damaged: steps_done is"),
        ({"steps_done": "0"}, f"was saved after step 0 of {STEPS}"),
        ({"steps_done": str(STEPS)}, f"was saved after step {STEPS} of {STEPS}"),
        ({"schema": "osora.latents/99"}, r"has the schema 'osora\.latents/99'"),
        ({"settings": '{"output": 3}'}, "holds settings that this version of osora does not know"),
        ({"settings": None}, "does not say which settings made it"),
    ],
)
def test_a_damaged_state_is_refused(state, metadata, message):
    rewritten(state, **metadata)
    with pytest.raises(CheckpointError, match=message):
        go_on(state)


def test_a_state_names_no_place(state, tmp_path, whole):
    """It goes on beside itself, under its own name, and replaces nothing, whatever its settings say."""
    mine = tmp_path / "mine.mp4"
    mine.write_bytes(b"mine")
    with safe_open(state, "pt") as file:
        settings = json.loads(file.metadata()["settings"])
    settings["output"] |= {"path": str(mine), "overwrite": True}
    rewritten(state, settings=json.dumps(settings))
    beside = state.with_name(f"{NAME}.mp4")
    beside.write_bytes(b"mine, too")
    with pytest.raises(OutputError, match="exists already"):
        go_on(state)
    assert (mine.read_bytes(), beside.read_bytes()) == (b"mine", b"mine, too")
    beside.unlink()
    result, _ = go_on(state)
    assert (result.videos[0].path, mine.read_bytes()) == (beside, b"mine")
    assert beside.read_bytes() == whole


def stopping(world, out, **changes):
    return demo_settings(world, out, **{**T2V, "sampling__stop_at": "2", **changes})


def test_a_run_that_is_to_stop_leaves_a_video_and_a_state_that_goes_on(world, tmp_path, whole):
    settings, reporter = stopping(world, tmp_path), RecordingReporter()
    result = generate(settings, reporter=reporter)
    partial, state = tmp_path / f"{NAME}_step2.mp4", tmp_path / STATE
    assert names(tmp_path) == [STATE, partial.name, f"{partial.name}.json"]
    assert [video.path for video in result.videos] == [partial]
    assert result.model_evaluations == reporter.totals["denoise"] == 4
    assert json.loads((tmp_path / f"{partial.name}.json").read_text())["model_evaluations"] == 4
    command = f"osora generate --from {state} --weights {world.demo}"
    assert f"stopped after step 2 of {STEPS}: continue with {command}" in reporter.notes
    frames = read_video(partial).frames_THWC.float()
    assert frames.shape[0] == settings.video.num_frames
    [again] = generate(settings).videos
    assert again.made_before
    finished, _ = go_on(state)
    assert (finished.model_evaluations, finished.videos[0].path.read_bytes()) == (4, whole)
    assert names(tmp_path) == sorted(f"{NAME}{part}.mp4{end}" for part in ("", "_step2") for end in ("", ".json"))
    # Later predictions are nearer to the result.
    expected = read_video(finished.videos[0].path).frames_THWC.float()
    late = generate(stopping(world, tmp_path / "late", sampling__stop_at=str(STEPS - 1))).videos[0].path
    errors = [(frames - expected).square().mean(), (read_video(late).frames_THWC.float() - expected).square().mean()]
    assert errors[1] < errors[0]


@pytest.mark.slow
def test_what_has_stopped_once_stops_later_and_not_earlier(world, tmp_path, whole):
    generate(stopping(world, tmp_path))
    result = generate(stopping(world, tmp_path, sampling__stop_at="3"))
    assert (result.model_evaluations, steps_in(tmp_path / STATE)) == (2, "3")
    with pytest.raises(RequestError, match=r"sampling\.stop_at=1 is over: .* was saved after step 3"):
        generate(stopping(world, tmp_path, sampling__stop_at="1"))
    finished, _ = go_on(tmp_path / STATE)
    assert finished.videos[0].path.read_bytes() == whole
