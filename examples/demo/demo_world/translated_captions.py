"""Captions of the procedural world in German, Korean, Spanish and French: a few phrasings of each scene."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from numpy.random import Generator

from demo_world.english_captions import Mentions
from demo_world.scenes import Colour, Direction, Place, Scene, Shape, Speed, Thing, Time, Weather, pick


class Language(StrEnum):
    """A language other than English."""

    GERMAN = "de"
    KOREAN = "ko"
    SPANISH = "es"
    FRENCH = "fr"


@dataclass(frozen=True)
class _Noun:
    """Word for a moving thing."""

    alone: str
    as_subject: str
    """With its article or particle, and {} for its colour."""
    verb: str
    colours: Mapping[Colour, str]
    """Colors in the gender of the word."""
    colour_first: bool = True

    def with_colour(self, colour: str) -> str:
        """Return for instance "rotes boot", or "barco rojo"."""
        return " ".join((colour, self.alone) if self.colour_first else (self.alone, colour)).strip()


@dataclass(frozen=True)
class _Phrases:
    """A language's words; rows of alternatives, the first being the usual one."""

    places: Mapping[Place, tuple[str, str]]
    """Words as a tag, and in a sentence."""
    weathers: Mapping[Weather, tuple[tuple[str, ...], tuple[str, ...]]]
    """Words as a tag, and in a sentence."""
    times: Mapping[Time, tuple[tuple[str, ...], tuple[str, ...]]]
    """Words as a tag, and in a sentence."""
    nouns: Mapping[Shape, _Noun]
    directions: Mapping[Direction, str]
    speeds: Mapping[Speed, tuple[str, ...]]
    sentence: str
    """Template of {thing}, {verb}, {speed}, {direction}, {where}, {weather} and {when}."""
    empty: str
    """Template of {place}, {where}, {weather} and {when}: nothing moves."""

    def words(self) -> Iterator[str]:
        """Yield every word of these captions, perhaps more than once."""
        rows: list[tuple[str, ...]] = [*self.places.values(), *self.speeds.values(), tuple(self.directions.values())]
        for table in (self.weathers, self.times):
            rows += [row for pair in table.values() for row in pair]
        for noun in self.nouns.values():
            rows.append((noun.alone, noun.as_subject.replace("{}", ""), noun.verb, *noun.colours.values()))
        for phrase in (phrase for row in rows for phrase in row):
            yield from phrase.split()


def translated_words() -> list[str]:
    """Return every word of these captions, perhaps more than once."""
    return [word for phrases in _PHRASES.values() for word in phrases.words()]


def translated_caption(language: Language, scene: Scene, mention: Mentions, rng: Generator) -> str:
    """Describe what is mentioned; `rng` chooses phrasing and word order."""
    phrases = _PHRASES[language]
    if rng.random() < 0.5:
        return _tags(phrases, scene, mention, rng)
    tag, where = phrases.places[scene.place]
    given = {
        "place": tag if mention.place else "",
        "where": where if mention.place else "",
        "weather": pick(rng, phrases.weathers[scene.weather][1]) if mention.weather else "",
        "when": pick(rng, phrases.times[scene.time][1]) if mention.time else "",
    }
    if scene.thing is None:
        return _joined(phrases.empty, given)
    noun = phrases.nouns[scene.thing.shape]
    given |= _motion(phrases, scene.thing, mention, rng)
    given |= {"thing": noun.as_subject.format(_colour(noun, scene.thing, mention)), "verb": noun.verb}
    return _joined(phrases.sentence, given)


def _tags(phrases: _Phrases, scene: Scene, mention: Mentions, rng: Generator) -> str:
    parts = []
    if mention.place:
        parts.append(phrases.places[scene.place][0])
    if mention.weather:
        parts.append(pick(rng, phrases.weathers[scene.weather][0]))
    if mention.time:
        parts.append(pick(rng, phrases.times[scene.time][0]))
    if scene.thing is not None:
        noun = phrases.nouns[scene.thing.shape]
        thing = noun.with_colour(_colour(noun, scene.thing, mention))
        parts.append(_joined(f"{thing} {{speed}} {{direction}}", _motion(phrases, scene.thing, mention, rng)))
    return ", ".join(parts[i] for i in rng.permutation(len(parts)))


