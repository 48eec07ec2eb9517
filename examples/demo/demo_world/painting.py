"""Look of the procedural world: places, skies, moving things and weather, painted with numpy.

All lengths are shares of the picture's width, so that the same scene can be rendered at any size. Details are large
enough for an autoencoder that compresses space fourfold or eightfold: nothing that matters is smaller than two pixels
at 64 x 64. Colours are RGB in 0 to 1, pictures (T, H, W, 3) float32.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
"""Coverage, distances and pictures; most are float32."""

_SKY = {  # top, horizon
    "day": ((0.36, 0.62, 0.95), (0.78, 0.90, 1.00)),
    "sunset": ((0.48, 0.28, 0.55), (1.00, 0.62, 0.30)),
    "night": ((0.03, 0.04, 0.14), (0.10, 0.12, 0.30)),
}
_LIGHT = {"day": (1.0, 1.0, 1.0), "sunset": (0.95, 0.70, 0.58), "night": (0.34, 0.38, 0.58)}
_GROUND = {
    "sea": (0.10, 0.38, 0.62),
    "city": (0.36, 0.36, 0.39),
    "forest": (0.24, 0.42, 0.17),
    "desert": (0.90, 0.74, 0.44),
}
_CLOUDED = {"day": (0.62, 0.66, 0.70), "sunset": (0.66, 0.50, 0.46), "night": (0.13, 0.14, 0.20)}
_PAINT = {
    "red": (0.90, 0.10, 0.10),
    "yellow": (0.98, 0.86, 0.10),
    "green": (0.10, 0.80, 0.22),
    "blue": (0.12, 0.25, 0.95),
}
_MIDDLE_SECOND = 4.0 / 3.0
"""At which a thing is near the middle of the picture: that of 33 frames at 12 fps."""
_BALL_RADIUS = 0.125
_SLANT = 0.25
"""Slant of rain: to the left for each step down."""
# Height of each thing's centre, and by how much it may differ: what rolls or floats is low, what flies is high.
_ALTITUDE = {"ball": (0.72, 0.04), "boat": (0.68, 0.04), "bird": (0.30, 0.06), "car": (0.74, 0.03)}


@dataclass(frozen=True)
class _View:
    """Canvas and light of a place."""

    horizon: float
    ground: Array
    """Lit colour, (3,)."""
    light: Array
    """Factors of a colour, (3,)."""
    night: bool
    sun: tuple[float, Array] | None
    """Position of sun or moon, from the left, and its color, (3,). None: behind clouds."""


@dataclass(frozen=True)
class _Drops:
    """A layer of rain or snow."""

    coverage: Array
    """(H, W)."""
    speed: float
    """Heights in a second, downwards."""
    slant: float
    """By how much they go to the left for each step down."""


@dataclass(frozen=True)
class Canvas:
    """The grid that is painted on: `size` pixels a side, one frame at each of `seconds`."""

    size: int
    seconds: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width."""
        return self.size, self.size

    @cached_property
    def xs(self) -> Array:
        """Pixel centres from left to right, (1, size), in widths."""
        centres: Array = (np.arange(self.size, dtype=np.float32) + 0.5) / self.size
        return centres[None, :]

    @cached_property
    def ys(self) -> Array:
        """Pixel centres from top to bottom, (size, 1), in widths."""
        return self.xs.T

    def inside(self, distance: Array) -> Array:
        """Turn a signed distance (negative inside) into coverage 0 to 1 with an edge two pixels soft."""
        coverage: Array = np.clip(0.5 - 0.5 * distance * self.size, 0.0, 1.0).astype(np.float32)
        return coverage


def paint_place(canvas: Canvas, place: str, time: str, weather: str, rng: Generator) -> Array:
    """Return the empty place, (T, H, W, 3); of the weather, only clouds and white ground are painted here.

    The places are `sea`, `city`, `forest` and `desert`, the times `day`, `sunset` and `night`, which determine the
    light, the weathers `clear`, `rain` and `snow`.
    """
    clouded = weather != "clear"
    horizon = float(rng.uniform(0.48, 0.54))
    sky, sun = _paint_sky(canvas, time, clouded, horizon, rng)
    light = np.array(_LIGHT[time], np.float32) * (0.85 if clouded else 1.0)
    ground = np.array(_GROUND[place], np.float32)
    if weather == "snow" and place != "sea":
        ground = 0.55 * ground + 0.45
    frames = np.repeat(sky[None], len(canvas.seconds), axis=0)
    view = _View(horizon=horizon, ground=ground * light, light=light, night=time == "night", sun=sun)
    {"sea": _paint_sea, "city": _paint_city, "forest": _paint_forest, "desert": _paint_desert}[place](
        frames, canvas, view, rng
    )
    return frames


