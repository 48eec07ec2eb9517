"""Reading the tokenizer in a text encoder's folder: complete, offline, and without noise."""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import CheckpointError, HardwareError
from opensora_cli.core.reading import is_lack_of_memory
from opensora_cli.models.text.tokenizer import Tokenizer


@contextmanager
def _blamed(problem: str) -> Iterator[None]:
    """Turn whatever libraries raise in the block for broken files into a CheckpointError that begins with `problem`.
    A lack of memory stays one.
    """
    try:
        yield
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise CheckpointError(f"{problem}: {type(error).__name__}: {text[:300]}") from error


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


def load_tokenizer(folder: Path, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in `folder` of a model whose embedding table has `vocab_size` rows.

    Files are read again only if they have changed.

    Raises:
        CheckpointError: a broken vocabulary, one without words, or one that is larger than the model's table.
        HardwareError: sentencepiece or protobuf is needed and not installed.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    states = tuple((file.name, (state := file.stat()).st_mtime_ns, state.st_size) for file in files if file.is_file())
    return _load_tokenizer(folder, vocab_size, states)


@lru_cache(maxsize=4)
def _load_tokenizer(folder: Path, vocab_size: int, states: object) -> Tokenizer:
    """Return the tokenizer in `folder`, whose files have these `states`."""
    with _blamed(f"vocabulary in {folder} cannot be loaded"):
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
        _require_sentencepiece(folder / "spiece.model")
    with quiet(), _blamed(f"vocabulary in {folder} cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.pad_token_id is None:
        raise CheckpointError(f"the tokenizer in {folder} has no padding token")
    # What its files say of lengths is first looked at when a text is read, and only then the sides are set.
    with quiet(), _blamed(f"vocabulary in {folder} cannot be used"):
        tokenizer("a")
        tokenizer("a", padding="max_length", truncation=True, max_length=8)
        vocabulary, unknown = tokenizer.backend_tokenizer, tokenizer.unk_token
    return Tokenizer(vocabulary, pad=tokenizer.pad_token, unknown=unknown, special=tokenizer.all_special_tokens)


def _require_sentencepiece(vocabulary: Path) -> None:
    """Refuse what transformers would blame on another library: a missing library or an unreadable vocabulary."""
    for module, package in (("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of the parent package
            found = False
        if not found:
            raise HardwareError(f"{vocabulary} needs {package}", hint=f"pip install {package}")
    sentencepiece: Any = importlib.import_module("sentencepiece")  # untyped
    try:
        sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{vocabulary} is no sentencepiece vocabulary", hint="fetch it again") from error
