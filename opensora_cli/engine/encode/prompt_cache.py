"""Cache of prompt embeddings on disk: a prompt that was encoded once needs no text encoder again.

Each prompt is a file in the user's cache folder, named after everything that decides its bits. Files appear whole. A
broken file is encoded again and replaced. A problem with the folder is one warning, and ends no run.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.progress import Reporter

_ENDING = ".safetensors"
_PROMPT_EMBEDS, _POOLED_PROMPT_EMBEDS = "prompt_embeds", "pooled_prompt_embeds"
_HEADER_BYTES = 512
"""Upper limit of the bytes of a file that are not embeddings."""
_CLOCK_SKEW_S = 1.0
"""Delay that the clock of a file system may have."""


@dataclass(frozen=True, slots=True)
class TextEmbeds:
    """Embeddings of one text."""

    prompt_embeds_1LC: Tensor
    """Output of T5."""
    pooled_prompt_embeds_1V: Tensor
    """Output of CLIP."""

    @property
    def nbytes(self) -> int:
        """Bytes of both embeddings."""
        return self.prompt_embeds_1LC.nbytes + self.pooled_prompt_embeds_1V.nbytes

    def to(self, device: torch.device) -> "TextEmbeds":
        """Return both embeddings on a device."""
        return TextEmbeds(self.prompt_embeds_1LC.to(device), self.pooled_prompt_embeds_1V.to(device))


class PromptCache:
    """Prompts in the cache of a user, for one run. Without a `folder`, which need not exist, there is no cache.

    The least recently used files are removed when there is no room. Files that this run has used stay: a run with more
    prompts than there is room for fills the folder, and then writes no more.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._begun_s = time.time() - _CLOCK_SKEW_S
        self.is_writable = folder is not None
        """Whether there is a folder with room, in which every write succeeded."""

    def read(self, name: str, reporter: Reporter) -> TextEmbeds | None:
        """Return the embeddings for a name, on the CPU, or None if they are missing or broken."""
        if self._folder is None or not os.path.isfile(path := self._folder / f"{name}{_ENDING}"):
            return None
        try:
            with safe_open(path, framework="pt") as file:
                names = (_PROMPT_EMBEDS, _POOLED_PROMPT_EMBEDS)
                found = TextEmbeds(*(file.get_tensor(name).clone() for name in names))
        except (SafetensorError, OSError) as error:
            if path.is_file():  # not if another process has removed it
                reporter.warn(f"{path} is broken: its prompt is encoded again ({_reason(error)})")
            return None
        with suppress(OSError):  # a folder can be read-only
            os.utime(path)
        return found

    def keep(self, name: str, embeds: TextEmbeds, *, limit: int, reporter: Reporter) -> None:
        """Write embeddings under a name, if the folder then has at most `limit` bytes."""
        if self._folder is None or not self.is_writable:
            return
        size = embeds.nbytes + _HEADER_BYTES
        tensors = {_PROMPT_EMBEDS: embeds.prompt_embeds_1LC, _POOLED_PROMPT_EMBEDS: embeds.pooled_prompt_embeds_1V}
        try:
            self.is_writable = self._make_room(self._folder, size, limit)
            if self.is_writable:
                write_weights(self._folder / f"{name}{_ENDING}", tensors)
        except (OsoraError, OSError) as error:
            self.is_writable = False
            reporter.warn(f"embeddings of prompts are not cached: {_reason(error)}")

    def _make_room(self, folder: Path, nbytes: int, limit: int) -> bool:
        """Remove the oldest files until there is room for `nbytes`; return whether there is."""
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for path in folder.glob(f"*{_ENDING}"):
            with suppress(OSError):  # another process has removed it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        free = limit - sum(size for _, size, _ in found)
        for used_s, size, path in sorted(found):
            if free >= nbytes or used_s >= self._begun_s:
                break
            path.unlink(missing_ok=True)
            free += size
        return free >= nbytes


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, OsoraError) else str(error)
