"""`osora ckpt verify`: check that a checkpoint is complete and intact."""

from collections.abc import Iterator, Set
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from opensora_cli.checkpoint.formats.colossal import OPTIMIZER_FOLDER
from opensora_cli.checkpoint.formats.torch import read_object
from opensora_cli.checkpoint.fp8 import without_scales
from opensora_cli.checkpoint.opening import Checkpoint, open_checkpoint
from opensora_cli.checkpoint.readable import refuse_outside, sha256_of
from opensora_cli.checkpoint.shared_folder import recorded_hashes
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import format_bytes, plain
from opensora_cli.core.limits import freed_at_once
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.diff import as_real_numbers, steps
from opensora_cli.engine.ckpt.download import downloaded_sha256
from opensora_cli.engine.ckpt.inspect import check, read_released
from opensora_cli.settings.ckpt import VerifySettings

_TORCH_SUFFIXES = (".pt", ".bin")


class Verification(Document):
    """Result of verifying a checkpoint: checked files and problems."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.verify/1"

    path: Path
    sound: bool
    """Whether no problem was found."""
    problems: tuple[str, ...]
    format: Format | None
    """Format of the checkpoint; None means that it cannot be opened."""
    tensors: int | None
    hashed: tuple[Path, ...]
    """Files whose recorded hash was checked."""
    data_read: bool
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
        lines = []
        if self.summary:
            lines.append(f"sound    {self.summary}")
            lines.append("sound    all numbers are finite" if self.data_read else "skipped  data was not read")
        if self.data_read:
            known = f"{len(self.hashed)} files have their hash" if self.hashed else "no hash is known"
            lines.append(f"sound    {known}" if self.hashed else f"skipped  {known}")
        return lines + ([f"sound    names and shapes of {self.preset}"] if self.preset else [])


def verify(settings: VerifySettings, *, reporter: Reporter | None = None) -> Verification:
    """Check a checkpoint, and collect all problems.

    Opening the checkpoint checks headers, lengths, and indexes against shards. The data is then compared with all known
    hashes: from the index, a download and the request. For a training checkpoint all weights are read and its other
    states are opened, unless some weights are selected. A single shard of several is no whole checkpoint, but with a
    given hash it is checked as a file. A broken part is reported as a problem, and raises no error.

    Raises:
        RequestError: the preset is unknown, the selected weights are missing, or a hash is given for a folder.
    """
    released = None if settings.preset is None else read_released(settings.preset)
    reporter, path = reporter or SilentReporter(), Path(settings.path)
    if settings.sha256 is not None and path.is_dir():
        raise RequestError(f"sha256 is the hash of one file, and {path} is a folder", hint="name a file in it")
    parts, problems = _open_parts(path, settings.select)
    checkpoint = parts[0] if parts else None
    summary = None
    known: list[tuple[Path, str | None]] = [(path, settings.sha256 and settings.sha256.lower())]
    if checkpoint is not None:
        size = format_bytes(sum(entry.nbytes for entry in checkpoint.entries.values()))
        summary = f"{checkpoint.form}: {len(checkpoint.entries)} tensors, {size}"
        if checkpoint.caveat and settings.sha256 is None:
            problems.append(checkpoint.caveat)
        if settings.select is None and checkpoint.format is Format.COLOSSALAI:
            # `path` may be the folder of the run around it.
            problems += _broken_states(checkpoint.path, known={file for part in parts for file in part.files})
            try:
                known += recorded_hashes(checkpoint.path).items()
            except CheckpointError as error:
                problems.append(error.message)
    # A file has several hashes if its records contradict each other.
    expected: dict[Path, set[str]] = {}
    if settings.data and path.exists():
        files = [file for part in parts for file in part.files] or [path]
        known += [(file, downloaded_sha256(file)) for file in files if file.is_file()]
        known += [hashed for part in parts for hashed in part.sha256.items()]
        for file, digest in known:
            if digest is not None:
                expected.setdefault(file, set()).add(digest)
        problems += _wrong_hashes(expected, reporter)
    if checkpoint is not None and released is not None:
        shapes = {name: entry.shape for name, entry in without_scales(checkpoint.entries).items()}
        problems += [f"{path} is not {settings.preset}: {problem}" for problem in check(shapes, released)]
    for part in parts if settings.data else ():
        problems += _broken_data(part, reporter)
    return Verification(
        path=path,
        sound=not problems,
        problems=tuple(problems),
        format=checkpoint.format if checkpoint else None,
        tensors=len(checkpoint.entries) if checkpoint else None,
        hashed=tuple(expected),
        data_read=settings.data and checkpoint is not None,
        preset=settings.preset,
        summary=summary,
    )


def _open_parts(path: Path, select: Selection | None) -> tuple[list[Checkpoint], list[str]]:
    """Open the selected weights, or all, and return them with the problems of the others."""
    parts: list[Checkpoint] = []
    problems: list[str] = []
    left: list[Selection | None] = [select]
    while left:
        try:
            part = open_checkpoint(path, select=left.pop(0))
        except CheckpointError as error:
            problems += error.message.splitlines()
            continue
        if not parts and select is None:
            left += [each for each in part.selections if each != part.selection]
        parts.append(part)
    return parts, problems


def _broken_states(folder: Path, *, known: Set[Path]) -> Iterator[str]:
    """Yield the problems of optimizer, schedule and sampler in a ColossalAI folder, except files in `known`."""
    places = (path for place in (folder, folder / OPTIMIZER_FOLDER) if place.is_dir() for path in place.iterdir())
    for path in sorted(path for path in places if path.suffix in _TORCH_SUFFIXES and path not in known):
        try:
            read_object(refuse_outside(path, folder))
        except CheckpointError as error:
            yield error.message


def _wrong_hashes(expected: dict[Path, set[str]], reporter: Reporter) -> Iterator[str]:
    if not expected:
        return
    total = sum(path.stat().st_size for path in expected if path.is_file())
    with reporter.stage("hash", total=total, unit=BYTES) as progress:
        for path, digests in expected.items():
            try:
                found = sha256_of(path, advance=progress.advance)
            except CheckpointError as error:
                yield error.message
                continue
            yield from (f"{path} has the hash {found}, not {digest}" for digest in sorted(digests - {found}))


def _broken_data(checkpoint: Checkpoint, reporter: Reporter) -> Iterator[str]:
    """Read every tensor, and yield the problems."""
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    with freed_at_once(), reporter.stage("read", total=total, unit=BYTES) as progress:
        for name, entry in checkpoint.entries.items():
            try:
                broken = sum(int((~as_real_numbers(piece).isfinite()).sum()) for piece in steps(entry))
            except CheckpointError as error:
                yield error.message
                continue
            progress.advance(entry.nbytes)
            if broken:
                of = f" of the {checkpoint.selection} weights" if checkpoint.selection else ""
                yield f"{plain(name)}{of} has {broken:,} numbers that are not finite"
