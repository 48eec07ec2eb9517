"""Where written weights come from: what is noted about it in their metadata."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import opensora_cli
from opensora_cli.checkpoint.contents import Checkpoint
from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.core.progress import BYTES, Reporter

SOURCE = "osora.source"
SOURCE_SHA256 = "osora.source_sha256"
OPTIONS = "osora.options"
VERSION = "osora.version"


def provenance(source: Checkpoint, *, options: Mapping[str, object], sha256: str | None) -> dict[str, str]:
    """Return what is noted of weights that were made from `source`.

    Args:
        source: what was read.
        options: what was done to it.
        sha256: of its files, as `hash_files` gives it; None: not noted.
    """
    noted = {
        SOURCE: os.fspath(source.path),
        OPTIONS: json.dumps(dict(options), ensure_ascii=False, sort_keys=True),
        VERSION: opensora_cli.__version__,
    }
    return noted if sha256 is None else {**noted, SOURCE_SHA256: sha256}


def hash_files(source: Checkpoint, *, reporter: Reporter) -> str:
    """Return the SHA-256 of a checkpoint's file.

    Of several files it is the SHA-256 of what `sha256sum` prints of them in their folder, in order of name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = sorted(_by_name(source.files, source.path).items())
    hashes = hash_each([path for _, path in files], stage="hash", reporter=reporter)
    if len(hashes) == 1:
        return hashes[0]
    lines = (f"{digest}  {name}\n" for (name, _), digest in zip(files, hashes, strict=True))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def hash_each(files: Sequence[Path], *, stage: str, reporter: Reporter) -> list[str]:
    """Return the SHA-256 of each of some files.

    Args:
        files: are read one after the other.
        stage: what the stage is called.
        reporter: shown progress in bytes.

    Raises:
        CheckpointError: one cannot be read.
    """
    with reporter.stage(stage, total=sum(path.stat().st_size for path in files), unit=BYTES) as progress:
        return [sha256_of(path, advance=progress.advance) for path in files]


def _by_name(files: Sequence[Path], path: Path) -> dict[str, Path]:
    folder = path if path.is_dir() else path.parent
    return {Path(os.path.relpath(file, folder)).as_posix(): file for file in files}
