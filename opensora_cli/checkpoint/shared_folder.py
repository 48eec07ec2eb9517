"""The writer of training checkpoints: one or several processes fill a folder, which is whole or absent.

Each process has some of the tensors, whole, and the shapes of all, so it computes where in which file its own belong.
Processes signal progress by files in the shared folder whose names begin with a dot. So saving runs in the background
and needs no collectives.

The folder has a temporary name until it is complete. Its last file, `running_states.json`, makes it a checkpoint and
holds the SHA-256 of all others.

Tensors are safetensors and everything else is JSON or bytes, not torch's distributed checkpoint: the metadata of that
format is a pickle, its shards depend on the number of ranks, and other programs read neither.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER, RUNNING_STATES_FILE, read_running_document
from opensora_cli.checkpoint.formats.safetensors import place_tensors
from opensora_cli.checkpoint.shards import SAFETENSORS_FORM, make_index, name_shards, refuse_outside, sha256_of
from opensora_cli.checkpoint.stream import Entry, HeldEntry, copy_entries, write_all
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import json_bytes, replace_folder, write_bytes_atomic
from opensora_cli.core.reading import stays_inside
from opensora_cli.core.regular_files import open_regular
from opensora_cli.core.strict_json import shown

SHA256 = "sha256"
"""Key of the hashes in `running_states.json`."""

_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ_SUFFIXES = (".safetensors", ".pt", ".bin", ".json")

_PREFIX = ".saving-"
_POLL_S = 0.02
_METADATA = {"format": "pt"}
_WRITTEN, _HASHED, _FAILED = ".written", ".hashed", ".failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a checkpoint that one process writes."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Relative name of each safetensors file -> all its tensors by name; those of other processes are on the meta
    device. `model` becomes a folder of shards with an index."""
    files: Mapping[str, bytes]
    """Relative name -> content of other files, which this process alone writes."""
    running_states: Mapping[str, object]
    """Content of the last file besides the hashes. The first process writes it."""
    process: int = 0
    processes: int = 1


def temporary_folder(target: Path, *, token: str) -> Path:
    """Return the temporary name of a checkpoint, the same for all processes that have the same token."""
    return target.parent / f"{_PREFIX}{token}-{target.name}"


