"""The forms that weights come in, and what reading any of them gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opensora_cli.checkpoint.entries import Entry


class Format(StrEnum):
    """How weights lie on disk."""

    SAFETENSORS = "safetensors"
    SAFETENSORS_SHARDS = "safetensors-shards"
    TORCH = "torch"
    TORCH_SHARDS = "torch-shards"
    COLOSSALAI = "colossalai"
    DCP = "dcp"
    TRAINING = "training"


class Selection(StrEnum):
    """Which weights of a training: the updated ones, their average, or the updated ones in full precision."""

    MODEL = "model"
    EMA = "ema"
    MASTER = "master"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint; none of its tensors has been read.

    Args:
        format: how it lies on disk.
        path: what was opened: a file or a folder.
        selection: which of its weights `entries` are; None where there is no choice.
        selections: which weights there are to choose from; empty where there is no choice.
        entries: the tensors by name, in the file's order.
        metadata: what is told beside the tensors.
        files: every file of `entries`, index files included.
    """

    format: Format
    path: Path
    selection: Selection | None = None
    selections: tuple[Selection, ...] = ()
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    files: tuple[Path, ...]
