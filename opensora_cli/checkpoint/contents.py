"""Record of an opened checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.weight_choices import Format, Selection

if TYPE_CHECKING:  # it needs torch, whose import would delay the refusal of a wrong request
    from opensora_cli.checkpoint.lazy import LazyTensor
    from opensora_cli.checkpoint.shards import ShardIndex

_SHARD_NAME = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(\..+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardName:
    """Parsed name of one shard of several; `str` gives `shard 1 of 4`."""

    stem: str
    number: int
    """Number of the shard, counted from 1."""
    count: int
    suffix: str

    @classmethod
    def of(cls, name: str) -> "ShardName | None":
        """Parse a name such as `model-00001-of-00004.safetensors`; return None for another kind of name."""
        match = _SHARD_NAME.fullmatch(name)
        if match is None or int(match[3]) < 2:
            return None
        return cls(match[1], int(match[2]), int(match[3]), match[4])

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count}"

    @property
    def index_name(self) -> str:
        """The name of its index."""
        return f"{self.stem}{self.suffix}.index.json"


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
        """The format; for a single shard also its number, from its name."""
        shard = self._shard
        return f"{self.format}, {shard}" if shard else self.format.value

    @property
    def caveat(self) -> str | None:
        """A warning that this is a single shard of several; None for a whole checkpoint."""
        shard = self._shard
        return f"{self.path} is {shard}: a part of a checkpoint" if shard else None

    @property
    def _shard(self) -> ShardName | None:
        return ShardName.of(self.path.name) if self.files == (self.path,) else None