def paint_thing(
    frames: Array, canvas: Canvas, *, shape: str, colour: str, heading: float, fast: bool, night: bool, rng: Generator
) -> None:
    """Paint the moving thing into `frames`, (T, H, W, 3), in place; `rng` determines height, starting point and phase.

    Args:
        shape: `ball`, `boat`, `bird` or `car`.
        colour: `red`, `yellow`, `green` or `blue`.
        heading: 1 to the right, -1 to the left.
        fast: 0.26 of the picture's width in a second, else 0.1.
        night: whether to paint it a little darker; it keeps its colour.
    """
    altitude, spread = _ALTITUDE[shape]
    y = altitude + float(rng.uniform(-spread, spread))
    speed, spread = (0.26, 0.06) if fast else (0.10, 0.16)
    middle = 0.5 + float(rng.uniform(-spread, spread))
    phase = float(rng.uniform(0, 2 * np.pi))
    # A ball rolls without slipping; wings beat once a second.
    pace = speed / _BALL_RADIUS if shape == "ball" else 2 * np.pi
    paint = np.array(_PAINT[colour], np.float32) * (0.92 if night else 1.0)
    outline = np.array((0.97, 0.97, 0.97), np.float32) * (0.88 if night else 1.0)
    dark_paint = np.array((0.08, 0.08, 0.10), np.float32)
    for frame, second in zip(frames, canvas.seconds, strict=True):
        x = middle + speed * (second - _MIDDLE_SECOND)
        # Seen in a mirror when heading left.
        dx = (canvas.xs - x) if heading > 0 else ((1.0 - canvas.xs) - x)
        sway = 0.012 * np.sin(np.pi * second + phase) if shape in ("boat", "bird") else 0.0
        dy = canvas.ys - y - sway
        if shape in ("ball", "car"):
            shadow = np.hypot(dx / (0.14 if shape == "ball" else 0.21), (canvas.ys - y - 0.125) / 0.028) - 1.0
            _blend(frame, 0.35 * canvas.inside(0.03 * shadow), dark_paint)
        body, dark = _thing_distance(shape, dx, dy, pace * second + phase)
        _blend(frame, canvas.inside(body - 0.022), outline)
        _blend(frame, canvas.inside(body), paint)
        if dark is not None:
            _blend(frame, canvas.inside(dark), dark_paint)


class Precipitation:
    """Rain or snow, far and near: drops on a torus that moves by whole pixels from frame to frame.

    What is far lies behind the moving thing, so that it stays in sight. `weather` is `rain`, `snow` or `clear`, of
    which there is nothing to paint.
    """

    def __init__(self, canvas: Canvas, weather: str, rng: Generator) -> None:
        self._canvas = canvas
        self._colour = np.array((0.80, 0.87, 0.97) if weather == "rain" else (1.0, 1.0, 1.0), np.float32)
        # The far one, then the near one.
        self._layers: list[_Drops] = []
        if weather == "rain":
            for count, length, width, opacity, speed in ((16, 0.11, 0.010, 0.35, 0.5), (8, 0.16, 0.014, 0.5, 0.7)):
                drops = _streaks(canvas, rng, count=count, length=length, width=width, slant=_SLANT)
                self._layers.append(_Drops(drops * opacity, speed, _SLANT))
        elif weather == "snow":
            for count, radius, opacity, speed in ((16, 0.017, 0.75, 0.15), (9, 0.025, 0.9, 0.3)):
                self._layers.append(_Drops(_flakes(canvas, rng, count=count, radius=radius) * opacity, speed, 0.0))

    def paint(self, frames: Array, *, near: bool) -> None:
        """Paint what is near, or what is far, over `frames`, (T, H, W, 3), in place."""
        if not self._layers:
            return
        drops = self._layers[near]
        for frame, second in zip(frames, self._canvas.seconds, strict=True):
            down = round(drops.speed * self._canvas.size * second)
            _blend(frame, np.roll(drops.coverage, (down, -round(drops.slant * down)), axis=(0, 1)), self._colour)


def _blend(picture: Array, coverage: Array, colour: Array) -> None:
    picture += coverage[..., None] * (colour - picture)


