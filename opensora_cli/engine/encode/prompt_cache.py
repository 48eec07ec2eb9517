"""Embeddings of prompts on disk, so that a prompt that was encoded once needs no text encoder again.

Each prompt is a file of the user's cache folder, named after all that decides its bits. Files appear whole; a broken
one is encoded again and replaced. What is wrong with the folder is warned of once, and ends nothing.
"""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.formats.safetensors import open_safetensors, write_safetensors
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.files import atomic_path, user_cache
from opensora_cli.core.progress import Reporter

_ENDING = ".safetensors"
_PROMPT_EMBEDS, _POOLED_PROMPT_EMBEDS = "prompt_embeds", "pooled_prompt_embeds"
_DIGEST = "osora.sha256"
_HEADER_BYTES = 512
"""Of a file, at the most."""
_LOOKS = 32
"""How often the folder is looked through while as much is written as it may hold: several processes may write."""
_SLACK_S = 1.0
"""By which the clock of a file system may be behind."""


@dataclass(frozen=True, slots=True)
class TextEmbeds:
    """One text, encoded."""

    prompt_embeds_1LC: Tensor
    """Of T5."""
    pooled_prompt_embeds_1V: Tensor
    """Of CLIP."""

    @property
    def nbytes(self) -> int:
        """The size of both."""
        return self.prompt_embeds_1LC.nbytes + self.pooled_prompt_embeds_1V.nbytes

    def to(self, device: torch.device) -> "TextEmbeds":
        """Return both on a device."""
        return TextEmbeds(self.prompt_embeds_1LC.to(device), self.pooled_prompt_embeds_1V.to(device))

    def sha256(self) -> str:
        """Return the hash of both."""
        both = (self.prompt_embeds_1LC, self.pooled_prompt_embeds_1V)
        digest = hashlib.sha256()
        for tensor in both:
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class PromptCache:
    """The prompts of one run in the user's cache.

    What was used last before the run began is removed where there is no room; what the run itself has used stays. So a
    run of more prompts than there is room for fills the folder once, and writes no more then.

    Args:
        folder: where the files are, which need not exist; None: there is no cache.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._begun_s = time.time() - _SLACK_S
        self._is_closed = folder is None
        self._room = 0
        """Bytes that may be written before the folder is looked through again."""

    @classmethod
    def of_user(cls) -> "PromptCache":
        """Return the cache of the user who runs this, if they have a folder for it."""
        return cls(user_cache("prompts"))

    @property
    def folder(self) -> Path | None:
        """Where the files are; None: nothing is kept yet."""
        try:
            return self._folder if self._folder is not None and self._folder.is_dir() else None
        except OSError:
            return None

    @property
    def is_writable(self) -> bool:
        """Whether there is a folder for it, in which no write has failed yet."""
        return not self._is_closed

    def has(self, name: str) -> bool:
        """Whether there is a file for a name; it may turn out to be broken."""
        try:
            return self._folder is not None and self._path(name).is_file()
        except OSError:
            return False

    def read(self, name: str, reporter: Reporter) -> TextEmbeds | None:
        """Return what was kept under a name, on the CPU; None: nothing, or what is broken, with a warning."""
        if not self.has(name):
            return None
        path = self._path(name)
        try:
            entries, metadata = open_safetensors(path)
            found = TextEmbeds(entries[_PROMPT_EMBEDS].read(), entries[_POOLED_PROMPT_EMBEDS].read())
            if found.sha256() != metadata.get(_DIGEST):
                raise ValueError("its content is not what was written")
        except (OsoraError, OSError, LookupError, ValueError) as error:
            if path.is_file():  # and was not removed meanwhile
                reporter.warn(f"{path} is broken: its prompt is encoded again ({_reason(error)})")
            return None
        with suppress(OSError):  # where the folder is only for reading
            os.utime(path)
        return found

    def keep(self, name: str, embeds: TextEmbeds, *, limit: int, reporter: Reporter) -> None:
        """Keep embeddings under a name, in a folder of `limit` bytes at most; without effect where that fails."""
        if self._is_closed:
            return
        path = self._path(name)
        try:
            size = embeds.nbytes + _HEADER_BYTES
            if size > self._room and not self._make_room(size, limit):
                self._is_closed = True
                return
            tensors = {
                _PROMPT_EMBEDS: HeldEntry(embeds.prompt_embeds_1LC),
                _POOLED_PROMPT_EMBEDS: HeldEntry(embeds.pooled_prompt_embeds_1V),
            }
            with atomic_path(path) as temporary:
                write_safetensors(temporary, tensors, metadata={_DIGEST: embeds.sha256()})
            self._room -= size
        except (OsoraError, OSError) as error:
            self._is_closed = True
            reporter.warn(f"embeddings of prompts are not cached: {_reason(error)}")

    def _make_room(self, nbytes: int, limit: int) -> bool:
        """Remove what is oldest until there is room for `nbytes`; returns whether there is."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        found = []
        for path in self._folder.glob(f"*{_ENDING}"):
            with suppress(OSError):  # another process has removed it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        free = limit - sum(size for _, size, _ in found)
        wanted = max(nbytes, limit // _LOOKS)
        for used_s, size, path in sorted(found):
            if free >= wanted or used_s >= self._begun_s:
                break
            path.unlink(missing_ok=True)
            free += size
        self._room = min(free, wanted)
        return free >= nbytes

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{_ENDING}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return error.message if isinstance(error, OsoraError) else str(error)
