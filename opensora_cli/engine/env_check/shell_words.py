"""Words of shell commands and of Dockerfile instructions, with the lines that they begin in."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS = ";&|()\n"
_BRACES = "{}"
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")


@dataclass(frozen=True, slots=True)
class Word:
    """A word without its quotes, or what separates commands."""

    text: str
    line: int
    is_literal: bool = True
    """Whether nothing in it is replaced when it is read: no variable, no command."""
    is_operator: bool = False


def split_words(text: str, *, first_line: int = 1, has_operators: bool = True) -> Iterator[Word]:
    """Yield the words of `text`, as POSIX shells split them.

    What only a shell could know is not tried: words are not expanded, and documents in the text (`<<EOF`) are left out.
    A quote that never ends takes the rest of the text into its word.

    Args:
        text: commands, or the arguments of an instruction.
        first_line: the number of its first line.
        has_operators: whether `;`, `&`, `|`, parentheses and line ends separate commands, and `#` begins a comment.
    """
    reader = _Reader(text, first_line, has_operators)
    while (word := reader.next_word()) is not None:
        yield word


class _Reader:
    """Goes through a text once."""

    def __init__(self, text: str, line: int, has_operators: bool) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._has_operators = has_operators
        self._documents: list[str] = []
        """Ends of documents that begin after this line."""

    def next_word(self) -> Word | None:
        """Return the next word, or None at the end."""
        self._skip_blanks()
        if self._at >= len(self._text):
            return None
        character, line = self._text[self._at], self._line
        if self._has_operators and (character in _OPERATORS or self._is_lone_brace()):
            self._take()
            if character == "\n":
                self._skip_documents()
            return Word(character, line, is_operator=True)
        return self._word(line)

    def _word(self, line: int) -> Word:
        parts: list[str] = []
        is_literal = True
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "'\"":
                quoted, literal = self._quoted()
                parts.append(quoted)
                is_literal &= literal
            elif character == "\\":
                self._take()
                escaped = self._take()
                parts.append("" if escaped == "\n" else escaped)
            elif self._text.startswith(("$(", "${"), self._at):
                is_literal = False
                self._skip_expansion()
            elif character.isspace() or (self._has_operators and character in _OPERATORS):
                break
            else:
                is_literal &= character not in "$`"
                self._note_document()
                parts.append(self._take())
        return Word("".join(parts), line, is_literal)

    def _quoted(self) -> tuple[str, bool]:
        quote, parts, is_literal = self._take(), list[str](), True
        while self._at < len(self._text):
            character = self._take()
            if character == quote:
                break
            if quote == '"' and character == "\\":
                escaped = self._take()
                parts.append(escaped if escaped in '$`"\\' else "" if escaped == "\n" else "\\" + escaped)
                continue
            is_literal &= quote == "'" or character not in "$`"
            parts.append(character)
        return "".join(parts), is_literal

    def _skip_expansion(self) -> None:
        """Pass `$(...)` or `${...}`, with others inside."""
        self._take()
        depth = 0
        while self._at < len(self._text):
            character = self._take()
            depth += (character in "({") - (character in ")}")
            if depth == 0:
                return

    def _skip_blanks(self) -> None:
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._text.startswith("\\\n", self._at):
                self._take()
                self._take()
            elif character == "#" and self._has_operators:
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif character.isspace() and not (self._has_operators and character == "\n"):
                self._take()
            else:
                return

    def _is_lone_brace(self) -> bool:
        """Return whether a brace opens or closes a block, and is no part of a word as in {a,b}."""
        following = self._text[self._at + 1 : self._at + 2]
        return self._text[self._at] in _BRACES and (not following or following.isspace() or following in _OPERATORS)

    def _note_document(self) -> None:
        found = _HEREDOC.match(self._text, self._at) if self._has_operators else None
        if found and self._text[max(self._at - 1, 0)] != "<":
            self._documents.append(found[3])

    def _skip_documents(self) -> None:
        for end in self._documents:
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                line = self._text[self._at : stop]
                self._at = stop
                if self._at < len(self._text):
                    self._take()
                if line.strip() == end:
                    break
        self._documents.clear()

    def _take(self) -> str:
        character = self._text[self._at : self._at + 1]
        self._at += 1
        self._line += character == "\n"
        return character
