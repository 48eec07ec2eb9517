"""README, pages and help texts follow the style rules of CONTRIBUTING.md that a program can check."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from docs.pages import ROOT

from opensora_cli.cli.app import load_commands

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Written by docs/generate_reference.py from texts of the package.
GENERATED = {
    *(REFERENCE / f"{name}.md" for name in ("commands", "settings_generate", "settings_train", "settings_vae")),
    *(REFERENCE / "json").glob("*.md"),
}

OPENINGS = ("Of", "Where", "What", "Which", "Likewise")
PHRASES = (
    *(
        r"as it is(?=[.,:;)]|$)",
        "bit for bit",
        "but for",
        "by now",
        "comes to that",
        "equal but",
        "for want of",
        "go on",
    ),
    *("goes on", "going on", "in the way", "left aside", "left out", "lent", "so far", "told"),
)
BRITISH = ("behaviour", "centre", "colour", "grey", "licence", "neighbour", "optimise", "recognise")
MOST_WORDS, MOST_COLUMNS, MOST_PAGE_WORDS = 25, 5, 2_500

_FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_WORDS = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b|\b(?:{'|'.join(BRITISH)})", re.IGNORECASE)
_COLUMN = re.compile(r"(?<!\\)\|")


def faults_of_page(markdown: str) -> Iterator[str]:
    """Yield the faults of a page: its prose, its tables and its length."""
    front_matter = _FRONT_MATTER.match(markdown)
    text = _FENCE.sub("\n\n", _FRONT_MATTER.sub("", markdown))
    if len(text.split()) > MOST_PAGE_WORDS and not (front_matter and re.search(r"^long: \S", front_matter[1], re.M)):
        yield f"more than {MOST_PAGE_WORDS} words without `long: REASON` in the front matter"
    for line in text.splitlines():
        if line.startswith("|") and len(_COLUMN.findall(line)) - 1 > MOST_COLUMNS:
            yield f"more than {MOST_COLUMNS} columns: {line[:60]}"
    for paragraph in paragraphs(text):
        if paragraph.startswith("|"):
            yield from (fault for cell in _COLUMN.split(paragraph) for fault in faults_of_words(cell.strip()))
        else:
            yield from faults_of_prose(paragraph)


def faults_of_prose(text: str) -> Iterator[str]:
    """Yield the faults of the sentences of a paragraph."""
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+|<[^>]+>|\*\*|__", "", text)
    for sentence in re.split(r"(?<=[.!?])[\"”)]?\s+(?=[\"“(]?(?:[A-Z0-9-]|osora))", " ".join(text.split())):
        yield from faults_of_words(sentence)
        opening = re.match(r"\w+", sentence)
        if opening is not None and opening[0] in OPENINGS and not sentence.endswith("?"):
            yield f"a sentence opens with {opening[0]}: {sentence}"
        if ";" in sentence:
            yield f"a semicolon: {sentence}"
        if len(sentence.split()) > MOST_WORDS:
            yield f"{len(sentence.split())} words in a sentence, more than {MOST_WORDS}: {sentence}"
        if sentence.count("(") > 1:
            yield f"more than one parenthesis: {sentence}"


def faults_of_words(text: str) -> Iterator[str]:
    for found in _WORDS.findall(re.sub(r"`[^`]*`", "X", text)):
        yield f"the words {found.lower()!r}: {text}"


def paragraphs(text: str) -> Iterator[str]:
    """Yield headings, list items, rows of tables and paragraphs."""
    waiting: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts = re.match(r"\s*(?:[-*+]|\d+\.|#+|\||!!!|\?\?\?)(?:\s|$)", line) or line.startswith("|")
        if (starts or not line.strip()) and waiting:
            yield " ".join(waiting)
            waiting = []
        if line.strip():
            waiting.append(re.sub(r"^\s*(?:[-*+]|\d+\.|#+)\s+", "", line.strip()))
        if line.startswith(("#", "|")):
            yield " ".join(waiting)
            waiting = []


def help_faults(command: Any, name: str) -> Iterator[str]:
    """Yield wrong openings and words in the help texts of a command, its options and the commands below it.

    Help texts are one line long: semicolons and parentheses keep them short.
    """
    if hasattr(command, "describe"):
        command.describe()
    texts = [(f"{name} --help", each) for each in (command.help or "").partition("Examples:")[0].split("\n\n")]
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    texts += [(f"{name} {each.opts[0]}", getattr(each, "help", None) or "") for each in shown]
    for place, text in texts:
        yield from (
            f"{place}: {each}" for each in faults_of_prose(text) if re.match("a sentence opens|the words", each)
        )
    for below, each in getattr(command, "commands", {}).items():
        yield from help_faults(each, f"{name} {below}")


def page_faults() -> Iterator[str]:
    """Yield the faults of all pages. Generated pages are checked for their tables and length alone."""
    for page in PAGES:
        for fault in faults_of_page(page.read_text(encoding="utf-8")):
            if page not in GENERATED or re.match(r"more than \d+ (columns|words without)", fault):
                yield f"{page.relative_to(ROOT)}: {fault}"


def test_pages_and_help_texts_follow_the_style_rules() -> None:
    assert [*page_faults(), *help_faults(load_commands(), "osora")] == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Where it fits, it runs.", "opens with Where"),
        ("osora runs; it ends.", "a semicolon"),
        ("A run (of one) ends (at once).", "parenthesis"),
        (f"A {'word ' * 25}ends.", "27 words"),
        ("| a | b | c | d | e | f |\n|---|---|---|---|---|---|\n", "more than 5 columns"),
        ("| A colour | b |\n|---|---|\n", "the words 'colour'"),
        ("word " * 2_501, "front matter"),
    ],
)
def test_a_fault_is_found(text: str, rule: str) -> None:
    assert [fault for fault in faults_of_page(text) if rule in fault] != []
