"""A procedural world of captioned clips, rendered on the fly from a seed.

A scene is a place under some weather at some time of day, with or without one moving thing. `sample_scene` samples one,
and `render_scene` renders it. Combinations chosen by a hash are held out: training never sees them.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from demo_world import painting

_T = TypeVar("_T")


class Place(StrEnum):
    """Place."""

    SEA = "sea"
    CITY = "city"
    FOREST = "forest"
    DESERT = "desert"


class Weather(StrEnum):
    """Weather."""

    CLEAR = "clear"
    RAIN = "rain"
    SNOW = "snow"


class Time(StrEnum):
    """Time of day."""

    DAY = "day"
    SUNSET = "sunset"
    NIGHT = "night"


class Shape(StrEnum):
    """Shape of the moving thing."""

    BALL = "ball"
    BOAT = "boat"
    BIRD = "bird"
    CAR = "car"


class Colour(StrEnum):
    """Color of the moving thing."""

    RED = "red"
    YELLOW = "yellow"
    GREEN = "green"
    BLUE = "blue"


class Direction(StrEnum):
    """Direction of the moving thing."""

    LEFT = "left"
    RIGHT = "right"


class Speed(StrEnum):
    """Speed of the moving thing: 0.1 or 0.26 of the picture's width in a second."""

    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True)
class Thing:
    """One moving thing."""

    shape: Shape
    colour: Colour
    direction: Direction
    speed: Speed


@dataclass(frozen=True)
class Scene:
    """Everything that a clip shows; `seed` determines the details that no caption mentions."""

    place: Place
    weather: Weather
    time: Time
    thing: Thing | None
    seed: int


def is_held_out(scene: Scene) -> bool:
    """Return whether this combination is held out of training: about one in eight of those with a thing."""
    if scene.thing is None:
        return False
    thing = scene.thing
    name = "/".join((scene.place, scene.weather, scene.time, thing.shape, thing.colour, thing.direction, thing.speed))
    return hashlib.sha256(name.encode()).digest()[0] < 32


def sample_scene(rng: Generator, *, held_out: bool = False, thing_share: float = 0.85) -> Scene:
    """Sample a scene, uniformly over places, weathers, times and things.

    `held_out` samples only combinations that training never sees (True) or only those that it may see (False).
    `thing_share` is the probability of a moving thing; held-out scenes always have one.
    """
    while True:
        thing = None
        if held_out or rng.random() < thing_share:
            thing = Thing(
                shape=pick(rng, tuple(Shape)),
                colour=pick(rng, tuple(Colour)),
                direction=pick(rng, tuple(Direction)),
                speed=pick(rng, tuple(Speed)),
            )
        scene = Scene(
            place=pick(rng, tuple(Place)),
            weather=pick(rng, tuple(Weather)),
            time=pick(rng, tuple(Time)),
            thing=thing,
            seed=int(rng.integers(2**31)),
        )
        if is_held_out(scene) == held_out:
            return scene


def render_scene(scene: Scene, *, size: int = 64, num_frames: int = 17, fps: float = 12.0) -> NDArray[np.uint8]:
    """Render a scene as uint8 RGB (num_frames, size, size, 3); `size` is 32 or more.

    `fps` determines how far things move between frames.
    """
    rng = np.random.default_rng(scene.seed)
    canvas = painting.Canvas(size=size, seconds=np.arange(num_frames) / fps)
    frames = painting.paint_place(canvas, scene.place, scene.time, scene.weather, rng)
    precipitation = painting.Precipitation(canvas, scene.weather, rng)
    precipitation.paint(frames, near=False)
    if scene.thing is not None:
        thing = scene.thing
        painting.paint_thing(
            frames,
            canvas,
            shape=thing.shape,
            colour=thing.colour,
            heading=1.0 if thing.direction is Direction.RIGHT else -1.0,
            fast=thing.speed is Speed.FAST,
            night=scene.time is Time.NIGHT,
            rng=rng,
        )
    precipitation.paint(frames, near=True)
    return (frames * 255.0 + 0.5).clip(0, 255).astype(np.uint8)


def pick(rng: Generator, options: tuple[_T, ...]) -> _T:
    """Return one of them, each as likely."""
    return options[int(rng.integers(len(options)))]
