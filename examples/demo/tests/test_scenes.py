"""The procedural world: what it shows, and what is held out."""

import dataclasses

import numpy as np
import pytest
from tiny_scenes import SCENE, THING, changed, sampled

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
)


def difference(one: Scene, other: Scene, **options: int) -> float:
    """Return the mean difference of two clips, in levels of 255."""
    frames = [render_scene(scene, size=32, **options).astype(float) for scene in (one, other)]
    return float(np.abs(frames[0] - frames[1]).mean())


class TestRender:
    def test_same_scene_same_pixels(self):
        for scene in sampled(12):
            assert np.array_equal(render_scene(scene, num_frames=3), render_scene(scene, num_frames=3))

    @pytest.mark.parametrize("scene", sampled(6), ids=str)
    def test_a_picture_is_the_first_frame(self, scene):
        assert np.array_equal(render_scene(scene, num_frames=1), render_scene(scene, num_frames=9)[:1])

    @pytest.mark.parametrize(
        "attributes",
        [
            *({"place": place} for place in Place if place is not SCENE.place),
            *({"weather": weather} for weather in Weather if weather is not SCENE.weather),
            *({"time": time} for time in Time if time is not SCENE.time),
            *({"shape": shape} for shape in Shape if shape is not THING.shape),
            *({"colour": colour} for colour in Colour if colour is not THING.colour),
            {"direction": Direction.LEFT},
            {"speed": Speed.FAST},
            {"thing": None},
            {"seed": 4},
        ],
        ids=str,
    )
    def test_every_attribute_is_seen(self, attributes):
        assert difference(SCENE, changed(**attributes), num_frames=9) > 0.5

    def test_the_same_picture_at_another_size(self):
        small, large = render_scene(SCENE, size=32, num_frames=1), render_scene(SCENE, size=64, num_frames=1)
        halved = large.reshape(1, 32, 2, 32, 2, 3).mean(axis=(2, 4))
        assert np.abs(small - halved).mean() < 3.0

    @pytest.mark.parametrize("shape", Shape)
    @pytest.mark.parametrize(
        ("speed", "travel", "direction", "sign"),
        [(Speed.SLOW, 0.2, Direction.LEFT, -1), (Speed.FAST, 0.52, Direction.RIGHT, 1)],
    )
    def test_things_go_where_and_as_fast_as_captions_mention(self, shape, speed, travel, direction, sign):
        scene = changed(shape=shape, speed=speed, direction=direction)
        frames, empty = (
            render_scene(each, num_frames=25).astype(float) for each in (scene, dataclasses.replace(scene, thing=None))
        )
        there = np.abs(frames - empty).max(axis=-1) > 40
        columns = np.arange(64) + 0.5
        centres = [(picture.sum(axis=0) * columns).sum() / picture.sum() / 64 for picture in there]
        assert centres[-1] - centres[0] == pytest.approx(sign * travel, abs=0.04)
        assert np.all(sign * np.diff(centres) > -0.01)

    @pytest.mark.parametrize("weather", [Weather.RAIN, Weather.SNOW])
    def test_what_falls_moves_down(self, weather):
        scene = changed(weather=weather, place=Place.CITY, time=Time.NIGHT, thing=None)
        first, second = render_scene(scene, num_frames=2).astype(float).mean(axis=-1)
        static = render_scene(dataclasses.replace(scene, weather=Weather.CLEAR), num_frames=2)
        assert np.array_equal(static[0], static[1])

        def mismatch(rows: int) -> float:
            return float(np.abs(np.roll(first, rows, axis=0) - second)[8:-8].mean())

        down, up = min(mismatch(rows) for rows in range(1, 8)), min(mismatch(-rows) for rows in range(1, 8))
        assert down < up


class TestHeldOut:
    def test_training_and_test_share_no_combination(self):
        def combinations(scenes: list[Scene]) -> set[tuple[object, ...]]:
            return {(scene.place, scene.weather, scene.time, scene.thing) for scene in scenes if scene.thing}

        seen, unseen = combinations(sampled(1500)), combinations(sampled(300, held_out=True))
        assert not seen & unseen
        assert all(is_held_out(scene) for scene in sampled(50, held_out=True))
        assert not any(is_held_out(scene) for scene in sampled(50))

    def test_about_one_in_eight_is_held_out(self):
        every = [
            Scene(place, weather, time, Thing(shape, colour, direction, speed), seed=0)
            for place in Place
            for weather in Weather
            for time in Time
            for shape in Shape
            for colour in Colour
            for direction in Direction
            for speed in Speed
        ]
        assert sum(map(is_held_out, every)) / len(every) == pytest.approx(1 / 8, abs=0.02)

    def test_an_empty_place_is_never_held_out(self):
        assert not is_held_out(changed(thing=None))

    def test_nothing_is_rare(self):
        scenes = sampled(800)
        things = [scene.thing for scene in scenes if scene.thing]
        for kind, found in (
            (Place, [scene.place for scene in scenes]),
            (Weather, [scene.weather for scene in scenes]),
            (Time, [scene.time for scene in scenes]),
            (Shape, [thing.shape for thing in things]),
            (Colour, [thing.colour for thing in things]),
            (Direction, [thing.direction for thing in things]),
            (Speed, [thing.speed for thing in things]),
        ):
            for member in kind:
                assert found.count(member) > 0.7 * len(found) / len(kind), member
        assert len(things) / len(scenes) == pytest.approx(0.85, abs=0.05)
        assert all(scene.thing is None for scene in sampled(30, thing_share=0.0))
