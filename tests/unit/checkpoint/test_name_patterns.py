"""Patterns of names: those that are understood mean what they mean to `re`, and none takes long."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_cli.checkpoint.name_patterns import NamePattern, ValuesByName

PARTS = ["a", "b", "1", ".", r"\.", r"\d", r"\w+", "[ab]", "[a1-3]*", "a*", ".*", "b+", "a?", "(a|b)", r"(?:a\.b|)"]
PATTERNS = st.tuples(
    st.sampled_from(["", "^"]),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join),
    st.sampled_from("$ "),
).map(lambda parts: "".join(parts).strip())
NAMES = st.text("ab.1", min_size=1, max_size=8).filter(lambda name: not name.endswith("."))


@settings(max_examples=500, deadline=None)
@given(pattern=PATTERNS, name=NAMES)
def test_they_mean_what_they_mean_to_re(pattern, name):
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert NamePattern(pattern).matches(name) == expected


def test_alternatives_without_parentheses():
    found = [name for name in ("to_q", "a.to_k", "to_v", "xto_q") if NamePattern("to_q|to_k").matches(name)]
    assert found == ["to_q", "a.to_k"]


@pytest.mark.parametrize(
    "pattern", ["(?i)a", "(a+)+b", "(a|b)*", "a{5}", r"(a)\1", "((a))", "(?=a)", "[^a]", "a**", "^a|b", "(a|b)" * 7]
)
def test_others_are_refused(pattern):
    with pytest.raises(ValueError, match=r"understood|choices"):
        NamePattern(pattern)


def test_many_repeats_are_matched_side_by_side():
    # `re` would try all ways to divide the name: more than there are atoms in the universe.
    assert not NamePattern("a*" * 90 + "b").matches("a" * 500)


def test_the_first_that_matches_counts():
    values = ValuesByName({"x.proj": 1, r"\w+": 2, "proj": 3, "^y.proj$": 4})
    assert [values.get(name, 0) for name in ("x.proj", "a.x.proj", "y.proj", "proj", "proj.")] == [1, 1, 2, 2, 0]
    assert ValuesByName({"^y.proj$": 4, "proj": 3}).get("y.proj", 0) == 4
    assert ValuesByName({"^y.proj$": 4, "proj": 3}).get("x.y.proj", 0) == 3
