"""Scenes of the procedural world, for its tests."""

import dataclasses

import numpy as np

from demo_world.scenes import Colour, Direction, Place, Scene, Shape, Speed, Thing, Time, Weather, sample_scene

THING = Thing(Shape.BALL, Colour.RED, Direction.RIGHT, Speed.SLOW)
SCENE = Scene(Place.DESERT, Weather.CLEAR, Time.DAY, THING, seed=3)


def changed(**attributes: object) -> Scene:
    """Return `SCENE` with other attributes, of itself or of its thing."""
    fields = {field.name for field in dataclasses.fields(Scene)}
    of_scene = {name: value for name, value in attributes.items() if name in fields}
    of_thing = {name: value for name, value in attributes.items() if name not in fields}
    return dataclasses.replace(SCENE, **{"thing": dataclasses.replace(THING, **of_thing), **of_scene})


def sampled(count: int, **options: object) -> list[Scene]:
    rng = np.random.default_rng(1)
    return [sample_scene(rng, **options) for _ in range(count)]