def _paint_sky(
    canvas: Canvas, time: str, clouded: bool, horizon: float, rng: Generator
) -> tuple[Array, tuple[float, Array] | None]:
    """Return the sky, (H, W, 3), and where its sun or moon stands, with its colour."""
    top, bottom = (np.array(colour, np.float32) for colour in _SKY[time])
    down = np.clip(canvas.ys / horizon, 0.0, 1.0)[..., None]
    sky = np.broadcast_to(top + (bottom - top) * down, (*canvas.shape, 3)).astype(np.float32)
    x = float(rng.uniform(0.15, 0.85))
    if clouded:
        return sky + 0.7 * (np.array(_CLOUDED[time], np.float32) - sky), None
    disc = {"day": (0.13, 0.075, (1.0, 0.96, 0.62)), "sunset": (horizon - 0.05, 0.11, (1.0, 0.86, 0.42))}
    y, radius, rgb = disc.get(time, (0.13, 0.06, (0.93, 0.94, 0.98)))
    colour = np.array(rgb, np.float32)
    distance = np.hypot(canvas.xs - x, canvas.ys - y)
    _blend(sky, 0.35 * np.exp(-((distance / (2.2 * radius)) ** 2)).astype(np.float32), colour)
    _blend(sky, canvas.inside(distance - radius), colour)
    if time == "night":
        stars = _flakes(canvas, rng, count=9, radius=0.012) * (canvas.ys < horizon - 0.05)
        _blend(sky, 0.8 * stars.astype(np.float32), np.array((0.9, 0.9, 1.0), np.float32))
    return sky, (x, colour)


def _paint_sea(frames: Array, canvas: Canvas, view: _View, rng: Generator) -> None:
    below = canvas.inside(np.broadcast_to(view.horizon - canvas.ys, canvas.shape))
    depth = np.clip((canvas.ys - view.horizon) / (1.0 - view.horizon), 0.0, 1.0)
    phases = rng.uniform(0, 2 * np.pi, 2)
    haze = 0.35 * (1.0 - depth)[..., None] ** 3
    for frame, second in zip(frames, canvas.seconds, strict=True):
        # Two trains of waves, wider apart towards the viewer.
        wave = np.sin(38.0 * np.sqrt(depth + 0.05) - 3.0 * second + 2.2 * np.sin(7.0 * canvas.xs + phases[0]))
        swell = np.sin(11.0 * canvas.xs + 9.0 * depth + 2.0 * second + phases[1])
        shade = 1.0 + 0.20 * wave + 0.10 * swell
        colour = (view.ground * shade[..., None]).astype(np.float32)
        # The sky lies on the water far out.
        colour += haze * (frame[int(view.horizon * canvas.size) - 1] - colour)
        if view.sun is not None:
            x, rgb = view.sun
            path = np.exp(-(((canvas.xs - x) / (0.05 + 0.10 * depth)) ** 2)) * (0.45 + 0.35 * wave)
            colour += path[..., None].astype(np.float32) * (rgb - colour)
        frame += below[..., None] * (colour - frame)


