"""Record of an opened checkpoint, and the choice of one of its sets of weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.weight_choices import Format, Selection

if TYPE_CHECKING:  # it needs torch, whose import would delay the refusal of a wrong request
    from opensora_cli.checkpoint.lazy import LazyTensor
    from opensora_cli.checkpoint.shards import ShardIndex

TORCH_MAGIC = b"PK\x03\x04"
"""Start of a file of `torch.save`, a zip archive."""
PICKLE_MAGIC = b"\x80"
"""Start of a file of an old `torch.save`, a pickle of protocol 2 or later."""
DCP_METADATA = ".metadata"
"""Name of the file that describes a folder of `torch.distributed.checkpoint`."""
DCP_SUFFIX = ".distcp"
"""End of the names of the files with its tensors."""
_SHARD_NAME = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(\..+)", re.ASCII)


def shard_of(name: str) -> tuple[str, int, int] | None:
    """Return index, number and count for a name such as `model-00001-of-00004.safetensors`; else None.

    Shards are counted from 1. A single shard is a whole checkpoint.
    """
    match = _SHARD_NAME.fullmatch(name)
    if match is None or int(match[3]) < 2:
        return None
    return f"{match[1]}{match[4]}.index.json", int(match[2]), int(match[3])


def choose(select: Selection | None, selections: Sequence[Selection], *, path: Path) -> Selection | None:
    """Return the selected weights, or the first ones; None if there is no choice.

    Raises:
        RequestError: the selected weights are missing.
    """
    if select is not None and select not in (selections or (Selection.MODEL,)):
        there = ", ".join(selections) or "only one set of weights"
        raise RequestError(f"{path} has no {select} weights: it has {there}", hint="choose with --select")
    return (select or selections[0]) if selections else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint; none of its tensors has been read."""

    format: Format
    path: Path
    """The opened file or folder."""
    selection: Selection | None = None
    """Selected set of weights; None if there is no choice."""
    selections: tuple[Selection, ...] = ()
    """Sets of weights to choose from; empty if there is no choice."""
    entries: "Mapping[str, LazyTensor]"
    """The tensors by name, in the file's order."""
    metadata: Mapping[str, str]
    """Text stored beside the tensors."""
    files: tuple[Path, ...]
    """Every file of `entries`, index files included."""
    index: "ShardIndex | None" = None
    """Index of the shards; None for other formats."""

    @property
    def form(self) -> str:
        """The format; for a single shard of several also its number, from its name."""
        return f"{self.format}, {self._shard}" if self._shard else self.format.value

    @property
    def caveat(self) -> str | None:
        """A warning that this is a single shard of several; None for a whole checkpoint."""
        return f"{self.path} is {self._shard}: a part of a checkpoint" if self._shard else None

    @property
    def _shard(self) -> str | None:
        shard = shard_of(self.path.name) if self.files == (self.path,) else None
        return shard and f"shard {shard[1]} of {shard[2]}"
