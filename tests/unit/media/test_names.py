"""File names from prompts."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensora_cli.media.names import MAX_PROMPT_BYTES, file_stem


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("raining, sea", "raining-sea_seed7"),
        ("  A Sea\n\tat 'night' / \"rain\" \\ ?*|<>: ", "a-sea-at-night-rain_seed7"),
        ("../../etc/passwd", "etc-passwd_seed7"),
        (".hidden", "hidden_seed7"),
        ("-rf", "rf_seed7"),
        ("CON", "con_seed7"),
        ("LPT1.mp4", "lpt1-mp4_seed7"),
        ("雨の海、夜", "雨の海-夜_seed7"),
        ("Дождь над МОРЕМ", "дождь-над-морем_seed7"),
        ("समुद्र में बारिश", "समुद्र-में-बारिश_seed7"),
        ("بحر تحت المطر", "بحر-تحت-المطر_seed7"),
    ],
)
def test_readable_names(prompt: str, stem: str) -> None:
    assert file_stem(prompt, seed=7) == unicodedata.normalize("NFC", stem)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sea " * 1250, "sea " * 1249 + "bay"),  # differ after the cut
        ("海" * 5000, "海" * 4999),
        ("🌊", "🌧️"),  # nothing remains
        ("?!", "..."),
        ("cat 🐱", "cat 🐶"),  # what tells them apart is dropped
        ("sea \udce9", "sea \udce8"),
    ],
)
def test_what_is_dropped_still_tells_prompts_apart(one: str, other: str) -> None:
    assert file_stem(one, seed=1) != file_stem(other, seed=1)


def test_a_long_prompt_is_cut_at_a_word() -> None:
    stem = file_stem("a red boat on a stormy sea " * 200, seed=1)
    words = stem.removesuffix("_seed1").split("-")[:-1]
    assert len(words) > 10
    assert set(words) <= {"a", "red", "boat", "on", "stormy", "sea"}


DIFFICULT = st.text(alphabet="🐱é海\u0301\ufe0f\u200d\udce9 -./", max_size=200)


@given(st.text(alphabet=st.characters(), max_size=200) | DIFFICULT)
def test_any_text_gives_a_safe_name(prompt: str) -> None:
    stem = file_stem(prompt, seed=1)
    text = stem.removesuffix("_seed1")
    assert 0 < len(text.encode("utf-8")) <= MAX_PROMPT_BYTES
    assert not set(text) & set('/\\:*?"<>|.\0 \n')
    assert all(unicodedata.category(character)[0] in "LNM" or character == "-" for character in text)
    assert text[0] != "-"
    assert text[-1] != "-"
    assert stem == file_stem(prompt, seed=1)
