"""The table of condition modes."""

import pytest

from opensora_cli.core.conditions import (
    ReferencePart,
    condition_mode,
    reference_parts,
    suggested_mode,
)
from opensora_cli.core.exceptions import RequestError


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("t2v", []),
        ("i2v_head", [(0, False, 1)]),
        ("i2v_tail", [(-1, True, 1)]),
        ("i2v_loop", [(0, False, 1), (-1, True, 1)]),
        ("v2v_head", [(0, False, 33)]),
        ("v2v_tail", [(0, True, 33)]),
        ("v2v_head_easy", [(0, False, 65)]),
        ("v2v_tail_easy", [(0, True, 65)]),
    ],
)
def test_what_is_read_for_each_mode(name, parts):
    assert reference_parts(condition_mode(name)) == tuple(ReferencePart(*part) for part in parts)


def test_frames_of_an_autoencoder_that_is_not_causal():
    assert reference_parts(condition_mode("v2v_head"), causal=False)[0].num_frames == 32
    assert reference_parts(condition_mode("v2v_tail_easy"), causal=False)[0].num_frames == 64
    assert reference_parts(condition_mode("i2v_head"), causal=False)[0].num_frames == 1


def test_unknown_mode_names_the_nearest():
    with pytest.raises(RequestError, match=r"condition\.mode='i2v_haed' is not one of t2v, i2v_head") as error:
        condition_mode("i2v_haed")
    assert error.value.hint == "did you mean i2v_head?"


@pytest.mark.parametrize(
    ("are_pictures", "name"),
    [([], "t2v"), ([True], "i2v_head"), ([True, True], "i2v_loop"), ([False], "v2v_head"), ([True, False], None)],
)
def test_the_mode_that_files_suggest(are_pictures, name):
    found = suggested_mode(are_pictures)
    assert (None if found is None else found.name) == name
