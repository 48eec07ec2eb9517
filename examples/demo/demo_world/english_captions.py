"""Captions of the procedural world in English: several phrasings and word orders for each scene."""

from collections.abc import Iterable
from dataclasses import dataclass

from numpy.random import Generator

from demo_world.scenes import Place, Scene, Shape, Speed, Thing, Time, Weather, pick

# Words that captions use, the first of each row being the usual one.
PLACE_WORDS = {
    Place.SEA: ("sea", "ocean"),
    Place.CITY: ("city", "town"),
    Place.FOREST: ("forest", "woods"),
    Place.DESERT: ("desert", "dunes"),
}
WEATHER_WORDS = {
    Weather.CLEAR: (("clear", "clear weather", "clear sky"), ("clear",), ("under a clear sky",)),
    Weather.RAIN: (
        ("raining", "rain", "rainy", "heavy rain", "storm"),
        ("rainy", "raining", "stormy"),
        ("in the rain", "in heavy rain", "in a storm"),
    ),
    Weather.SNOW: (("snowing", "snow", "snowy", "heavy snow"), ("snowy", "snowing"), ("in the snow", "in heavy snow")),
}  # as a tag, before a place, after a place
TIME_WORDS = {
    Time.DAY: (("day", "daytime", "noon"), ("by day", "during the day", "at noon")),
    Time.SUNSET: (
        ("sunset", "dusk", "evening", "twilight"),
        ("at sunset", "at dusk", "in the evening", "at twilight"),
    ),
    Time.NIGHT: (("night", "dark night", "midnight"), ("at night", "at midnight", "in the night")),
}  # as a tag, in a sentence
SHAPE_WORDS = {
    Shape.BALL: ("ball",),
    Shape.BOAT: ("boat", "ship"),
    Shape.BIRD: ("bird",),
    Shape.CAR: ("car", "automobile"),
}
SPEED_WORDS = {Speed.SLOW: ("slowly",), Speed.FAST: ("fast", "quickly")}
MOTION_VERBS = {
    Shape.BALL: ("moving", "going", "rolling"),
    Shape.BOAT: ("moving", "going", "sailing"),
    Shape.BIRD: ("moving", "going", "flying"),
    Shape.CAR: ("moving", "going", "driving"),
}
# Of one thing, and of several.
MOTION_PRESENT = {
    "moving": ("moves", "move"),
    "going": ("goes", "go"),
    "rolling": ("rolls", "roll"),
    "sailing": ("sails", "sail"),
    "flying": ("flies", "fly"),
    "driving": ("drives", "drive"),
}
FILLERS = ("a", "an", "the", "with", "in", "on", "at", "of", "and", "to", "there", "is", "video", "scene", "over", "it")
# Scenes have one thing; that a prompt speaks of several should not hide what it is.
_PLURAL_SHARE = 0.08


@dataclass(frozen=True)
class Mentions:
    """Parts of a scene that a caption mentions."""

    place: bool
    weather: bool
    time: bool
    colour: bool
    direction: bool
    speed: bool

    @classmethod
    def sample(cls, scene: Scene, rng: Generator, *, complete: bool) -> "Mentions":
        """Sample them; a `complete` caption has everything."""
        numbers = rng.random(6)
        # Rain and snow are always mentioned, so that a caption without weather means a clear sky.
        return cls(
            place=complete or scene.thing is None or bool(numbers[0] < 0.97),
            weather=complete or scene.weather is not Weather.CLEAR or bool(numbers[1] < 0.5),
            time=complete or bool(numbers[2] < 0.85),
            colour=complete or bool(numbers[3] < 0.92),
            direction=complete or bool(numbers[4] < 0.9),
            speed=complete or bool(numbers[5] < 0.5),
        )


def english_words() -> list[str]:
    """Return every word of these captions but colours and directions, perhaps more than once."""
    phrases: list[str] = [*FILLERS, "during", "by", "under"]
    for table in (PLACE_WORDS, SHAPE_WORDS, SPEED_WORDS, MOTION_VERBS):
        for row in table.values():
            phrases += row
    for rows in (*WEATHER_WORDS.values(), *TIME_WORDS.values()):
        phrases += [phrase for row in rows for phrase in row]
    phrases += [verb for verbs in MOTION_PRESENT.values() for verb in verbs]
    phrases += [f"{noun}s" for row in SHAPE_WORDS.values() for noun in row]
    return [word for phrase in phrases for word in phrase.split()]


def english_caption(scene: Scene, mention: Mentions, rng: Generator) -> str:
    """Describe what is mentioned; `rng` chooses phrasing and word order."""
    return _tags(scene, mention, rng) if rng.random() < 0.45 else _sentence(scene, mention, rng)