def _paint_city(frames: Array, canvas: Canvas, view: _View, rng: Generator) -> None:
    picture = frames[0]
    wall = np.array((0.52, 0.50, 0.56), np.float32)
    glass = np.array((0.80, 0.88, 0.95), np.float32) * view.light
    lamp = np.array((1.0, 0.86, 0.40), np.float32)
    street = view.horizon + 0.10
    # A row of houses far away, in the colour of the sky.
    for x in np.linspace(0.04, 0.96, 8) + rng.uniform(-0.03, 0.03, 8):
        top = view.horizon - float(rng.uniform(0.10, 0.30))
        house = _box(canvas.xs - x, canvas.ys - 0.5 * (top + street), 0.05, 0.5 * (street - top))
        _blend(picture, 0.45 * canvas.inside(house), wall * 0.8 * view.light)
    edges = np.linspace(0.0, 1.0, 6)
    for left, right in pairwise(edges):
        top = view.horizon - float(rng.uniform(0.02, 0.34))
        shade = float(rng.uniform(0.75, 1.1))
        house = _box(canvas.xs - 0.5 * (left + right), canvas.ys - 0.5 * (top + street), 0.095, 0.5 * (street - top))
        _blend(picture, canvas.inside(house), wall * shade * view.light)
        # Windows stand in a grid of one pane each 0.094 widths, two in a row; at night most of them are lit.
        u = (canvas.xs - left - 0.053) % 0.094 - 0.047
        v = (canvas.ys - top - 0.03) % 0.094 - 0.047
        panes = canvas.inside(np.maximum(_box(u, v, 0.024, 0.024), house + 0.012))
        if view.night:
            lit = rng.random((8, 4)) < 0.75
            row = np.clip(((canvas.ys - top - 0.03) // 0.094).astype(int), 0, 7)
            column = np.clip(((canvas.xs - left - 0.053) // 0.094).astype(int) + 1, 0, 3)
            _blend(picture, panes * lit[row, column], lamp)
            _blend(picture, panes * ~lit[row, column], glass * 0.5)
        else:
            _blend(picture, panes, glass * 0.95)
    _blend(picture, canvas.inside(np.broadcast_to(street - canvas.ys, canvas.shape)), view.ground)
    dash = _box((canvas.xs + float(rng.uniform())) % 0.25 - 0.125, canvas.ys - 0.90, 0.07, 0.016)
    _blend(picture, canvas.inside(dash), np.array((0.9, 0.9, 0.85), np.float32) * view.light)
    frames[1:] = picture


def _paint_forest(frames: Array, canvas: Canvas, view: _View, rng: Generator) -> None:
    picture = frames[0]
    leaves = np.array((0.07, 0.33, 0.13), np.float32)
    trunk = np.array((0.34, 0.22, 0.12), np.float32) * view.light
    horizon = view.horizon
    haze = picture[int(horizon * canvas.size) - 1].mean(axis=0)
    for x in np.linspace(0.0, 1.0, 11) + rng.uniform(-0.03, 0.03, 11):
        crown = _crown(canvas, x, foot=horizon + 0.06, height=float(rng.uniform(0.22, 0.34)), half_width=0.07)
        _blend(picture, canvas.inside(crown), 0.55 * leaves * view.light + 0.45 * haze)
    _blend(picture, canvas.inside(np.broadcast_to(horizon + 0.04 - canvas.ys, canvas.shape)), view.ground)
    for x in np.linspace(0.06, 0.94, 6) + rng.uniform(-0.03, 0.03, 6):
        foot, height = horizon + 0.08, float(rng.uniform(0.30, 0.46))
        green = leaves * float(rng.uniform(0.8, 1.25)) * view.light
        _blend(picture, canvas.inside(_box(canvas.xs - x, canvas.ys - foot, 0.018, 0.05)), trunk)
        _blend(picture, canvas.inside(_crown(canvas, x, foot=foot - 0.03, height=0.7 * height, half_width=0.12)), green)
        upper = _crown(canvas, x, foot=foot - 0.03 - 0.4 * height, height=0.6 * height, half_width=0.09)
        _blend(picture, canvas.inside(upper), green * 1.18)
    frames[1:] = picture


def _crown(canvas: Canvas, x: float, *, foot: float, height: float, half_width: float) -> Array:
    """Return the signed distance to a triangle that stands on `foot`."""
    up = (foot - canvas.ys) / height
    sides, ends = np.abs(canvas.xs - x) - half_width * (1.0 - up), (np.abs(up - 0.5) - 0.5) * height
    distance: Array = np.maximum(sides, ends)
    return distance


def _paint_desert(frames: Array, canvas: Canvas, view: _View, rng: Generator) -> None:
    picture = frames[0]
    for row, shade in enumerate((0.80, 0.92, 1.05)):
        phase = float(rng.uniform(0, 2 * np.pi))
        crest = view.horizon + 0.03 + 0.13 * row + (0.06 - 0.012 * row) * np.sin(5.5 * canvas.xs + phase)
        # Dunes are lit at their crests.
        lit = 1.0 + 0.10 * np.exp(-np.clip(canvas.ys - crest, 0.0, None) / 0.05)[..., None]
        colour = np.clip(view.ground * shade * lit, 0.0, 1.0).astype(np.float32)
        picture += canvas.inside(crest - canvas.ys)[..., None] * (colour - picture)
    x = float(rng.choice((0.10, 0.90))) + float(rng.uniform(-0.03, 0.03))
    green = np.array((0.16, 0.45, 0.20), np.float32) * view.light
    foot = view.horizon + 0.12
    stem = _box(canvas.xs - x, canvas.ys - (foot - 0.11), 0.028, 0.13)
    arms = _box(canvas.xs - x, canvas.ys - (foot - 0.12), 0.075, 0.020)
    tips = _box(np.abs(canvas.xs - x) - 0.068, canvas.ys - (foot - 0.155), 0.018, 0.05)
    _blend(picture, canvas.inside(np.minimum(np.minimum(stem, arms), tips)), green)
    frames[1:] = picture


def _thing_distance(shape: str, dx: Array, dy: Array, phase: float) -> tuple[Array, Array | None]:
    """Return signed distances to the body and to its dark parts of a thing that heads right, centred at 0."""
    if shape == "ball":
        turning = np.hypot(dx - 0.055 * np.cos(phase), dy - 0.055 * np.sin(phase)) - 0.032
        return np.hypot(dx, dy) - _BALL_RADIUS, turning
    if shape == "boat":
        hull = np.maximum(np.abs(dy - 0.07) - 0.05, np.abs(dx) - 0.19 + 0.9 * (dy - 0.02))
        sail = np.maximum(np.maximum(-dx - 0.02, dy - 0.0), 0.75 * dx + 0.55 * (-dy) - 0.105)
        mast = _box(dx + 0.03, dy + 0.08, 0.012, 0.12)
        return np.minimum(hull, sail), mast
    if shape == "bird":
        return _bird_distance(dx, dy, phase)
    lower = _box(dx, dy - 0.02, 0.19, 0.05)
    cabin = np.maximum(np.abs(dy + 0.065) - 0.05, np.abs(dx + 0.02) - 0.10 - 0.6 * (dy + 0.065))
    wheels = np.hypot(np.abs(dx) - 0.105, dy - 0.075) - 0.045
    return np.minimum(lower, cabin), wheels


def _bird_distance(dx: Array, dy: Array, phase: float) -> tuple[Array, Array]:
    """Return signed distances to a bird that heads right, centered at 0, and to its eye and beak.

    One wing beats from below the body to well above it. Body, head and tail keep their shape, so that the bird is
    recognized in each frame.
    """
    body = 0.055 * (np.hypot(dx / 0.13, dy / 0.055) - 1.0)
    head = np.hypot(dx - 0.115, dy + 0.035) - 0.048
    tail = np.abs(dy + 0.01) - 0.014 - 0.28 * np.clip(-dx - 0.10, 0.0, None)
    tail = np.maximum(tail, np.maximum(-dx - 0.20, dx + 0.08))
    height = 0.05 + 0.125 * np.sin(phase)
    if abs(height) < 0.03:
        height = 0.03 if height >= 0 else -0.03
    up = -dy / height
    sides = np.abs(dx - 0.01 + 0.07 * up) - 0.075 * (1.0 - 0.7 * up)
    wing = np.maximum(sides, np.maximum(-up, up - 1.0) * abs(height))
    eye = np.hypot(dx - 0.125, dy + 0.048) - 0.015
    beak = np.maximum(np.abs(dy + 0.03) - 0.5 * (0.205 - dx), 0.155 - dx)
    return np.minimum(np.minimum(body, head), np.minimum(tail, wing)), np.minimum(eye, beak)


def _box(dx: Array, dy: Array, half_width: float, half_height: float) -> Array:
    return np.maximum(np.abs(dx) - half_width, np.abs(dy) - half_height)


def _on_torus(difference: Array) -> Array:
    return np.asarray((difference + 0.5) % 1.0 - 0.5, np.float32)


def _streaks(canvas: Canvas, rng: Generator, *, count: int, length: float, width: float, slant: float) -> Array:
    """Slanted strokes at random places of a torus, as coverage (H, W)."""
    places = rng.uniform(0.0, 1.0, (count, 2)).astype(np.float32)
    coverage = np.zeros((canvas.size, canvas.size), np.float32)
    for x, y in places:
        dx, dy = _on_torus(canvas.xs - x), _on_torus(canvas.ys - y)
        stroke = np.maximum(np.abs(dx + slant * dy) - width, np.abs(dy) - 0.5 * length)
        np.maximum(coverage, canvas.inside(stroke), out=coverage)
    return coverage


def _flakes(canvas: Canvas, rng: Generator, *, count: int, radius: float) -> Array:
    """Discs at random places of a torus, as coverage (H, W)."""
    places = rng.uniform(0.0, 1.0, (count, 2)).astype(np.float32)
    coverage = np.zeros((canvas.size, canvas.size), np.float32)
    for x, y in places:
        disc = np.hypot(_on_torus(canvas.xs - x), _on_torus(canvas.ys - y)) - radius
        np.maximum(coverage, canvas.inside(disc), out=coverage)
    return coverage
