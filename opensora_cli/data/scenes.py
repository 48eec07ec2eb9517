"""A procedural world of captioned clips, rendered on the fly from a seed.

A scene is a place under some weather at some time of day, with or without one moving thing. `sample_scene` samples one,
`render_scene` renders it, and `caption_scene` describes it: several phrasings and word orders for each. What a
caption leaves out is either absent (no thing, clear weather) or random (time, colour, direction, speed), so
that the world answers short prompts too. Combinations chosen by a hash are held out: training never sees them.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from opensora_cli.data import painting

_T = TypeVar("_T")

# Apart from the streams of one seed that order an epoch.
_SCENES = 5
_NAME = re.compile(r"(scene|held-out):(\d+)/(\d+)")


class Place(StrEnum):
    """Where it is."""

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
    """What moves."""

    BALL = "ball"
    BOAT = "boat"
    BIRD = "bird"
    CAR = "car"


class Colour(StrEnum):
    """Its colour."""

    RED = "red"
    YELLOW = "yellow"
    GREEN = "green"
    BLUE = "blue"


class Direction(StrEnum):
    """Where it goes."""

    LEFT = "left"
    RIGHT = "right"


class Speed(StrEnum):
    """How fast: a quarter or half of the picture's width in 17 frames at 12 fps."""

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


# Words that captions use, the first of each row being the usual one.
PLACE_WORDS = {
    Place.SEA: ("sea", "ocean"),
    Place.CITY: ("city", "town"),
    Place.FOREST: ("forest", "woods"),
    Place.DESERT: ("desert", "dunes"),
}
WEATHER_WORDS = {
    Weather.CLEAR: (("clear", "clear weather", "clear sky"), ("clear", "sunny"), ("under a clear sky",)),
    Weather.RAIN: (("raining", "rain", "rainy", "heavy rain"), ("rainy", "raining"), ("in the rain", "in heavy rain")),
    Weather.SNOW: (("snowing", "snow", "snowy", "heavy snow"), ("snowy", "snowing"), ("in the snow", "in heavy snow")),
}  # as a tag, before a place, after a place
TIME_WORDS = {
    Time.DAY: (("day", "daytime", "noon"), ("by day", "during the day", "at noon")),
    Time.SUNSET: (("sunset", "dusk", "evening"), ("at sunset", "at dusk", "in the evening")),
    Time.NIGHT: (("night", "dark night", "midnight"), ("at night", "at midnight", "in the night")),
}  # as a tag, in a sentence
SHAPE_WORDS = {
    Shape.BALL: ("ball",),
    Shape.BOAT: ("boat", "ship"),
    Shape.BIRD: ("bird",),
    Shape.CAR: ("car",),
}
SPEED_WORDS = {Speed.SLOW: ("slowly",), Speed.FAST: ("fast", "quickly")}
MOTION_VERBS = {
    Shape.BALL: ("moving", "going", "rolling"),
    Shape.BOAT: ("moving", "going", "sailing"),
    Shape.BIRD: ("moving", "going", "flying"),
    Shape.CAR: ("moving", "going", "driving"),
}
MOTION_PRESENT = {
    "moving": "moves",
    "going": "goes",
    "rolling": "rolls",
    "sailing": "sails",
    "flying": "flies",
    "driving": "drives",
}
FILLERS = ("a", "an", "the", "with", "in", "on", "at", "of", "and", "to", "there", "is", "video", "scene", "over", "it")


def vocabulary() -> dict[str, list[str]]:
    """Return what the world knows, by kind, in the usual words, for hints to users."""
    return {
        "places": [words[0] for words in PLACE_WORDS.values()],
        "weather": ["clear", "raining", "snowing"],
        "times": [words[0][0] for words in TIME_WORDS.values()],
        "things": [words[0] for words in SHAPE_WORDS.values()],
        "colours": [str(colour) for colour in Colour],
        "directions": [str(direction) for direction in Direction],
        "speeds": [words[0] for words in SPEED_WORDS.values()],
    }


def known_words() -> list[str]:
    """Return every word that captions are made of, sorted."""
    phrases: list[str] = [*FILLERS, "during", "by", "under"]
    for table in (PLACE_WORDS, SHAPE_WORDS, SPEED_WORDS, MOTION_VERBS):
        for row in table.values():
            phrases += row
    for rows in (*WEATHER_WORDS.values(), *TIME_WORDS.values()):
        phrases += [phrase for row in rows for phrase in row]
    phrases += [*MOTION_PRESENT.values(), *Colour, *Direction]
    return sorted({word for phrase in phrases for word in phrase.split()})


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
                shape=_pick(rng, tuple(Shape)),
                colour=_pick(rng, tuple(Colour)),
                direction=_pick(rng, tuple(Direction)),
                speed=_pick(rng, tuple(Speed)),
            )
        scene = Scene(
            place=_pick(rng, tuple(Place)),
            weather=_pick(rng, tuple(Weather)),
            time=_pick(rng, tuple(Time)),
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
    painting.paint_weather(frames, canvas, scene.weather, rng)
    return (frames * 255.0 + 0.5).clip(0, 255).astype(np.uint8)


def caption_scene(scene: Scene, rng: Generator, *, complete: bool = False) -> str:
    """Describe a scene in words; `rng` chooses phrasing, word order and what is left out.

    A `complete` caption mentions place, weather, time and the thing's colour, direction and speed.
    """
    mention = _Mentions.sample(scene, rng, complete=complete)
    return _tags(scene, mention, rng) if rng.random() < 0.45 else _sentence(scene, mention, rng)


@dataclass(frozen=True)
class _Mentions:
    place: bool
    weather: bool
    time: bool
    colour: bool
    direction: bool
    speed: bool

    @classmethod
    def sample(cls, scene: Scene, rng: Generator, *, complete: bool) -> "_Mentions":
        numbers = rng.random(6)
        # Rain and snow are always mentioned, so that a caption without weather means a clear sky.
        return cls(
            place=complete or scene.thing is None or numbers[0] < 0.97,
            weather=complete or scene.weather is not Weather.CLEAR or bool(numbers[1] < 0.5),
            time=complete or bool(numbers[2] < 0.85),
            colour=complete or bool(numbers[3] < 0.92),
            direction=complete or bool(numbers[4] < 0.9),
            speed=complete or bool(numbers[5] < 0.5),
        )


def _tags(scene: Scene, mention: _Mentions, rng: Generator) -> str:
    parts = []
    if mention.place:
        parts.append(_pick(rng, PLACE_WORDS[scene.place]))
    if mention.weather:
        parts.append(_pick(rng, WEATHER_WORDS[scene.weather][0]))
    if mention.time:
        parts.append(_pick(rng, TIME_WORDS[scene.time][0]))
    if scene.thing is not None:
        parts.append(_thing_phrase(scene.thing, mention, rng, article=rng.random() < 0.4))
    order = rng.permutation(len(parts))
    return ", ".join(parts[i] for i in order)


def _sentence(scene: Scene, mention: _Mentions, rng: Generator) -> str:
    place, where, when = _place_phrases(scene, mention, rng)
    if scene.thing is None:
        text = _pick(rng, ("a {}", "{}", "the {}", "a video of a {}", "a scene of a {}")).format(place)
        return f"{when}, {text}" if when and rng.random() < 0.3 else f"{text} {when}".strip()
    if rng.random() < 0.5:
        thing = _thing_phrase(scene.thing, mention, rng, article=True)
        if mention.place and rng.random() < 0.5:
            parts = [_pick(rng, ("a {}", "the {}", "{}")).format(place), when, f"with {thing}"]
        else:
            parts = [thing, where, when]
        text = " ".join(part for part in parts if part)
    else:
        text = " ".join(part for part in (_thing_clause(scene.thing, mention, rng), where, when) if part)
    if when and rng.random() < 0.25:
        text = f"{when}, {text.replace(f' {when}', '')}"
    return text


def _place_phrases(scene: Scene, mention: _Mentions, rng: Generator) -> tuple[str, str, str]:
    """Return the place with its weather ("rainy sea"), the same with a preposition, and the time ("at night")."""
    _, before, after = WEATHER_WORDS[scene.weather]
    when = _pick(rng, TIME_WORDS[scene.time][1]) if mention.time else ""
    if not mention.place:
        return "", _pick(rng, after) if mention.weather else "", when
    place = _pick(rng, PLACE_WORDS[scene.place])
    preposition = _pick(rng, ("on the", "over the")) if scene.place is Place.SEA else "in the"
    where = f"{preposition} {place}"
    if mention.weather:
        if rng.random() < 0.5:
            adjective = _pick(rng, before)
            place, where = f"{adjective} {place}", f"{preposition} {adjective} {place}"
        else:
            behind = _pick(rng, after)
            place, where = f"{place} {behind}", f"{where} {behind}"
    return place, where, when


def _thing_phrase(thing: Thing, mention: _Mentions, rng: Generator, *, article: bool) -> str:
    """Return for instance "a red boat moving left slowly"."""
    words = ["a"] if article else []
    if mention.colour:
        words.append(thing.colour)
    words.append(_pick(rng, SHAPE_WORDS[thing.shape]))
    if mention.direction:
        words.append(_motion(thing, mention, _pick(rng, MOTION_VERBS[thing.shape]), rng))
    elif mention.speed:
        words += ["moving", _pick(rng, SPEED_WORDS[thing.speed])]
    return " ".join(words)


def _thing_clause(thing: Thing, mention: _Mentions, rng: Generator) -> str:
    """Return for instance "a red boat sails quickly to the left"."""
    colour = f"{thing.colour} " if mention.colour else ""
    verb = MOTION_PRESENT[_pick(rng, MOTION_VERBS[thing.shape])]
    subject = f"a {colour}{_pick(rng, SHAPE_WORDS[thing.shape])}"
    if mention.direction:
        return f"{subject} {_motion(thing, mention, verb, rng)}"
    return f"{subject} {verb} {_pick(rng, SPEED_WORDS[thing.speed])}" if mention.speed else f"{subject} {verb}"


def _motion(thing: Thing, mention: _Mentions, verb: str, rng: Generator) -> str:
    towards = _pick(rng, (str(thing.direction), f"to the {thing.direction}"))
    if not mention.speed:
        return f"{verb} {towards}"
    speed = _pick(rng, SPEED_WORDS[thing.speed])
    return f"{verb} {towards} {speed}" if rng.random() < 0.6 else f"{verb} {speed} {towards}"


def _pick(rng: Generator, options: tuple[_T, ...]) -> _T:
    return options[int(rng.integers(len(options)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneClip:
    """One clip of the procedural world, by its seed and number."""

    seed: int
    number: int
    held_out: bool = False

    @classmethod
    def named(cls, name: str) -> "SceneClip | None":
        """Return the clip of this `name`; None: it is not the name of one."""
        match = _NAME.fullmatch(name)
        return cls(seed=int(match[2]), number=int(match[3]), held_out=match[1] == "held-out") if match else None

    @property
    def name(self) -> str:
        """What stands for a path: `scene:SEED/NUMBER`, or `held-out:SEED/NUMBER`."""
        return f"{'held-out' if self.held_out else 'scene'}:{self.seed}/{self.number}"

    @property
    def caption(self) -> str:
        """The scene in words."""
        return self._scene()[1]

    def render(self, *, size: int, num_frames: int, fps: float) -> NDArray[np.uint8]:
        """Return the frames (num_frames, size, size, 3); see `render_scene`."""
        return render_scene(self._scene()[0], size=size, num_frames=num_frames, fps=fps)

    def _scene(self) -> tuple[Scene, str]:
        rng = np.random.default_rng((self.seed, self.number, _SCENES))
        scene = sample_scene(rng, held_out=self.held_out)
        return scene, caption_scene(scene, rng)
