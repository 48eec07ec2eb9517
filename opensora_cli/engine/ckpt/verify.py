"""`osora ckpt verify`: whether a checkpoint is whole and sound."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.checkpoint.formats import Checkpoint, Selection
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shards import read_index, sha256_of
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.core.sizes import format_bytes
from opensora_cli.engine.ckpt.hub_records import downloaded_sha256
from opensora_cli.engine.ckpt.identify import check
from opensora_cli.engine.ckpt.inspect import printable
from opensora_cli.engine.ckpt.presets import require_preset
from opensora_cli.engine.ckpt.statistics import TensorStatistics
from opensora_cli.settings.ckpt import VerifySettings

SCHEMA = "osora.ckpt.verify/1"

_INDEX_ENDING = ".index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked, and what was found."""

    path: Path
    problems: tuple[str, ...]
    checkpoint: Checkpoint | None
    """None: it cannot be opened."""
    hashed: tuple[Path, ...]
    """Files whose hash was known, and checked."""
    data_read: bool
    preset: str | None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def require_sound(self) -> None:
        """Raise CheckpointError if something is wrong."""
        if self.problems:
            count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "1 problem"
            raise CheckpointError(f"{self.path} has {count}")

    def to_json(self) -> dict[str, object]:
        """Return it as a document of the schema `osora.ckpt.verify/1`."""
        checkpoint = self.checkpoint
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "sound": self.is_sound,
            "problems": list(self.problems),
            "format": checkpoint.format.value if checkpoint else None,
            "tensors": len(checkpoint.entries) if checkpoint else None,
            "hashed": [str(path) for path in self.hashed],
            "data_read": self.data_read,
            "preset": self.preset,
        }

    def lines(self) -> list[str]:
        """Return the problems, or what was found to be sound."""
        if self.problems:
            return [f"problem  {problem}" for problem in self.problems]
        lines = []
        if self.checkpoint:
            entries = self.checkpoint.entries
            size = format_bytes(sum(entry.nbytes for entry in entries.values()))
            lines.append(f"sound    {self.checkpoint.format}: {len(entries)} tensors, {size}")
            lines.append("sound    all numbers are finite" if self.data_read else "skipped  data was not read")
        if self.data_read:
            known = f"{len(self.hashed)} files have their hash" if self.hashed else "no hash is known"
            lines.append(f"sound    {known}" if self.hashed else f"skipped  {known}")
        return lines + ([f"sound    names and shapes of {self.preset}"] if self.preset else [])


def verify(settings: VerifySettings, *, reporter: Reporter | None = None) -> Verification:
    """Check a checkpoint, and collect everything that is wrong with it.

    Opening it checks headers, lengths, and indexes against shards. Its data is then compared with the hashes that are
    known: of the index, of a download, and the one that is given. Of a training, all weights are read unless some are
    selected. Everything broken is a problem, not an error.

    Raises:
        RequestError: there is no such preset, no such weights to select, or a hash is given for a folder.
    """
    if settings.preset is not None:
        require_preset(settings.preset)
    reporter = reporter or SilentReporter()
    path = Path(settings.path)
    if settings.sha256 is not None and path.is_dir():
        raise RequestError(f"sha256 is the hash of one file, and {path} is a folder", hint="name a file in it")
    problems: list[str] = []
    checkpoint = None
    try:
        selection = None if settings.select is None else Selection(settings.select)
        checkpoint = open_checkpoint(path, select=selection)
    except CheckpointError as error:
        problems += error.message.splitlines()
    expected = {}
    if settings.data and path.exists():
        expected = _expected_hashes(path, checkpoint, settings.sha256)
        problems += _wrong_hashes(expected, reporter)
    if checkpoint is not None and settings.preset is not None:
        shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
        problems += [f"{path} is not {settings.preset}: {problem}" for problem in check(shapes, settings.preset)]
    if checkpoint is not None and settings.data:
        others = [each for each in checkpoint.selections if settings.select is None and each != checkpoint.selection]
        for part in (checkpoint, *(open_checkpoint(path, select=each) for each in others)):
            problems += _broken_data(part, reporter)
    return Verification(
        path=path,
        problems=tuple(problems),
        checkpoint=checkpoint,
        hashed=tuple(expected),
        data_read=settings.data,
        preset=settings.preset,
    )


def _expected_hashes(path: Path, checkpoint: Checkpoint | None, given: str | None) -> dict[Path, set[str]]:
    """Return the hashes that files must have; more than one where what is known contradicts itself."""
    files = checkpoint.files if checkpoint else (path,)
    expected: dict[Path, set[str]] = {}
    for file in filter(Path.is_file, files):
        downloaded = downloaded_sha256(file)
        if downloaded is not None:
            expected.setdefault(file, set()).add(downloaded)
        if checkpoint is not None and file.name.endswith(_INDEX_ENDING):
            for name, digest in read_index(file).sha256.items():
                expected.setdefault(file.parent / name, set()).add(digest.lower())
    if given is not None:
        expected.setdefault(path, set()).add(given.lower())
    return expected


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
    """Read every tensor."""
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    with reporter.stage("read", total=total, unit=BYTES) as progress:
        for name, entry in checkpoint.entries.items():
            try:
                statistics = TensorStatistics.of(entry, advance=progress.advance)
            except CheckpointError as error:
                yield error.message
                continue
            if not statistics.is_finite:
                of = f" of the {checkpoint.selection} weights" if checkpoint.selection else ""
                yield (
                    f"{printable(name)}{of} is not finite: {statistics.nan:,} NaN, {statistics.infinite:,} infinite "
                    f"among {statistics.count:,}"
                )
