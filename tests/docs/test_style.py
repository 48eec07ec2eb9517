"""README, pages and help texts follow the style rules of CONTRIBUTING.md."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.pages import ROOT
from docs.style import Fault, faults_of_page, faults_of_prose

from opensora_cli.cli.app import load_commands

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Written by docs/generate_reference.py from texts of the package.
GENERATED = {
    *(REFERENCE / f"{name}.md" for name in ("commands", "settings_generate", "settings_train", "settings_vae")),
    *(REFERENCE / "json").glob("*.md"),
}
EXCEPTIONS = ROOT / "tests" / "docs" / "style_exceptions.txt"


def help_faults(command: Any, name: str) -> Iterator[Fault]:
    """Yield wrong openings and words in the help texts of a command, its options and the commands below it.

    Help texts are one line long: semicolons and parentheses keep them short.
    """
    if hasattr(command, "describe"):
        command.describe()
    about = (command.help or "").partition("Examples:")[0]
    texts = [(f"{name} --help", paragraph) for paragraph in about.split("\n\n")]
    texts += [
        (f"{name} {parameter.opts[0]}", getattr(parameter, "help", None) or "")
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    ]
    for place, text in texts:
        yield from (
            each for each in faults_of_prose(place, text) if "opens with" in each.rule or "words '" in each.rule
        )
    for below, each in getattr(command, "commands", {}).items():
        yield from help_faults(each, f"{name} {below}")


def page_faults() -> Iterator[Fault]:
    """Yield the faults of all pages. Generated pages are checked for their tables and length alone."""
    for page in PAGES:
        for fault in faults_of_page(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")):
            if page not in GENERATED or fault.rule.startswith("more than 5 columns") or "front matter" in fault.rule:
                yield fault


def pages_in(navigation: Any) -> Iterator[Path]:
    """Yield the pages of a part of the navigation that people write."""
    if isinstance(navigation, str):
        page = DOCS / navigation
        if page not in GENERATED:
            yield page
        return
    for below in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from pages_in(below)


@pytest.mark.parametrize(("section", "most_words"), [("Use", 16_000), ("Develop", 8_000)])
def test_a_section_is_short(section: str, most_words: int) -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    (pages,) = (part[section] for part in navigation if section in part)
    texts = [re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8")) for page in pages_in(pages)]
    assert len(texts) >= 10
    assert sum(len(text.split()) for text in texts) <= most_words


def test_pages_and_help_texts_follow_the_style_rules() -> None:
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    exceptions = {line for line in lines if line and not line.startswith("#")}
    faults = [*page_faults(), *help_faults(load_commands(), "osora")]
    used = {line for line in exceptions for fault in faults if str(fault).startswith(line)}
    found = [str(fault) for fault in faults if not any(str(fault).startswith(line) for line in exceptions)]
    assert found == []
    assert exceptions - used == set(), "these exceptions are needed no more"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Where it fits, it runs.", "opens with Where"),
        ("It runs. Of these, two are left.", "opens with Of"),
        ("It runs as it is.", "the words 'as it is'"),
        ("osora runs; it ends.", "a semicolon"),
        ("A run (of one) ends (at once).", "parenthesis"),
        (f"A {'word ' * 25}ends.", "27 words"),
        ("| a | b | c | d | e | f |\n|---|---|---|---|---|---|\n", "more than 5 columns"),
        ("| A colour | b |\n|---|---|\n", "the words 'colour'"),
        ("word " * 2_501, "front matter"),
    ],
)
def test_a_fault_is_found(text: str, rule: str) -> None:
    assert [fault for fault in faults_of_page("page", text) if rule in str(fault)] != []


def test_code_questions_and_reasons_are_no_faults() -> None:
    text = "# What is osora?\n\n`so far; (a) (b)`\n\n```text\nWhere; so far\n```\n\n| `a|b` | c |\n"
    assert list(faults_of_page("page", text)) == []
    long = "---\nlong: generated\n---\n" + "A word. " * 2_000
    assert list(faults_of_page("page", long)) == []
