"""Names of files in messages of one line."""

import pytest

from opensora_cli.core.listing import escaped, first_few, plain


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
def test_only_what_steers_a_terminal_is_escaped(text: str, expected: str) -> None:
    assert escaped(text) == expected


def test_names_take_one_line_and_not_too_long() -> None:
    assert plain("a.weight") == "a.weight"
    assert plain("a\nb") == "'a\\nb'"
    assert len(plain("n" * 10_000)) == 203


def test_a_few_of_many() -> None:
    assert first_few(["a"]) == "a"
    assert first_few(["a", "b\n", "c", "d", "e"]) == "a, 'b\\n', c and 2 more"