def _tags(scene: Scene, mention: Mentions, rng: Generator) -> str:
    parts = []
    if mention.place:
        parts.append(pick(rng, PLACE_WORDS[scene.place]))
    if mention.weather:
        parts.append(pick(rng, WEATHER_WORDS[scene.weather][0]))
    if mention.time:
        parts.append(pick(rng, TIME_WORDS[scene.time][0]))
    if scene.thing is not None:
        parts.append(_thing_phrase(scene.thing, mention, rng, article=rng.random() < 0.4))
    order = rng.permutation(len(parts))
    return ", ".join(parts[i] for i in order)


def _sentence(scene: Scene, mention: Mentions, rng: Generator) -> str:
    place, where, when = _place_phrases(scene, mention, rng)
    if scene.thing is None:
        text = pick(rng, ("a {}", "{}", "the {}", "a video of a {}", "a scene of a {}")).format(place)
        return f"{when}, {text}" if when and rng.random() < 0.3 else f"{text} {when}".strip()
    if rng.random() < 0.5:
        thing = _thing_phrase(scene.thing, mention, rng, article=True)
        if mention.place and rng.random() < 0.5:
            parts = [pick(rng, ("a {}", "the {}", "{}")).format(place), when, f"with {thing}"]
        else:
            parts = [thing, where, when]
    else:
        parts = [_thing_clause(scene.thing, mention, rng), where, when]
    first = rng.random()
    if when and first < 0.25:
        return f"{when}, {_joined(part for part in parts if part != when)}"
    if where in parts and where and first < 0.4:
        return f"{where}, {_joined(part for part in parts if part != where)}"
    return _joined(parts)


def _joined(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)


def _place_phrases(scene: Scene, mention: Mentions, rng: Generator) -> tuple[str, str, str]:
    """Return the place with its weather ("rainy sea"), the same with a preposition, and the time ("at night")."""
    _, before, after = WEATHER_WORDS[scene.weather]
    when = pick(rng, TIME_WORDS[scene.time][1]) if mention.time else ""
    if not mention.place:
        return "", pick(rng, after) if mention.weather else "", when
    place = pick(rng, PLACE_WORDS[scene.place])
    preposition = pick(rng, ("on the", "over the")) if scene.place is Place.SEA else "in the"
    where = f"{preposition} {place}"
    if mention.weather:
        if rng.random() < 0.5:
            adjective = pick(rng, before)
            place, where = f"{adjective} {place}", f"{preposition} {adjective} {place}"
        else:
            behind = pick(rng, after)
            place, where = f"{place} {behind}", f"{where} {behind}"
    return place, where, when


def _thing_phrase(thing: Thing, mention: Mentions, rng: Generator, *, article: bool) -> str:
    """Return for instance "a red boat moving left slowly"."""
    words = [_noun(thing, mention, rng, article=article, plural=rng.random() < _PLURAL_SHARE)]
    if mention.direction:
        words.append(_motion(thing, mention, pick(rng, MOTION_VERBS[thing.shape]), rng))
    elif mention.speed:
        words += ["moving", pick(rng, SPEED_WORDS[thing.speed])]
    return " ".join(words)


def _thing_clause(thing: Thing, mention: Mentions, rng: Generator) -> str:
    """Return for instance "a red boat sails quickly to the left"."""
    plural = rng.random() < _PLURAL_SHARE
    verb = MOTION_PRESENT[pick(rng, MOTION_VERBS[thing.shape])][plural]
    subject = _noun(thing, mention, rng, article=True, plural=plural)
    if mention.direction:
        return f"{subject} {_motion(thing, mention, verb, rng)}"
    return f"{subject} {verb} {pick(rng, SPEED_WORDS[thing.speed])}" if mention.speed else f"{subject} {verb}"


def _noun(thing: Thing, mention: Mentions, rng: Generator, *, article: bool, plural: bool) -> str:
    noun = pick(rng, SHAPE_WORDS[thing.shape]) + ("s" if plural else "")
    words = f"{thing.colour} {noun}" if mention.colour else noun
    if plural or not article:
        return words
    return f"an {words}" if words.startswith("auto") else f"a {words}"


def _motion(thing: Thing, mention: Mentions, verb: str, rng: Generator) -> str:
    towards = pick(rng, (str(thing.direction), f"to the {thing.direction}"))
    if not mention.speed:
        return f"{verb} {towards}"
    speed = pick(rng, SPEED_WORDS[thing.speed])
    return f"{verb} {towards} {speed}" if rng.random() < 0.6 else f"{verb} {speed} {towards}"
