"""Sizes and lengths that the models were trained on.

A resolution names a number of pixels: `256px` is 256², `720p` is 1280x720. A ratio names their shape, width first.
The reference implementation has one table of sizes for sampling and a slightly different one for training.
"""

import math
import re
from difflib import get_close_matches

from opensora_cli.core.exceptions import RequestError

_RATIOS = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")
RESOLUTIONS = ("256px", "360p", "720p", "768px", "1024px")
"""Resolutions of the reference implementation. Others of the same form (`64px`, `480p`) are also accepted."""


def mirrored_ratio(aspect_ratio: str) -> str:
    """Return the ratio with its sides swapped: `16:9` for `9:16`."""
    width, _, height = aspect_ratio.partition(":")
    return f"{height}:{width}"


ASPECT_RATIOS = tuple(dict.fromkeys([*_RATIOS, *map(mirrored_ratio, _RATIOS)]))
"""All ratios, width:height, mirrored ones last."""


def num_pixels(resolution: str) -> float:
    """Return the pixels of a frame: N² for `Npx`, N·N·16/9 for `Np`. Raises RequestError for any other text."""
    match = re.fullmatch(r"([1-9]\d{0,4})(px|p)", resolution)
    if match is None:
        nearest = get_close_matches(resolution, RESOLUTIONS, n=1, cutoff=0.0)[0]
        raise RequestError(
            f"video.resolution={resolution!r} is not a resolution like {', '.join(RESOLUTIONS)}",
            hint=f"did you mean {nearest}?",
        )
    side = int(match[1])
    return side * side if match[2] == "px" else side * side * 16 / 9


def ratio_value(aspect_ratio: str) -> float:
    """Return width / height of one of `ASPECT_RATIOS`.

    Raises RequestError for another one, with the nearest in shape if the text is a ratio, else in spelling.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", aspect_ratio)
    if aspect_ratio in ASPECT_RATIOS and match is not None:
        return float(match[1]) / float(match[2])
    if match is not None and float(match[1]) > 0 and float(match[2]) > 0:
        wanted = math.log(float(match[1]) / float(match[2]))
        nearest = min(ASPECT_RATIOS, key=lambda known: abs(math.log(ratio_value(known)) - wanted))
    else:
        nearest = get_close_matches(aspect_ratio, ASPECT_RATIOS, n=1, cutoff=0.0)[0]
    raise RequestError(
        f"video.aspect_ratio={aspect_ratio!r} (width:height) is not one of {', '.join(ASPECT_RATIOS)}",
        hint=f"the nearest is {nearest}",
    )


def _size_table(resolution: str, *, multiple: int, training: bool) -> dict[str, tuple[int, int]]:
    pixels = num_pixels(resolution)
    table: dict[str, tuple[int, int]] = {}
    for ratio in _RATIOS:
        # Rounded down to multiples: first the width, then the height for the pixels.
        width = int(math.sqrt(pixels * ratio_value(ratio)) / multiple) * multiple
        height = int(pixels / width / multiple) * multiple if width else 0
        size = height, width
        if height == 0:
            raise RequestError(
                f"video.resolution={resolution} has no frame of {ratio} in multiples of {multiple} pixels",
                hint="use a larger resolution",
            )
        if training:
            # The reference also tries lower and narrower sizes, which rounded-down sides never need.
            candidates = (size, (height + multiple, width), (height, width + multiple))
            size = min(candidates, key=lambda candidate: abs(candidate[0] * candidate[1] - pixels))
            if size in table.values():
                continue
        table[ratio] = size
    # If both a ratio and its mirror image are listed, the mirrored size wins, as in the reference.
    return table | {mirrored_ratio(ratio): (width, height) for ratio, (height, width) in table.items()}


def inference_sizes(resolution: str, *, multiple: int = 16) -> dict[str, tuple[int, int]]:
    """Return ratio -> (height, width) in pixels, for sampling at a resolution such as `256px` or `720p`.

    Both sides are multiples of `multiple`: pixels per latent position times patch size; 32 for the DC-AE. Raises
    RequestError if the resolution is unknown, or too small for a ratio.
    """
    return _size_table(resolution, multiple=multiple, training=False)


def training_sizes(resolution: str, *, multiple: int = 16) -> dict[str, tuple[int, int]]:
    """Return ratio -> (height, width) for training: closer to the pixels, without duplicates; see `inference_sizes`."""
    return _size_table(resolution, multiple=multiple, training=True)


def nearest_training_size(resolution: str, aspect_ratio: str | float, *, multiple: int = 16) -> tuple[str, int, int]:
    """Return the ratio whose size for training is nearest in shape, with its (height, width); see `inference_sizes`.

    `aspect_ratio` is a name, or width / height. A name in the table maps to itself.
    """
    table = training_sizes(resolution, multiple=multiple)
    if isinstance(aspect_ratio, str) and aspect_ratio in table:
        nearest = aspect_ratio
    else:
        shape = math.log(ratio_value(aspect_ratio) if isinstance(aspect_ratio, str) else aspect_ratio)
        nearest = min(table, key=lambda ratio: abs(math.log(table[ratio][1] / table[ratio][0]) - shape))
    return nearest, *table[nearest]


def image_size(resolution: str, aspect_ratio: str, *, multiple: int = 16) -> tuple[int, int]:
    """Return the (height, width) in pixels for sampling; see `inference_sizes`, and `ratio_value` for errors."""
    ratio_value(aspect_ratio)
    return inference_sizes(resolution, multiple=multiple)[aspect_ratio]
