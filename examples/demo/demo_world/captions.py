"""Captions of the procedural world.

What a caption leaves out is either absent (no thing, clear weather) or random (time, colour, direction, speed), so that
the world answers short prompts too.
"""

from numpy.random import Generator

from demo_world.english_captions import (
    PLACE_WORDS,
    SHAPE_WORDS,
    SPEED_WORDS,
    TIME_WORDS,
    Mentions,
    english_caption,
    english_words,
)
from demo_world.scenes import Colour, Direction, Scene, pick
from demo_world.translated_captions import Language, translated_caption, translated_words

_ENGLISH_SHARE = 0.76
SYNONYMS = {
    "day": ("sunny", "sunshine", "daylight", "morning"),
    "sunset": ("sunrise", "dawn"),
    "night": ("nighttime", "moonlight"),
    "rain": ("rains", "rainfall", "drizzle"),
    "snow": ("snows", "snowfall", "blizzard"),
    "forest": ("jungle", "woodland"),
    "city": ("downtown",),
    "boat": ("sailboat", "yacht", "ferry", "vessel"),
    "bird": ("seagull", "sparrow", "eagle", "parrot"),
    "car": ("taxi", "vehicle"),
    "ball": ("sphere",),
    "moves": ("floats", "drifts", "glides"),
    "moving": ("floating", "drifting", "gliding"),
    "slowly": ("slow",),
    "quickly": ("quick", "rapidly"),
}
"""Words of captions, each with words of prompts that tokenizers replace with it."""


def vocabulary() -> dict[str, list[str]]:
    """Return what the world knows, by kind, in the usual English words, for hints to users."""
    return {
        "places": [words[0] for words in PLACE_WORDS.values()],
        "weather": ["clear", "raining", "snowing"],
        "times": [words[0][0] for words in TIME_WORDS.values()],
        "things": [words[0] for words in SHAPE_WORDS.values()],
        "colors": [str(colour) for colour in Colour],
        "directions": [str(direction) for direction in Direction],
        "speeds": [words[0] for words in SPEED_WORDS.values()],
    }


def known_words() -> list[str]:
    """Return every word that captions are made of, sorted."""
    return sorted({*english_words(), *Colour, *Direction, *translated_words()})


def caption_scene(scene: Scene, rng: Generator, *, complete: bool = False, language: Language | None = None) -> str:
    """Describe a scene in words, in English unless another `language` is given.

    `rng` chooses phrasing, word order and what is left out. A `complete` caption mentions place, weather, time and the
    thing's colour, direction and speed.
    """
    mention = Mentions.sample(scene, rng, complete=complete)
    if language is None:
        return english_caption(scene, mention, rng)
    return translated_caption(language, scene, mention, rng)


def sample_caption(scene: Scene, rng: Generator) -> str:
    """Describe a scene in English, or now and then in another language."""
    language = None if rng.random() < _ENGLISH_SHARE else pick(rng, tuple(Language))
    return caption_scene(scene, rng, language=language)
