"""Videos from Python: the same bits as from the command line, and what is in memory, on disk and in a notebook."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_stages import small_stages
from tiny_world import DEMO_SIZES, World

from opensora_cli import Pipeline, Video, generate
from opensora_cli.cli import app
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.engine.generate import run as engine
from opensora_cli.media.read import read_video

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def _without_estimates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
        yield


@pytest.fixture(scope="module")
def new_pipeline(world: World) -> Callable[..., Pipeline]:
    def make(**options: object) -> Pipeline:
        flags = {"weights": world.demo, "steps": 2, "threads": 1, "num_frames": 5, **options}
        return Pipeline("demo", set=DEMO_SIZES, **flags)  # type: ignore[arg-type]  # what a caller may get wrong, too

    return make


@pytest.fixture(scope="module")
def video(new_pipeline: Callable[..., Pipeline]) -> Video:
    return new_pipeline()("raining, sea", seed=7)


def test_a_second_call_gives_the_bits_of_the_command_line(
    world: World, new_pipeline: Callable[..., Pipeline], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [part for key, value in DEMO_SIZES.items() for part in ("--set", f"{key}={value}")]
    options = ["--model", "demo", "--weights", str(world.demo), "--steps", "2", "--threads", "1", "--num-frames", "5"]
    given = ["raining, sea", "--ref", str(world.picture), "--seed", "8", "--out", str(tmp_path / "typed")]
    assert app.main(["generate", *given, *options, *sizes, "--json"]) == 0
    typed = json.loads(capsys.readouterr().out)
    with new_pipeline() as pipe:
        first = pipe("raining, sea", seed=7)
        second = pipe("raining, sea", ref=world.picture, seed=8)
    assert "load" in first.report.timings_s
    assert "load" not in second.report.timings_s
    assert second.report.given_frames_psnr_db == typed["outputs"][0]["given_frames_psnr_db"]
    path = second.save(tmp_path / "called")
    [of_command] = [Path(output["path"]) for output in typed["outputs"]]
    assert path.read_bytes() == of_command.read_bytes()
    documents = [json.loads(Path(f"{file}.json").read_text()) for file in (path, of_command)]
    for document in documents:
        document["settings"]["output"].pop("path")
    for key in documents[0].keys() - {"timings_s", "peak_resident_gib", "threads"}:
        assert documents[0][key] == documents[1][key]
    assert documents[0].keys() == documents[1].keys()


def test_calls_and_closing_wait_for_a_call_of_another_thread(
    new_pipeline: Callable[..., Pipeline], video: Video, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, inside, others, ended = new_pipeline(), 0, [], []

    def hold(*_: object, **__: object) -> object:
        nonlocal inside
        inside += 1
        if inside == 1:
            for ask in (lambda: pipe("raining, sea"), pipe.close):
                others.append(threading.Thread(target=lambda ask=ask: ended.append(ask())))
                others[-1].start()
            time.sleep(0.2)
            assert (inside, ended) == (1, [])
            pipe("raining, sea")  # as from a function that is called with its progress
        return video._held, video._request_sha256

    monkeypatch.setattr(engine, "hold_from_request", hold)
    pipe("raining, sea")
    for other in others:
        other.join(10)
    assert (inside, len(ended)) == (3, 2)


def test_what_a_video_is(video: Video) -> None:
    assert (video.frames.shape, video.frames.dtype) == ((5, 64, 64, 3), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        video.frames[0] = 0
    assert (video.seed, video.fps, video.settings.sampling.seed) == (7, 12, 7)
    assert video.report.given_frames_psnr_db is None
    assert video.report.timings_s.keys() == {"load", "text", "denoise", "decode"}
    assert video.report.peak_memory_gib["peak_resident_gib"] > 0
    assert repr(video) == "<Video 'raining, sea': 64x64, 5 frames at 12 fps, seed 7>"


def test_saving_keeps_what_is_there(video: Video, new_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    path = video.save(tmp_path / "sea.mp4")
    assert path == tmp_path / "sea.mp4"
    assert read_video(path).frames_THWC.shape == (5, 64, 64, 3)
    written = path.stat().st_mtime_ns
    assert video.save(path).stat().st_mtime_ns == written
    other = new_pipeline()("raining, sea", seed=8)
    with pytest.raises(OutputError, match="exists already"):
        other.save(path)
    before = path.read_bytes()
    assert other.save(path, overwrite=True).read_bytes() != before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["sea.mp4", "sea.mp4.json"]
    assert video.save(tmp_path / "sea.gif").read_bytes().startswith(b"GIF8")
    with pytest.raises(RequestError, match=r"output\.path=.*must end in"):
        video.save(tmp_path / "sea.mov")


def test_a_notebook_plays_it(video: Video) -> None:
    played = r'<video controls autoplay loop muted width="128" src="data:video/mp4;base64,[\w+/=]+">'
    assert re.match(played, video._repr_html_())
    frames_THWC = video._held.frames_THWC
    for frames, kind, size in (
        (frames_THWC[:1], "png", 'width="128" '),
        (frames_THWC[:, :63], "gif", 'width="128" '),
        (frames_THWC[:1].repeat(1, 3, 1, 1), "png", ""),
    ):
        shown = Video(replace(video._held, pieces=(frames,)), video._request_sha256)
        assert shown._repr_html_().startswith(f'<img {size}src="data:image/{kind};base64,')


def test_progress_is_called_and_what_it_raises_ends_the_call(
    new_pipeline: Callable[..., Pipeline], video: Video
) -> None:
    seen: list[tuple[str, int, int | None, str]] = []

    def watch(progress: tuple[str, int, int | None, str]) -> None:
        seen.append(progress)
        if seen.count(progress) == 1 and progress[:2] == ("denoise", 1):
            raise TimeoutError

    with new_pipeline(progress=watch) as pipe:
        with pytest.raises(TimeoutError):
            pipe("raining, sea", seed=7)
        del seen[:-1]
        assert np.array_equal(pipe("raining, sea", seed=7).frames, video.frames)
    evaluations = [progress[1:] for progress in seen[1:] if progress[0] == "denoise"]
    assert evaluations == [(done, 4, "evaluations") for done in range(5)]


def test_references_in_memory(new_pipeline: Callable[..., Pipeline], world: World) -> None:
    """A reference gives the same video as its file."""
    picture = Image.open(world.picture)
    pixels = np.asarray(picture.convert("RGB"))
    with new_pipeline() as pipe:
        expected = pipe("sea", ref=world.picture, seed=3).frames
        for given in (picture, pixels, torch.from_numpy(pixels.copy())):
            assert np.array_equal(pipe("sea", ref=given, seed=3).frames, expected)
        clip = pipe("sea", num_frames=9, seed=1)
        moving, again = (
            pipe("sea", ref=given, cond="v2v_head", num_frames=13, seed=3) for given in (clip, clip.frames)
        )
        assert np.array_equal(moving.frames, again.frames)
        assert np.array_equal(read_video(moving.settings.condition.references[0]).frames_THWC.numpy(), clip.frames)


@pytest.mark.parametrize("given", [np.zeros((8, 8)), np.zeros((8, 8, 3), np.float32), 7, {"a": 1}])
def test_other_references_are_rejected(new_pipeline: Callable[..., Pipeline], given: object) -> None:
    with pytest.raises(RequestError, match="is not a reference: give a path, a PIL picture"):
        new_pipeline()("sea", ref=given)


def test_errors_have_their_hint(new_pipeline: Callable[..., Pipeline]) -> None:
    with pytest.raises(RequestError) as caught:
        new_pipeline()("sea", num_frame=5)  # type: ignore[call-arg]
    assert str(caught.value) == f"{caught.value.message}: {caught.value.hint}"


def test_what_is_no_option_is_refused_with_the_nearest(new_pipeline: Callable[..., Pipeline]) -> None:
    with pytest.raises(RequestError, match=r"video\.num_frames=x must be a whole number \(from num_frames\)"):
        new_pipeline()("sea", num_frames="x")
    for name in ("model", "num_samples", "resume", "save_state_every", "preview_every"):
        with pytest.raises(RequestError, match=name):
            new_pipeline()("sea", **{name: 2})  # type: ignore[arg-type]


def test_settings_of_a_call_win_over_those_of_the_pipeline(world: World, tmp_path: Path, video: Video) -> None:
    sidecar = Path(f"{video.save(tmp_path / 'sea.mp4')}.json")
    again = generate(from_=sidecar, seed=9, set={"sampling.flow_shift": 2}, num_frames=1, weights=str(world.demo))
    assert (again.seed, len(again.frames)) == (9, 1)
    assert again.settings.sampling.flow_shift == 2
    assert again.settings.prompt == "raining, sea"


def test_a_picture_is_the_first_frame_of_its_sampled_clip(
    world: World, new_pipeline: Callable[..., Pipeline], video: Video, tmp_path: Path
) -> None:
    pipe = new_pipeline(num_frames=1)
    picture = pipe("raining, sea", seed=7, set={"video.picture_frames": 5})
    assert np.array_equal(picture.frames, video.frames[:1])
    alone = pipe("raining, sea", seed=7, set={"video.picture_frames": 1})
    assert not np.array_equal(alone.frames, picture.frames)
    again = generate(from_=Path(f"{picture.save(tmp_path / 'sea.png')}.json"), weights=str(world.demo))
    assert np.array_equal(again.frames, picture.frames)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, opensora_cli; print('torch' in sys.modules, hasattr(opensora_cli, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
