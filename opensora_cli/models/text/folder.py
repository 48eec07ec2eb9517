"""Reading a text encoder from a transformers folder: complete, offline, and without noise."""

import importlib
import importlib.util
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from opensora_cli.core.exceptions import CheckpointError, HardwareError
from opensora_cli.core.file_states import FileStates
from opensora_cli.core.reading import is_lack_of_memory
from opensora_cli.models.text.tokenizer import Tokenizer


def _broken() -> tuple[type[Exception], ...]:
    """Return what transformers raises where a configuration or weights are broken."""
    # Imported here, since it takes a client of HTTP with it.
    from huggingface_hub.errors import StrictDataclassError

    return (
        *(OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RuntimeError, EOFError),
        *(SafetensorError, StrictDataclassError, pickle.UnpicklingError),
    )


@contextmanager
def blamed(problem: str, *, broken: Callable[[], tuple[type[Exception], ...]] = _broken) -> Iterator[None]:
    """Turn what transformers raises in the block for broken files into a CheckpointError that begins with `problem`.
    A lack of memory stays one.
    """
    try:
        yield
    except broken() as error:
        if is_lack_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise CheckpointError(f"{problem}: {type(error).__name__}: {text[:300]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and logging inside the block, and restore them after it.

    Missing weights in its load reports are raised as an error by us instead.
    """
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


def load_config(config_class: Any, folder: Path) -> Any:
    """Return the configuration in `folder` as `config_class`. Raises CheckpointError where it is broken."""
    with quiet(), blamed(f"{folder / 'config.json'} cannot be read"):
        return config_class.from_pretrained(str(folder), local_files_only=True)


def load_model(model_class: Any, folder: Path, *, dtype: torch.dtype, ignored_prefixes: tuple[str, ...]) -> Any:
    """Return the frozen model of `model_class` in `folder`, on the CPU in `dtype`, in evaluation mode.

    Weights of a safetensors file that have this dtype already stay a map of the file. Keys with `ignored_prefixes`
    belong to other parts of a larger model. A broken file, or weights that do not fit the model, are a CheckpointError,
    and so is a call of the model after its files were written to.
    """
    files = FileStates.of(folder.glob("*.safetensors"))
    with quiet(), blamed(f"weights in {folder} cannot be loaded"):
        model, info = model_class.from_pretrained(
            str(folder), local_files_only=True, output_loading_info=True, dtype=dtype
        )
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.startswith(ignored_prefixes))
    problems = [
        f"{len(keys)} {kind} ({', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if problems:
        raise CheckpointError(f"weights in {folder} do not fit {model_class.__name__}: {'; '.join(problems)}")
    model.register_forward_pre_hook(lambda *_: files.require_same(CheckpointError))
    return model.requires_grad_(False).eval()


def load_tokenizer(folder: Path, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in `folder` of a model whose embedding table has `vocab_size` rows.

    Raises:
        CheckpointError: a broken vocabulary, one without words, or one that is larger than the model's table.
        HardwareError: sentencepiece or protobuf is needed and not installed.
    """
    with blamed(f"vocabulary in {folder} cannot be loaded", broken=_any):
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
    with quiet(), blamed(f"vocabulary in {folder} cannot be loaded", broken=_any):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.pad_token_id is None:
        raise CheckpointError(f"the tokenizer in {folder} has no padding token")
    # What its files say of lengths is first looked at when a text is read, and only then the sides are set.
    with quiet(), blamed(f"vocabulary in {folder} cannot be used", broken=_any):
        tokenizer("a")
        tokenizer("a", padding="max_length", truncation=True, max_length=8)
        vocabulary, unknown = tokenizer.backend_tokenizer, tokenizer.unk_token
    return Tokenizer(vocabulary, pad=tokenizer.pad_token, unknown=unknown, special=tokenizer.all_special_tokens)


def _any() -> tuple[type[Exception], ...]:
    """Return what the tokenizers library raises for a broken file."""
    return (Exception,)


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
