"""The benchmark of the demo model's quality: its reader, its batches, its figures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_world import World, demo_settings, make_world

import demo_quality
import scene_reader
from breakups import is_broken, lowest_steadiness
from clip_quality import detail, ssim
from demo_world.english_captions import SPEED_WORDS
from demo_world.scenes import (
    Colour,
    Direction,
    Place,
    Scene,
    Shape,
    Speed,
    Thing,
    Time,
    Weather,
    is_held_out,
    render_scene,
    sample_scene,
)
from measured_scenes import scene_set
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import CheckpointError, OsoraError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.request import with_mode
from quality_measures import is_hard


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def plan(world: World) -> Plan:
    settings = demo_settings(world, Path("unused"), sampling__num_inference_steps="3", sampling__guidance_scale="4")
    return make_plan(with_mode(settings, SilentReporter()))


EVERY = scene_reader.frames_a_second(33, 12.0)


def scene(*, direction: Direction = Direction.RIGHT, thing: bool = True) -> Scene:
    moving = Thing(Shape.CAR, Colour.RED, direction, Speed.FAST)
    return Scene(Place.DESERT, Weather.SNOW, Time.SUNSET, moving if thing else None, seed=4)


def test_right_answers_say_what_the_scene_shows() -> None:
    def said(index_by_attribute: list[int]) -> list[str]:
        return [
            answers[index] for answers, index in zip(scene_reader.ANSWERS.values(), index_by_attribute, strict=True)
        ]

    assert said(scene_reader.right_answers(scene())) == ["desert", "snow", "sunset", "car", "red", "right", "fast"]
    nothing = [scene_reader.NOTHING] * 4
    assert said(scene_reader.right_answers(scene(thing=False))) == ["desert", "snow", "sunset", *nothing]


def test_training_films_only_what_the_reader_will_look_at() -> None:
    shown = scene()
    assert EVERY == 1.5
    whole = scene_reader.frames_to_read(render_scene(shown, num_frames=33)[None], fps=12.0, every=EVERY)
    few = render_scene(shown, num_frames=scene_reader.FRAMES, fps=EVERY)
    assert torch.equal(whole, scene_reader.frames_to_read(few[None], fps=EVERY, every=EVERY))
    twice_as_large = scene_reader.frames_to_read(
        render_scene(shown, size=128, num_frames=33)[None], fps=12.0, every=EVERY
    )
    assert (twice_as_large - whole).abs().mean() < 0.02
    with pytest.raises(ValueError, match="33 frames at 12 fps are needed, not 32"):
        scene_reader.frames_to_read(render_scene(shown, num_frames=32)[None], fps=12.0, every=EVERY)


def test_direction_follows_mirror_and_reversal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_reader, "degrade", lambda frames, generator: frames)
    monkeypatch.setattr(scene_reader, "sample_scene", lambda rng: scene())
    frames, answers = scene_reader.training_batch(np.random.default_rng(0), batch_size=16, every=EVERY)
    clip = render_scene(scene(), num_frames=33)[None]
    original = scene_reader.frames_to_read(clip, fps=12.0, every=EVERY)[0]
    right, left = (list(Direction).index(direction) for direction in (Direction.RIGHT, Direction.LEFT))
    wanted = [
        (original, right),
        (original.flip(3), left),
        (original.flip(0), left),
        (original.flip(0).flip(3), right),
    ]
    seen = set()
    for clip, direction in zip(frames, answers[:, 5].tolist(), strict=True):
        (kind,) = [index for index, (form, _) in enumerate(wanted) if torch.equal(form, clip)]
        assert direction == wanted[kind][1]
        seen.add(kind)
    assert seen == {0, 1, 2, 3}


def test_nothing_keeps_no_direction_in_a_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_reader, "sample_scene", lambda rng: scene(thing=False))
    _, answers = scene_reader.training_batch(np.random.default_rng(0), batch_size=8, every=EVERY)
    assert (answers[:, 3:] == torch.tensor([len(Shape), len(Colour), len(Direction), len(Speed)])).all()


def test_reader_is_never_trained_on_held_out_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Scene] = []

    def remember(shown: Scene, **options: float) -> np.ndarray:
        drawn.append(shown)
        return render_scene(shown, **options)

    monkeypatch.setattr(scene_reader, "render_scene", remember)
    scene_reader.training_batch(np.random.default_rng(3), batch_size=32, every=EVERY)
    assert len(drawn) == 32
    assert not any(is_held_out(shown) for shown in drawn)


@pytest.mark.slow
def test_reader_learns() -> None:
    said: list[str] = []
    reader = scene_reader.train_reader(EVERY, steps=64, batch_size=16, width=8, say=said.append)
    assert said[-1].startswith("reader: step 64 of 64")
    rng = np.random.default_rng(5)
    scenes = [sample_scene(rng, held_out=True) for _ in range(60)]
    clips = np.stack([render_scene(shown, num_frames=33) for shown in scenes])
    read = reader.read(clips, fps=12.0)
    shares = scene_reader.accuracy(read, scenes)
    assert shares["time"] > 0.7  # a third by chance
    assert shares["mean"] == pytest.approx(np.mean([shares[name] for name in scene_reader.ANSWERS]))


def test_reader_comes_back_from_its_file(tmp_path: Path) -> None:
    reader = scene_reader.Reader(EVERY, width=4).eval()
    clips = render_scene(scene(), num_frames=33)[None]
    scene_reader.save_reader(reader, tmp_path / "reader.pt")
    read = reader.read(clips, fps=12.0)
    loaded = scene_reader.load_reader(tmp_path / "reader.pt")
    assert loaded.every == EVERY
    assert torch.equal(loaded.read(clips, fps=12.0), read)
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"broken\.pt is not a reader"):
        scene_reader.load_reader(tmp_path / "broken.pt")


def test_detail_is_lost_by_blurring_alone() -> None:
    clips = np.stack([render_scene(scene()), render_scene(scene(direction=Direction.LEFT))])
    blurred = (clips[:, :, 1:].astype(int) + clips[:, :, :-1]) // 2
    assert detail(blurred.astype(np.uint8)) < 0.9 * detail(clips)
    assert detail(clips[:, :, ::-1].copy()) == pytest.approx(detail(clips))


def test_similarity_falls_with_noise() -> None:
    clips = np.stack([render_scene(scene())])
    noisy = (clips + np.random.default_rng(0).normal(0, 20, clips.shape)).clip(0, 255).astype(np.uint8)
    assert ssim(clips, clips) == pytest.approx(1.0)
    assert 0.1 < ssim(noisy, clips) < 0.8


def test_intervals_are_those_of_wilson() -> None:
    # For 81 of 263, as in Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I.
    assert scene_reader.confidence_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert scene_reader.confidence_interval(1.0, 200) == pytest.approx((0.9812, 1.0), abs=1e-4)
    assert scene_reader.confidence_interval(0.0, 20)[0] == 0.0


def test_captions_leave_nothing_to_chance() -> None:
    scenes, prompts = scene_set(40, seed=0, part=1)
    assert all(is_held_out(shown) for shown in scenes)
    for shown, prompt in zip(scenes, prompts, strict=True):
        assert shown.thing is not None
        words = set(prompt.replace(",", "").split())
        assert {shown.thing.colour, shown.thing.direction} <= words
        assert words & set(SPEED_WORDS[shown.thing.speed])
    assert scenes == scene_set(40, seed=0, part=1)[0]
    assert scenes[0] not in scene_set(40, seed=0, part=2)[0]


def test_only_a_thing_that_changes_its_outline_is_broken() -> None:
    things = [Thing(shape, colour, Direction.LEFT, Speed.FAST) for shape, colour in zip(Shape, Colour, strict=True)]
    scenes = [Scene(Place.SEA, Weather.RAIN, Time.SUNSET, thing, seed) for thing in things for seed in range(2)]
    clips = [render_scene(each, size=128, num_frames=9) for each in scenes]
    lowest = lowest_steadiness(clips[::2], scenes[::2])
    for clip, each in zip(clips[1::2], scenes[1::2], strict=True):
        assert not is_broken(clip, each, lowest)
        torn = clip.copy()
        torn[4] = np.where(np.arange(128)[:, None, None] % 16 < 8, np.roll(clip[4], 32, axis=1), clip[4])
        assert is_broken(torn, each, lowest)
        vanished = clip.copy()
        vanished[3] = 0
        assert is_broken(vanished, each, lowest)


@pytest.mark.slow
def test_whole_benchmark_in_small(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "report.json"
    scene_reader.save_reader(scene_reader.Reader(EVERY, width=4), tmp_path / "reader.pt")
    sizes = demo_settings(world, tmp_path).model_dump(mode="json")
    overrides = [
        f"{section}.{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for section in ("model", "vae", "text")
        for key, value in sizes[section].items()
        if not isinstance(value, dict)
    ]
    run: list[list[str]] = []
    timed = {"seconds": 70.0, "stages_s": {"load": 1.0}, "cores": 2}
    monkeypatch.setattr(demo_quality, "measure_seconds", lambda arguments: run.append(arguments) or timed)
    arguments = ["--weights", str(world.demo), "--reader", str(tmp_path / "reader.pt"), "--json", str(report)]
    arguments += ["--clips", "3", "--prompts", "3", "--pictures", "2", "--given", "2", "--reader-clips", "4"]
    arguments += ["--seeds", "2", "--steps", "2", "--guidance-scale", "1", "--guidance-scale", "4"]
    arguments += ["--mode", "exact", "--mode", "fast"]
    assert demo_quality.main([*arguments, *(part for each in overrides for part in ("--set", each))]) == 0

    found = json.loads(report.read_text())
    assert found["vae"]["clips"] == 3
    assert 0 < found["vae"]["ssim"] < 1
    assert [(trial["mode"], trial["guidance_scale"]) for trial in found["prompts"]] == [
        ("exact", 1.0), ("exact", 4.0), ("fast", 1.0), ("fast", 4.0),
    ]  # fmt: skip
    assert [trial["model_evaluations"] for trial in found["prompts"][:2]] == [2, 4]
    hard = [is_hard(shown) for shown in scene_set(3, seed=0, part=1)[0]]
    for trial in found["prompts"]:
        assert (trial["videos"], trial["hard"]["videos"]) == (6, 2 * sum(hard))
        assert set(trial["broken"]) <= set(range(6))
        assert 0 < trial["diversity"] < 1
        assert trial["detail_of_renders"] > 0
        for name, (low, high) in trial["intervals"].items():
            assert low - 1e-9 <= trial["accuracy"][name] <= high + 1e-9
    assert found["pictures"]["accuracy"].keys() == {*scene_reader.STILL, "mean"}
    assert found["conditions"].keys() == CONDITION_MODES.keys()
    assert all(each["lowest_psnr_db"] <= each["psnr_db"] for name, each in found["conditions"].items() if name != "t2v")
    assert [each[:2] for each in run] == 2 * [["--weights", str(world.demo)]]
    assert [each[-1] for each in run][1] == "sampling.fast=true"
    shown = capsys.readouterr().out
    assert "generate      fast: 70.0 s (goal: at most 15, missed) on 2 cores" in shown
    assert shown.count("comes apart") == 4


@pytest.mark.slow
def test_failed_command_is_not_timed() -> None:
    with pytest.raises(OsoraError, match=r"exit code 2: .*sampling\.seeed"):
        demo_quality.measure_seconds(["--set", "sampling.seeed=1"])


def test_problems_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_quality.main(["--set", "sampling.seeed=1"]) == 2
    assert "sampling.seeed (from --set) is not a setting" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        demo_quality.parse(["--prompts", "0"])
    assert demo_quality.parse([]).part == list(demo_quality.PARTS)
