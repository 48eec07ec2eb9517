"""Tokenizers in the folders of text encoders, with the token ids of transformers."""

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Vocabulary

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import is_lack_of_memory, read_json_object

_END_OF_CLIP = "<|endoftext|>"
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Special tokens of T5."""
_SPECIAL_OF_CLIP = {"bos_token": "<|startoftext|>", **dict.fromkeys(_SPECIAL, _END_OF_CLIP)}
_NAMES = (*_SPECIAL, "bos_token")
_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
_EXTRA_IDS = 100
"""Number of the special tokens that T5 has for masked spans."""
_CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
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
        # A file can also ask for multiples of any length.
        side = (vocabulary.padding or {}).get("direction", "right")
        self._padding = {"direction": side, "pad_token": pad, "pad_id": vocabulary.token_to_id(pad)}
        self._unknown_id = None if unknown is None else vocabulary.token_to_id(unknown)
        self._special = frozenset(special)

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
            self._vocabulary.enable_padding(**self._padding, length=length)
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
    stated = _stated_tokens(folder)
    with _blamed(folder):
        if (folder / "tokenizer.json").is_file():
            vocabulary = Vocabulary.from_file(str(folder / "tokenizer.json"))
            names = _SPECIAL_OF_CLIP if vocabulary.token_to_id(_END_OF_CLIP) is not None else _SPECIAL
            # A vocabulary of its own may lack some of them.
            names = {name: token for name, token in names.items() if vocabulary.token_to_id(token) is not None} | stated
        elif (folder / "spiece.model").is_file():
            names = _SPECIAL | stated
            vocabulary = _sentencepieces(folder / "spiece.model", end=names["eos_token"])
        else:
            names = _SPECIAL_OF_CLIP | stated
            vocabulary = _byte_pairs(folder, names)
        # Marked in a text, they are no words.
        vocabulary.add_special_tokens([AddedToken(token, special=True) for token in dict.fromkeys(names.values())])
    if not (pad := names.get("pad_token")):
        raise CheckpointError(f"the tokenizer in {folder} has no padding token")
    added: dict[int, AddedToken] = vocabulary.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    tokenizer = Tokenizer(vocabulary, pad=pad, unknown=names.get("unk_token"), special=special)
    # "▁" is sentencepiece's mark of a space.
    if not tokenizer.words - {"▁"}:
        raise CheckpointError(f"the vocabulary in {folder} has no words: every word would be unknown")
    if (last := max(tokenizer.vocabulary.values())) >= vocab_size:
        raise CheckpointError(f"the vocabulary in {folder} has ids up to {last}, its model only {vocab_size} rows")
    return tokenizer


def _stated_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that the configurations of a folder name."""
    found = dict[str, str]()
    for path in (folder / name for name in _CONFIGS):
        config = read_json_object(path, problem=CheckpointError, hint="fetch it again") if path.is_file() else {}
        for name in _NAMES:
            token: object = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[name] = token
    return found


def _sentencepieces(path: Path, *, end: str) -> Vocabulary:
    """Return the vocabulary of a T5 in sentencepiece's form."""
    # Untyped.
    protocol: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    model = protocol.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        raise CheckpointError(f"{path} is no sentencepiece vocabulary", hint="fetch it again") from error
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    vocabulary = Vocabulary(models.Unigram(pieces, model.trainer_spec.unk_id, byte_fallback=False))
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        vocabulary.normalizer = normalizers.Precompiled(charsmap)
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
        ]
    )
    vocabulary.add_special_tokens([f"<extra_id_{index}>" for index in reversed(range(_EXTRA_IDS))])
    vocabulary.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, vocabulary.token_to_id(end))]
    )
    return vocabulary


def _byte_pairs(folder: Path, names: dict[str, str]) -> Vocabulary:
    """Return the vocabulary of a CLIP in two files."""
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    pairs = models.BPE.from_file(*files, end_of_word_suffix="</w>", unk_token=names["unk_token"])
    vocabulary = Vocabulary(pairs)
    vocabulary.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ids: dict[str, Any] = {name: vocabulary.token_to_id(token) for name, token in names.items()}
    end, begin = ((names[name], ids[name]) for name in ("eos_token", "bos_token"))
    vocabulary.post_processor = processors.RobertaProcessing(end, begin, trim_offsets=False, add_prefix_space=False)
    return vocabulary


@contextmanager
def _blamed(folder: Path) -> Iterator[None]:
    """Turn any error of the libraries in the block into a CheckpointError, except a lack of memory."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"vocabulary in {folder} cannot be loaded: {type(error).__name__}: {text}") from error
