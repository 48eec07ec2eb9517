"""File names from prompts of any language, valid on every system and limited in length."""

import hashlib
import unicodedata

MAX_PROMPT_BYTES = 100
"""Limit of the prompt in a name, in UTF-8 bytes. File systems allow 255 for the whole name, with seed and ending."""

_MAX_WHOLE_BYTES = 200
_HASH_DIGITS = 8
_SEPARATOR = "-"


def file_stem(prompt: str, *, seed: int) -> str:
    """Return the name, without ending, of the video of `prompt`: `raining-sea_seed42`.

    Letters, digits and vowel signs of every script stay (in lower case, since two names that differ only in case are
    one file on some systems); anything else becomes one `-`. Different prompts keep different names: where the prompt
    is cut, where nothing remains, or where symbols such as emoji are dropped, a short hash of the whole prompt is
    appended. With the seed at the end, no name is `con` or `nul`, which Windows reserves.
    """
    return f"{prompt_part(prompt)}_seed{seed}"


def prompt_stem(prompt: str, *, index: int) -> str:
    """Return the name, without ending, of a sample for evaluation suites such as VBench: `raining, sea-0`.

    Characters that no file name can have become `_`. A longer prompt than 200 bytes is cut and ends with a hash.
    """
    text = "".join("_" if character in "/\\" or character < " " else character for character in prompt)
    if len(text.encode("utf-8", "surrogatepass")) > _MAX_WHOLE_BYTES:
        text = f"{_cut(text, _MAX_WHOLE_BYTES)}{_SEPARATOR}{_digest(prompt)}"
    return f"{text}{_SEPARATOR}{index}"


def prompt_part(prompt: str) -> str:
    """Return the first part of `file_stem`, which alone may be a reserved name on Windows."""
    words, lost_something = _words(prompt)
    text = _cut(words, MAX_PROMPT_BYTES)
    if text != words or not text or lost_something:
        text = _SEPARATOR.join(filter(None, [_cut(words, MAX_PROMPT_BYTES - _HASH_DIGITS - 1), _digest(prompt)]))
    return text


def _digest(prompt: str) -> str:
    # surrogatepass: an argument that is not UTF-8 reaches Python as lone surrogates.
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]


def _words(prompt: str) -> tuple[str, bool]:
    """Return the words of `prompt` joined by `-`, and whether a symbol that carries meaning was dropped."""
    # Composed, lower case, composed again: lowering may decompose (Turkish dotted I).
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", prompt).lower())
    parts = "".join(character if unicodedata.category(character)[0] in "LNM" else " " for character in text).split()
    # Vowel signs begin no word, but the selector of a variation of a dropped emoji would.
    words = [part for part in parts if unicodedata.category(part[0])[0] != "M"]
    dropped = {unicodedata.category(character) for character in text if not character.isascii()}
    has_lost = any(kind[0] == "S" or kind in ("Cs", "Co", "Cn") for kind in dropped)
    return _SEPARATOR.join(words), has_lost or len(words) < len(parts)


def _cut(text: str, max_bytes: int) -> str:
    """Return the longest start of `text` within `max_bytes` of UTF-8, at a word's end if one is near."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return text
    start = encoded[:max_bytes].decode("utf-8", "ignore")
    # A script without spaces, or one very long word, is cut at the limit.
    word_end = (start + text[len(start)]).rfind(_SEPARATOR)
    return (start[:word_end] if word_end > len(start) // 2 else start).rstrip(_SEPARATOR)
