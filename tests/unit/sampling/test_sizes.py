"""Sizes, ratios and lengths."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.sampling.sizes import (
    image_size,
    nearest_training_size,
    training_sizes,
)


@pytest.mark.parametrize(("resolution", "nearest"), [("256", "256px"), ("768P", "768px"), ("720", "720p")])
def test_unknown_resolution_names_the_nearest(resolution, nearest):
    with pytest.raises(RequestError, match="is not a resolution like 256px, 360p") as error:
        image_size(resolution, "16:9")
    assert error.value.hint == f"did you mean {nearest}?"


@pytest.mark.parametrize(
    ("ratio", "nearest"),
    [("16:10", "8:5"), ("21:9", "2.39:1"), ("16x9", "16:9"), ("32:18", "16:9"), ("1:20", "1:2.39")],
)
def test_unknown_ratio_names_the_nearest(ratio, nearest):
    with pytest.raises(RequestError, match=r"is not one of 2\.39:1, 2:1, 16:9") as error:
        image_size("256px", ratio)
    assert error.value.hint == f"the nearest is {nearest}"


def test_too_small_a_resolution_is_refused():
    with pytest.raises(RequestError, match=r"video\.resolution=16px has no frame of .* in multiples of 16 pixels"):
        image_size("16px", "1:1")


@pytest.mark.parametrize(
    ("asked", "nearest"), [("16:9", "16:9"), ("8:5", "3:2"), (1.0, "1:1"), (1.7, "16:9"), (100.0, "2.39:1")]
)
def test_a_clip_is_trained_in_the_size_that_is_nearest_in_shape(asked, nearest):
    assert nearest_training_size("256px", asked) == (nearest, *training_sizes("256px")[nearest])
