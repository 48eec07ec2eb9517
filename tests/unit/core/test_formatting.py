"""Sizes and names in messages of one line."""

import pytest

from opensora_cli.core.formatting import duration, escaped, first_few, parse_bytes, plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("4096", 4096), ("4GB", 4_000_000_000), ("4GiB", 2**32), (" 1.5 kB ", 1500), ("0.5TiB", 2**39)),
    ],
)
def test_parse(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "4XB", "4G", "1e9", "0x10", "4,5GB", "٤GB", "nan"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size such as 4GB or 4096MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1" + "0" * 400, "9" * 30 + "TB", "9223373TB"])
def test_no_size_of_any_file(text):
    with pytest.raises(ValueError, match=r"\.\.\. is larger than any file") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 60


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("a\nerror: b", "a\\nerror: b"),
        ("\x1b[2J\r\x07\x9b", "\\x1b[2J\\r\\x07\\x9b"),
        ("a\u2028b\u202ec", "a\\u2028b\\u202ec"),
        ("é 雨\xa0🌊 👩\u200d👩 می\u200cخواهم", "é 雨\xa0🌊 👩\u200d👩 می\u200cخواهم"),
        ("caf\udce9\n", "caf\udce9\\n"),
    ],
)
def test_only_what_steers_a_terminal_is_escaped(text, expected):
    assert escaped(text) == expected


def test_names_take_one_line_and_not_too_long():
    assert plain("a.weight") == "a.weight"
    assert plain("a\nb") == "'a\\nb'"
    assert len(plain("n" * 10_000)) == 203


def test_a_few_of_many():
    assert first_few(["a"]) == "a"
    assert first_few(["a", "b\n", "c", "d", "e"]) == "a, 'b\\n', c and 2 more"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected
