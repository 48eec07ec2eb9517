"""Captions of the procedural world."""

import numpy as np
import pytest
from tiny_scenes import SCENE, changed, sampled

from demo_world.captions import caption_scene, known_words, sample_caption, vocabulary
from demo_world.scenes import Colour, Direction, Place, Scene, Shape, Speed, Thing, Time, Weather
from demo_world.translated_captions import Language


def words_of(caption: str) -> set[str]:
    return set(caption.replace(",", " ").split())


def test_every_word_is_known():
    rng = np.random.default_rng(2)
    known = set(known_words())
    mentioned = {word for scene in sampled(4000) for word in words_of(sample_caption(scene, rng))}
    assert mentioned <= known
    assert len(mentioned) > 0.9 * len(known)


def test_promised_prompts_are_of_known_words():
    prompts = (
        "storm, dusk, ship, automobile",
        "red boats sail quickly to the right",
        "밤에 비 오는 바다에서 빨간 배가 왼쪽으로 움직인다",
        "ein rotes boot fährt bei nacht auf dem meer",
        "un pájaro azul vuela hacia la derecha en el bosque",
        "une voiture verte roule vite vers la gauche dans la ville sous la pluie",
    )
    assert set.union(*map(words_of, prompts)) <= set(known_words())


def test_promised_prompts_are_mentioned():
    empty = Scene(Place.SEA, Weather.RAIN, Time.DAY, None, seed=0)
    boat = Thing(Shape.BOAT, Colour.RED, Direction.LEFT, Speed.SLOW)
    full = Scene(Place.SEA, Weather.RAIN, Time.NIGHT, boat, seed=0)
    prompts = [
        ("raining, sea", empty, None),
        ("a sea in the rain at night with a red boat moving left", full, None),
        ("비, 바다", empty, Language.KOREAN),
        ("비가 오는 바다", empty, Language.KOREAN),
    ]
    for prompt, scene, language in prompts:
        rng = np.random.default_rng(10)
        assert any(caption_scene(scene, rng, language=language) == prompt for _ in range(2000))


def test_many_phrasings_and_word_orders():
    rng = np.random.default_rng(4)
    captions = {caption_scene(SCENE, rng) for _ in range(200)}
    assert len(captions) > 100
    for start in ("a red ball", "red balls", "in the", "by day"):
        assert any(caption.startswith(start) for caption in captions), start
    assert any("," in caption for caption in captions)
    assert any(caption.split(",")[0].endswith(("desert", "dunes")) for caption in captions)


ATTRIBUTES = {
    "place": Place,
    "weather": Weather,
    "time": Time,
    "shape": Shape,
    "colour": Colour,
    "direction": Direction,
    "speed": Speed,
}


@pytest.mark.parametrize("language", [None, *Language], ids=str)
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_complete_captions_tell_every_attribute_apart(language, attribute):
    mentioned = []
    for value in ATTRIBUTES[attribute]:
        rng, scene = np.random.default_rng(8), changed(**{attribute: value})
        captions = [caption_scene(scene, rng, complete=True, language=language) for _ in range(60)]
        mentioned.append([words_of(caption) for caption in captions])
    for one in mentioned:
        elsewhere = {word for other in mentioned if other is not one for words in other for word in words}
        assert all(words - elsewhere for words in one)


def test_captions_come_in_every_language():
    rng = np.random.default_rng(9)
    captions = [sample_caption(SCENE, rng) for _ in range(400)]
    for words, low, high in (("ball", 220, 380), ("공", 5, 60), ("pelota", 5, 60), ("balle", 5, 60)):
        assert low < sum(any(word.startswith(words) for word in words_of(caption)) for caption in captions) < high


def test_vocabulary_lists_usual_words():
    listed = vocabulary()
    assert {"sea", "city", "forest", "desert"} == set(listed["places"])
    assert "raining" in listed["weather"]
    assert {word for words in listed.values() for word in words} <= set(known_words())
