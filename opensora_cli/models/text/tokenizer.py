"""Tokenizers in the folders of text encoders: read completely, offline, and without noise."""

import importlib
import json
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as Vocabulary

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import is_lack_of_memory

_NAMES = frozenset({"bos_token", "eos_token", "pad_token", "unk_token"})
_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes of transformers that follow tokenizer.json."""
_OTHER_FILES = ("added_tokens.json", "special_tokens_map.json")
_encoding = threading.Lock()
"""Held while a vocabulary pads and truncates in one way: pipelines in several threads share the loaded tokenizers."""


class Tokenizer:
    """Vocabulary with tokens for padding and for unknown words.

    Args:
        vocabulary: vocabulary, which may set the side of padding and truncation; the default is right.
        pad: token that pads a text.
        unknown: token for characters that cannot be spelled. None means no such token.
        special: all tokens that are no part of a text.
    """

    def __init__(self, vocabulary: Vocabulary, *, pad: str, unknown: str | None, special: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._cut = (vocabulary.truncation or {}).get("direction", "right")
        self._padding = (vocabulary.padding or {}) | {"pad_token": pad, "pad_id": vocabulary.token_to_id(pad)}
        self._unknown_id = None if unknown is None else vocabulary.token_to_id(unknown)
        self._special = frozenset(special)

    @classmethod
    def of_one_file(cls, folder: Path) -> Self | None:
        """Return the tokenizer if tokenizer.json describes it completely; None if transformers is needed.

        The import of transformers takes longer than all other work before a small model runs. Raises the errors of
        tokenizers for a broken file.
        """
        file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not (file.is_file() and config.is_file()) or any((folder / name).exists() for name in _OTHER_FILES):
            return None
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or settings.pop("tokenizer_class", None) not in _CLASSES:
            return None
        settings.pop("backend", None)
        if not isinstance(settings.pop("model_max_length", 0), int | float):
            return None
        vocabulary = Vocabulary.from_file(str(file))
        added: dict[int, AddedToken] = vocabulary.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        if vocabulary.post_processor is None or "pad_token" not in settings:
            return None
        if not settings.keys() <= _NAMES or not all(isinstance(token, str) for token in settings.values()):
            return None
        if not special.issuperset(settings.values()):
            return None
        pad, unknown = settings["pad_token"], settings.get("unk_token")
        return cls(vocabulary, pad=pad, unknown=unknown, special=[*settings.values()])

    @property
    def vocabulary(self) -> dict[str, int]:
        """Tokens and their ids."""
        return self._vocabulary.get_vocab()

    @property
    def words(self) -> set[str]:
        """Tokens that can be a part of a text."""
        return {*self.vocabulary} - self._special

    def ids(self, text: str, *, with_special: bool = True) -> list[int]:
        """Return the ids of a text, without padding or truncation."""
        with _encoding:
            self._vocabulary.no_truncation()
            self._vocabulary.no_padding()
            ids: list[int] = self._vocabulary.encode_batch([text], add_special_tokens=with_special)[0].ids
        return ids

    def padded_ids(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return `length` ids for each text, special ones included."""
        with _encoding:
            self._vocabulary.enable_truncation(length, direction=self._cut)
            self._vocabulary.enable_padding(**self._padding | {"length": length})
            return [each.ids for each in self._vocabulary.encode_batch([*texts])]

    def can_spell(self, word: str) -> bool:
        """Return whether the vocabulary has tokens for a word."""
        return self._unknown_id is None or self._unknown_id not in self.ids(word, with_special=False)


def load_tokenizer(folder: Path, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in `folder` of a model whose embedding table has `vocab_size` rows.

    Files are read again only if they have changed. Raises CheckpointError for a vocabulary that is broken, has no
    words, or is larger than the model's table.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    states = tuple((file.name, (state := file.stat()).st_mtime_ns, state.st_size) for file in files if file.is_file())
    return _load_tokenizer(folder, vocab_size, states)


@lru_cache(maxsize=4)
def _load_tokenizer(folder: Path, vocab_size: int, states: object) -> Tokenizer:
    """Return the tokenizer in `folder`, whose files have these `states`."""
    with _blamed(folder):
        tokenizer = Tokenizer.of_one_file(folder)
    tokenizer = tokenizer or _tokenizer_of_transformers(folder)
    # A tokenizer class can make a vocabulary of its special tokens alone; "▁" is sentencepiece's mark of a space.
    if not tokenizer.words - {"▁"}:
        raise CheckpointError(f"the vocabulary in {folder} has no words: every word would be unknown")
    if (last := max(tokenizer.vocabulary.values())) >= vocab_size:
        raise CheckpointError(f"the vocabulary in {folder} has ids up to {last}, its model only {vocab_size} rows")
    return tokenizer


def _tokenizer_of_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file() and (folder / "spiece.model").is_file():
        _require_vocabulary(folder / "spiece.model")
    with quiet(), _blamed(folder):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.pad_token_id is None:
        raise CheckpointError(f"the tokenizer in {folder} has no padding token")
    # It looks at the stated lengths when it reads a text, and only then it sets the sides.
    with quiet(), _blamed(folder):
        tokenizer("a")
        tokenizer("a", padding="max_length", truncation=True, max_length=8)
        vocabulary, unknown = tokenizer.backend_tokenizer, tokenizer.unk_token
    return Tokenizer(vocabulary, pad=tokenizer.pad_token, unknown=unknown, special=tokenizer.all_special_tokens)


def _require_vocabulary(vocabulary: Path) -> None:
    """Refuse an unreadable vocabulary, for which transformers would blame a missing library."""
    sentencepiece: Any = importlib.import_module("sentencepiece")  # untyped
    try:
        sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{vocabulary} is no sentencepiece vocabulary", hint="fetch it again") from error


@contextmanager
def _blamed(folder: Path) -> Iterator[None]:
    """Turn any error of the libraries in the block into a CheckpointError, except a lack of memory."""
    try:
        yield
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"vocabulary in {folder} cannot be loaded: {type(error).__name__}: {text}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and logging inside the block, and restore them after it."""
    from transformers.utils import logging as noise

    control: Any = noise  # partly untyped
    verbosity, bars = control.get_verbosity(), control.is_progress_bar_enabled()
    control.set_verbosity(logging.CRITICAL)
    control.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        control.set_verbosity(verbosity)
        if bars:
            control.enable_progress_bar()