def _motion(phrases: _Phrases, thing: Thing, mention: Mentions, rng: Generator) -> dict[str, str]:
    return {
        "direction": phrases.directions[thing.direction] if mention.direction else "",
        "speed": pick(rng, phrases.speeds[thing.speed]) if mention.speed else "",
    }


def _colour(noun: _Noun, thing: Thing, mention: Mentions) -> str:
    return noun.colours[thing.colour] if mention.colour else ""


def _joined(pattern: str, given: Mapping[str, str]) -> str:
    return " ".join(pattern.format(**given).split())


def _colours(red: str, yellow: str, green: str, blue: str) -> Mapping[Colour, str]:
    return {Colour.RED: red, Colour.YELLOW: yellow, Colour.GREEN: green, Colour.BLUE: blue}


_GERMAN_MASCULINE = _colours("roter", "gelber", "grüner", "blauer")
_GERMAN_NEUTER = _colours("rotes", "gelbes", "grünes", "blaues")
_KOREAN_COLOURS = _colours("빨간", "노란", "초록", "파란")
_SPANISH_MASCULINE = _colours("rojo", "amarillo", "verde", "azul")
_SPANISH_FEMININE = _colours("roja", "amarilla", "verde", "azul")
_FRENCH_MASCULINE = _colours("rouge", "jaune", "vert", "bleu")
_FRENCH_FEMININE = _colours("rouge", "jaune", "verte", "bleue")

_GERMAN = _Phrases(
    places={
        Place.SEA: ("meer", "auf dem meer"),
        Place.CITY: ("stadt", "in der stadt"),
        Place.FOREST: ("wald", "im wald"),
        Place.DESERT: ("wüste", "in der wüste"),
    },
    weathers={
        Weather.CLEAR: (("klar", "sonnig"), ("bei klarem himmel",)),
        Weather.RAIN: (("regen", "es regnet", "sturm"), ("im regen", "bei regen")),
        Weather.SNOW: (("schnee", "es schneit"), ("im schnee", "bei schnee")),
    },
    times={
        Time.DAY: (("tag", "mittag"), ("am tag", "am mittag")),
        Time.SUNSET: (("sonnenuntergang", "abend"), ("bei sonnenuntergang", "am abend")),
        Time.NIGHT: (("nacht", "mitternacht"), ("bei nacht", "in der nacht", "nachts")),
    },
    nouns={
        Shape.BALL: _Noun("ball", "ein {} ball", "rollt", _GERMAN_MASCULINE),
        Shape.BOAT: _Noun("boot", "ein {} boot", "fährt", _GERMAN_NEUTER),
        Shape.BIRD: _Noun("vogel", "ein {} vogel", "fliegt", _GERMAN_MASCULINE),
        Shape.CAR: _Noun("auto", "ein {} auto", "fährt", _GERMAN_NEUTER),
    },
    directions={Direction.LEFT: "nach links", Direction.RIGHT: "nach rechts"},
    speeds={Speed.SLOW: ("langsam",), Speed.FAST: ("schnell",)},
    sentence="{thing} {verb} {weather} {when} {speed} {where} {direction}",
    empty="{place} {weather} {when}",
)

_KOREAN = _Phrases(
    places={
        Place.SEA: ("바다", "바다에서"),
        Place.CITY: ("도시", "도시에서"),
        Place.FOREST: ("숲", "숲에서"),
        Place.DESERT: ("사막", "사막에서"),
    },
    weathers={
        Weather.CLEAR: (("맑음", "맑은 날씨"), ("맑은",)),
        Weather.RAIN: (("비", "비가 온다", "폭풍"), ("비 오는", "비가 오는", "비 내리는", "비가 내리는")),
        Weather.SNOW: (("눈", "눈이 온다"), ("눈 오는", "눈이 오는", "눈 내리는", "눈이 내리는")),
    },
    times={
        Time.DAY: (("낮", "한낮"), ("낮에", "한낮에")),
        Time.SUNSET: (("해질녘", "저녁"), ("해질녘에", "저녁에")),
        Time.NIGHT: (("밤", "한밤"), ("밤에", "한밤에")),
    },
    nouns={
        Shape.BALL: _Noun("공", "{} 공이", "굴러간다", _KOREAN_COLOURS),
        Shape.BOAT: _Noun("배", "{} 배가", "움직인다", _KOREAN_COLOURS),
        Shape.BIRD: _Noun("새", "{} 새가", "날아간다", _KOREAN_COLOURS),
        Shape.CAR: _Noun("자동차", "{} 자동차가", "달린다", _KOREAN_COLOURS),
    },
    directions={Direction.LEFT: "왼쪽으로", Direction.RIGHT: "오른쪽으로"},
    speeds={Speed.SLOW: ("천천히",), Speed.FAST: ("빠르게", "빨리")},
    sentence="{when} {weather} {where} {thing} {direction} {speed} {verb}",
    empty="{when} {weather} {place}",
)

_SPANISH = _Phrases(
    places={
        Place.SEA: ("mar", "en el mar"),
        Place.CITY: ("ciudad", "en la ciudad"),
        Place.FOREST: ("bosque", "en el bosque"),
        Place.DESERT: ("desierto", "en el desierto"),
    },
    weathers={
        Weather.CLEAR: (("despejado", "soleado"), ("con cielo despejado",)),
        Weather.RAIN: (("lluvia", "lloviendo", "llueve", "tormenta"), ("bajo la lluvia", "con lluvia")),
        Weather.SNOW: (("nieve", "nevando", "nieva"), ("bajo la nieve", "con nieve")),
    },
    times={
        Time.DAY: (("día", "mediodía"), ("de día", "al mediodía")),
        Time.SUNSET: (("atardecer", "ocaso"), ("al atardecer", "al ocaso")),
        Time.NIGHT: (("noche", "medianoche"), ("de noche", "por la noche")),
    },
    nouns={
        Shape.BALL: _Noun("pelota", "una pelota {}", "rueda", _SPANISH_FEMININE, colour_first=False),
        Shape.BOAT: _Noun("barco", "un barco {}", "navega", _SPANISH_MASCULINE, colour_first=False),
        Shape.BIRD: _Noun("pájaro", "un pájaro {}", "vuela", _SPANISH_MASCULINE, colour_first=False),
        Shape.CAR: _Noun("coche", "un coche {}", "va", _SPANISH_MASCULINE, colour_first=False),
    },
    directions={Direction.LEFT: "hacia la izquierda", Direction.RIGHT: "hacia la derecha"},
    speeds={Speed.SLOW: ("lentamente", "despacio"), Speed.FAST: ("rápidamente", "rápido")},
    sentence="{thing} {verb} {speed} {direction} {where} {when} {weather}",
    empty="{place} {when} {weather}",
)

_FRENCH = _Phrases(
    places={
        Place.SEA: ("mer", "sur la mer"),
        Place.CITY: ("ville", "dans la ville"),
        Place.FOREST: ("forêt", "dans la forêt"),
        Place.DESERT: ("désert", "dans le désert"),
    },
    weathers={
        Weather.CLEAR: (("ciel clair", "ensoleillé"), ("par temps clair",)),
        Weather.RAIN: (("pluie", "il pleut", "tempête"), ("sous la pluie",)),
        Weather.SNOW: (("neige", "il neige"), ("sous la neige",)),
    },
    times={
        Time.DAY: (("jour", "midi"), ("de jour", "à midi")),
        Time.SUNSET: (("crépuscule", "soir"), ("au crépuscule", "au coucher du soleil")),
        Time.NIGHT: (("nuit", "minuit"), ("la nuit", "de nuit")),
    },
    nouns={
        Shape.BALL: _Noun("balle", "une balle {}", "roule", _FRENCH_FEMININE, colour_first=False),
        Shape.BOAT: _Noun("bateau", "un bateau {}", "navigue", _FRENCH_MASCULINE, colour_first=False),
        Shape.BIRD: _Noun("oiseau", "un oiseau {}", "vole", _FRENCH_MASCULINE, colour_first=False),
        Shape.CAR: _Noun("voiture", "une voiture {}", "roule", _FRENCH_FEMININE, colour_first=False),
    },
    directions={Direction.LEFT: "vers la gauche", Direction.RIGHT: "vers la droite"},
    speeds={Speed.SLOW: ("lentement",), Speed.FAST: ("rapidement", "vite")},
    sentence="{thing} {verb} {speed} {direction} {where} {weather} {when}",
    empty="{place} {weather} {when}",
)

_PHRASES = {
    Language.GERMAN: _GERMAN,
    Language.KOREAN: _KOREAN,
    Language.SPANISH: _SPANISH,
    Language.FRENCH: _FRENCH,
}
