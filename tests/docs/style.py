"""Style rules of CONTRIBUTING.md that a program can check, for Markdown and help texts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPENINGS = ("Of", "Where", "What", "Which", "Likewise")
PHRASES = (
    "as it is",
    "bit for bit",
    "but for",
    "by now",
    "comes to that",
    "equal but",
    "for want of",
    "go on",
    "goes on",
    "going on",
    "in the way",
    "left aside",
    "left out",
    "lent",
    "so far",
    "told",
)
BRITISH = ("behaviour", "centre", "colour", "grey", "licence", "neighbour", "optimise", "recognise")
MOST_WORDS = 25
MOST_COLUMNS = 5
MOST_PAGE_WORDS = 2_500

_FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_PHRASE = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b|\b(?:{'|'.join(BRITISH)})", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """Text that breaks a rule."""

    place: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.text}"


def faults_of_page(place: str, markdown: str) -> Iterator[Fault]:
    """Yield the faults of a page: its prose, its tables and its length."""
    front_matter = _FRONT_MATTER.match(markdown)
    text = _FENCE.sub("\n\n", _FRONT_MATTER.sub("", markdown))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    if len(text.split()) > MOST_PAGE_WORDS and not (front_matter and re.search(r"^long: \S", front_matter[1], re.M)):
        yield Fault(place, f"more than {MOST_PAGE_WORDS} words without `long: REASON` in the front matter", "")
    for line in text.splitlines():
        if line.startswith("|") and len(re.findall(r"(?<!\\)\|", line)) - 1 > MOST_COLUMNS:
            yield Fault(place, f"more than {MOST_COLUMNS} columns", line[:60])
    for paragraph in _paragraphs(text):
        if paragraph.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", paragraph):
                yield from _faults_of_words(place, cell.strip())
        else:
            yield from faults_of_prose(place, paragraph)


def faults_of_prose(place: str, text: str) -> Iterator[Fault]:
    """Yield the faults of the sentences of a paragraph."""
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+|<[^>]+>|\*\*|__", "", text)
    for sentence in re.split(r"(?<=[.!?])[\"”)]?\s+(?=[\"“(]?(?:[A-Z0-9-]|osora))", " ".join(text.split())):
        yield from _faults_of_words(place, sentence)
        opening = re.match(r"\w+", sentence)
        if opening is not None and opening[0] in OPENINGS and not sentence.endswith("?"):
            yield Fault(place, f"a sentence opens with {opening[0]}", sentence)
        if ";" in sentence:
            yield Fault(place, "a semicolon", sentence)
        if len(sentence.split()) > MOST_WORDS:
            yield Fault(place, f"{len(sentence.split())} words in a sentence, more than {MOST_WORDS}", sentence)
        if sentence.count("(") > 1:
            yield Fault(place, "more than one parenthesis", sentence)


def _faults_of_words(place: str, text: str) -> Iterator[Fault]:
    for found in _PHRASE.findall(re.sub(r"`[^`]*`", "X", text)):
        yield Fault(place, f"the words {found.lower()!r}", text)


def _paragraphs(text: str) -> Iterator[str]:
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
