"""Rules between pairs of settings."""

import pytest
from pydantic import Field

from opensora_cli.core.section import Section
from opensora_cli.settings import generate, train
from opensora_cli.settings.applies import Pair, _find, pair_problems
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.train import TrainSettings


class Toy(Section):
    rank: int | None = Field(None, ge=0, le=9)
    kind: str = "ddp"
    compile: bool = False


@pytest.mark.parametrize(
    ("first", "second", "given", "named"),
    [
        ("rank", "compile", {"rank": 0, "compile": True}, None),
        ("rank", "compile", {"rank": 4, "compile": True}, "rank=4 does not go with compile=true: fix"),
        ("rank!=none", "compile", {"rank": 0, "compile": True}, "rank=0 does not go with compile=true: fix"),
        ("rank>1", "kind=ddp", {"rank": 1}, None),
        ("rank>1", "kind=ddp", {"rank": 2}, "rank=2 does not go with kind=ddp: fix"),
        ("compile", "kind!=ddp", {"compile": True}, None),
        (
            "compile",
            "kind=zero1|zero2",
            {"compile": True, "kind": "zero2"},
            "compile=true does not go with kind=zero2: fix",
        ),
    ],
)
def test_two_settings_do_not_go_together(first: str, second: str, given: dict[str, object], named: str | None) -> None:
    found = [*pair_problems(Toy.model_validate(given), conflicts=[Pair(first, second, "fix")])]
    assert found == ([] if named is None else [named])


def test_a_setting_needs_another_under_a_condition() -> None:
    rule = Pair("rank", "kind=hybrid", "use hybrid", "compile")
    assert [*pair_problems(Toy(rank=2), needs=[rule])] == []
    assert [*pair_problems(Toy(rank=2, compile=True), needs=[rule])] == ["rank=2 needs kind=hybrid: use hybrid"]
    assert [*pair_problems(Toy(rank=2, compile=True, kind="hybrid"), needs=[rule])] == []


def test_the_tables_name_settings_that_exist_and_the_defaults_break_no_rule() -> None:
    videos, training = load_preset("256px", prompt="sea"), TrainSettings(target="mmdit", data={"table": "clips.csv"})
    for settings, needs, conflicts in (
        (videos, generate._NEEDS, generate._CONFLICTS),
        (training, train._NEEDS, train._CONFLICTS),
    ):
        assert [*pair_problems(settings, needs=needs, conflicts=conflicts)] == []
        for rule in (*needs, *conflicts):
            # A key that does not exist is an error.
            assert all(_find(settings, key) for key in (rule.first, rule.second, rule.only) if key)
