"""`osora ckpt verify`: check that a checkpoint is complete and intact."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from opensora_cli.checkpoint.files import sha256_of
from opensora_cli.checkpoint.opening import Checkpoint, open_checkpoint
from opensora_cli.checkpoint.shared_folder import recorded_hashes
from opensora_cli.checkpoint.transforms import FP8_DTYPES, without_scales
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import format_bytes, plain
from opensora_cli.core.limits import freed_at_once
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.download import downloaded_sha256
from opensora_cli.engine.ckpt.inspect import check, read_released
from opensora_cli.settings.tools import VerifySettings

_STEP_NUMEL = 2**20
"""Elements per step. They fit in the processor's cache, even in fp64."""


class Verification(Document):
    """Result of verifying a checkpoint: checked files and problems."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.verify/2"

    path: Path
    sound: bool
    """Whether no problem was found."""
    problems: tuple[str, ...]
    hashed: tuple[Path, ...]
    """Files whose recorded hash was checked."""
    preset: str | None
    summary: str | None = Field(exclude=True)
    """One line on the checkpoint, for people."""

    def raise_for_problems(self) -> None:
        """Raise CheckpointError if there are problems."""
        if self.problems:
            count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "1 problem"
            raise CheckpointError(f"{self.path} has {count}")

    def lines(self) -> list[str]:
        """Return the problems, or a line on the intact checkpoint."""
        if self.problems:
            return [f"problem  {problem}" for problem in self.problems]
        hashes = f"sound    {len(self.hashed)} files have their hash" if self.hashed else "skipped  no hash is known"
        lines = [f"sound    {self.summary}", "sound    all numbers are finite", hashes]
        return lines + ([f"sound    names and shapes of {self.preset}"] if self.preset else [])


def verify(settings: VerifySettings, *, reporter: Reporter | None = None) -> Verification:
    """Check a checkpoint, and collect all problems.

    Opening the checkpoint checks headers, lengths, and indexes against shards. The data is then read, and compared with
    the hashes that a download or a training recorded. Of a training, all weights are checked. A broken part is reported
    as a problem, and raises no error.

    Raises:
        RequestError: the preset is unknown, or the folder holds several checkpoints.
    """
    released = None if settings.preset is None else read_released(settings.preset)
    reporter, path = reporter or SilentReporter(), Path(settings.path)
    parts, problems = _open_parts(path)
    summary = None
    expected: dict[Path, str] = {}
    if parts:
        first = parts[0]
        size = format_bytes(sum(entry.nbytes for entry in first.entries.values()))
        summary = f"{first.format}: {len(first.entries)} tensors, {size}"
        if released is not None:
            shapes = {name: entry.shape for name, entry in without_scales(first.entries).items()}
            problems += [f"{path} is not {settings.preset}: {problem}" for problem in check(shapes, released)]
        if first.format is Format.COLOSSALAI:
            try:
                # `path` may be the folder of the run around it.
                expected |= recorded_hashes(first.path)
            except CheckpointError as error:
                problems.append(error.message)
    for file in [file for part in parts for file in part.files] or [path]:
        if file.is_file() and (digest := downloaded_sha256(file)):
            expected[file] = digest
    problems += _wrong_hashes(expected, reporter)
    for part in parts:
        problems += _broken_data(part, reporter)
    return Verification(
        path=path,
        sound=not problems,
        problems=tuple(problems),
        hashed=tuple(expected),
        preset=settings.preset,
        summary=summary,
    )


def _open_parts(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """Open all sets of weights, and return them with the problems of the others."""
    parts: list[Checkpoint] = []
    problems: list[str] = []
    left: list[Selection | None] = [None]
    while left:
        try:
            part = open_checkpoint(path, select=left.pop(0))
        except CheckpointError as error:
            problems += error.message.splitlines()
            continue
        if not parts:
            left += [each for each in part.selections if each != part.selection]
        parts.append(part)
    return parts, problems


def _wrong_hashes(expected: dict[Path, str], reporter: Reporter) -> Iterator[str]:
    if not expected:
        return
    total = sum(path.stat().st_size for path in expected if path.is_file())
    with reporter.stage("hash", total=total, unit=BYTES) as progress:
        for path, digest in expected.items():
            try:
                found = sha256_of(path, advance=progress.advance)
            except CheckpointError as error:
                yield error.message
                continue
            if found != digest:
                yield f"{path} has the hash {found}, not {digest}"


def _broken_data(checkpoint: Checkpoint, reporter: Reporter) -> Iterator[str]:
    """Read every tensor, and yield the problems."""
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    with freed_at_once(), reporter.stage("read", total=total, unit=BYTES) as progress:
        for name, entry in checkpoint.entries.items():
            try:
                pieces = torch.split(entry.read().reshape(-1), _STEP_NUMEL) if entry.numel else ()
                broken = sum(_count_not_finite(piece) for piece in pieces)
            except CheckpointError as error:
                yield error.message
                continue
            progress.advance(entry.nbytes)
            if broken:
                of = f" of the {checkpoint.selection} weights" if checkpoint.selection else ""
                yield f"{plain(name)}{of} has {broken:,} numbers that are not finite"


def _count_not_finite(values: Tensor) -> int:
    # torch has no `isfinite` for most floats of 8 bits.
    return int((~(values.float() if values.dtype in FP8_DTYPES else values).isfinite()).sum())