def remove_unfinished(run: Path) -> None:
    """Remove the folders that a killed process was saving or removing in the folder of a run."""
    for folder in run.glob(f"{_PREFIX}*") if run.is_dir() else ():
        shutil.rmtree(folder, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; it loses its name before its first file. Raises OutputError if that is not possible."""
    going = temporary_folder(folder, token=secrets.token_hex(4))
    try:
        folder.rename(going)
    except OSError as error:
        raise OutputError(f"cannot remove {folder}: {error.strerror or error}") from error
    shutil.rmtree(going, ignore_errors=True)


def write_share(share: Share, temporary: Path, target: Path) -> None:
    """Write this process's share. The first process gives the folder its name when all are done.

    Raises OutputError if this process or another could not write its share. `target` is unchanged then, and
    `remove_unfinished` removes what several processes leave.
    """
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            model = {name: HeldEntry(tensor) for name, tensor in share.tensors.get(MODEL_FOLDER, {}).items()}
            shards = name_shards(model) if MODEL_FOLDER in share.tensors else {}
            _write(share, shards, temporary)
            _signal(temporary, _WRITTEN, share, "")
            _wait_for(temporary, _WRITTEN, share)
            _signal(temporary, _HASHED, share, json.dumps(_hashes(share, temporary)))
            if share.process == 0:
                _finish(share, shards, temporary, target)
        except BaseException as error:
            if share.processes == 1:
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                _signal_failure(temporary, share, str(error))
            raise
    except (OSError, CheckpointError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OutputError(f"cannot write {target}: {reason}", hint="make room there, or write elsewhere") from error


def wrong_files(folder: Path, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the problems of a checkpoint's files, compared with their recorded hashes.

    With `share` (k, n), this is process k of n that each read every n-th file.
    """
    if not (folder / RUNNING_STATES_FILE).is_file():
        return [f"{folder} was not written to its end: it lacks {RUNNING_STATES_FILE}"]
    try:
        hashes = recorded_hashes(folder)
    except CheckpointError as error:
        return [error.message]
    if not hashes:
        return [f"{folder / RUNNING_STATES_FILE} is broken: it lacks {SHA256}, the hashes of the files"]
    problems = [f"{path} has no hash in {RUNNING_STATES_FILE}" for path in unhashed_files(folder, hashes)]
    for path in list(hashes)[share[0] :: share[1]]:
        try:
            if sha256_of(path) != hashes[path]:
                problems.append(f"{path} is not what was written")
        except CheckpointError as error:
            problems.append(error.message)
    return problems


def recorded_hashes(folder: Path) -> dict[Path, str]:
    """Return the SHA-256 of a checkpoint's files from `running_states.json`, empty if that holds none.

    Raises CheckpointError if the record is broken, or names no file or no hash.
    """
    path = folder / RUNNING_STATES_FILE
    if not path.is_file():
        return {}
    document = read_running_document(folder)
    if SHA256 not in document:
        return {}
    hashes = document[SHA256]
    if not isinstance(hashes, dict) or not hashes:
        raise CheckpointError(f"{path} is broken: {SHA256} is no mapping of file to hash")
    for name, digest in hashes.items():
        if not stays_inside(name):
            raise CheckpointError(f"{path} is broken: {shown(name)} is no file of its folder")
        if not isinstance(digest, str) or not _HEX_SHA256.fullmatch(digest):
            raise CheckpointError(f"{path} is broken: {shown(str(digest))} is no hash of {shown(name)}")
    return {refuse_outside(folder / name, folder): digest for name, digest in sorted(hashes.items())}


def unhashed_files(folder: Path, hashes: Collection[Path]) -> list[Path]:
    """Return the files of a checkpoint that readers open and that have no recorded hash."""
    files = (path for path in folder.rglob("*") if path.suffix in _READ_SUFFIXES and path.is_file())
    known = {*hashes, folder / RUNNING_STATES_FILE}
    return sorted(path for path in files if path not in known and not path.name.startswith("."))


def _write(share: Share, shards: Mapping[str, Collection[str]], folder: Path) -> None:
    files = {name: tensors for name, tensors in share.tensors.items() if name != MODEL_FOLDER}
    for name, keys in shards.items():
        files[f"{MODEL_FOLDER}/{name}"] = {key: share.tensors[MODEL_FOLDER][key] for key in keys}
    for name, tensors in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        entries: dict[str, Entry] = {key: HeldEntry(tensor) for key, tensor in tensors.items()}
        placement = place_tensors(entries, metadata=_METADATA)
        # Other processes write to the file at the same time, so it is not truncated.
        with open(open_regular(path, os.O_CREAT | os.O_WRONLY), "wb", buffering=0) as file:
            os.truncate(file.fileno(), placement.size)
            if share.process == 0:
                write_all(file, placement.header)
            for key, entry in entries.items():
                if not tensors[key].is_meta:
                    file.seek(placement.positions[key])
                    copy_entries([entry], file)
            os.fsync(file.fileno())
    for name, content in share.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _write_bytes(folder / name, content)


def _hashes(share: Share, folder: Path) -> dict[str, str]:
    """Return the hashes of every n-th file, for process k of n."""
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.relative_to(folder).parts[0].startswith(".")
    )
    return {name: sha256_of(folder / name) for name in names[share.process :: share.processes]}


def _finish(share: Share, shards: Mapping[str, Mapping[str, Entry]], temporary: Path, target: Path) -> None:
    hashed = _wait_for(temporary, _HASHED, share)
    hashes = {name: digest for text in hashed for name, digest in json.loads(text).items()}
    if shards:
        name = f"{MODEL_FOLDER}/{SAFETENSORS_FORM.index_name}"
        sha256 = {shard: hashes[f"{MODEL_FOLDER}/{shard}"] for shard in shards}
        _write_bytes(temporary / name, json_bytes(make_index(shards, metadata=_METADATA, sha256=sha256)))
        hashes[name] = sha256_of(temporary / name)
    for flag in temporary.glob(".*"):
        flag.unlink()
    _write_bytes(
        temporary / RUNNING_STATES_FILE, json_bytes({**share.running_states, SHA256: dict(sorted(hashes.items()))})
    )
    replace_folder(temporary, target)


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb", opener=open_regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _signal(folder: Path, flag: str, share: Share, text: str) -> None:
    write_bytes_atomic(folder / f"{flag}-{share.process}", text.encode())


def _signal_failure(folder: Path, share: Share, reason: str) -> None:
    """Record why this process failed, so that the others stop waiting."""
    try:
        _signal(folder, _FAILED, share, reason)
    except OutputError:
        # A full disk still has room for an empty file.
        with suppress(OSError):
            (folder / f"{_FAILED}-{share.process}").touch()


def _wait_for(folder: Path, flag: str, share: Share) -> list[str]:
    """Wait for this flag of all processes, and return the contents. Raises OutputError if a process failed."""
    while True:
        for process in range(share.processes):
            failed = folder / f"{_FAILED}-{process}"
            if failed.exists():
                reason = failed.read_text(encoding="utf-8") or "cannot write its part, nor why: is the disk full?"
                raise OutputError(f"rank {process}: {reason}")
        flags = [folder / f"{flag}-{process}" for process in range(share.processes)]
        if all(each.exists() for each in flags):
            return [each.read_text(encoding="utf-8") for each in flags]
        time.sleep(_POLL_S)
