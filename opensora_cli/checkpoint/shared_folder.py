"""Writer of training checkpoints: one or several processes fill a folder, which is whole or absent.

Each process has some tensors, whole, and the shapes of all. From these it computes the file and offset of each of its
tensors. Between the parts of the work the processes exchange results in a process group of their own, so saving can
run in the background.

The folder has a temporary name until it is complete. Its last file, `running_states.json`, makes it a checkpoint and
holds the SHA-256 of all others.

Tensors are safetensors and everything else is JSON or bytes, not torch's distributed checkpoint: the metadata of that
format is a pickle, its shards depend on the number of ranks, and other programs read neither.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from opensora_cli.checkpoint.files import is_sha256, refuse_outside, sha256_of
from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER, RUNNING_STATES_FILE, read_running_document
from opensora_cli.checkpoint.formats.safetensors import place_tensors
from opensora_cli.checkpoint.lazy import LazyTensor, write_all
from opensora_cli.checkpoint.writing import INDEX_FILE, make_index, plan_shards
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import json_bytes, replace_folder
from opensora_cli.core.formatting import shown
from opensora_cli.core.locks import open_regular
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import move
from opensora_cli.core.reading import stays_inside

SHA256 = "sha256"
"""Key of the hashes in `running_states.json`."""

_PREFIX = ".saving-"
_METADATA = {"format": "pt"}
_SIGN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a checkpoint that one process writes."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Relative name of each safetensors file -> all its tensors by name. Tensors of other processes are on the meta
    device. `model` becomes a folder of shards with an index."""
    files: Mapping[str, bytes]
    """Relative name -> content of the other files that this process alone writes."""
    running_states: Mapping[str, object]
    """Content of the last file besides the hashes. The first process writes it."""
    group: dist.ProcessGroup | None = None
    """Group of the processes; None means one process."""

    @property
    def is_first(self) -> bool:
        """Return whether this is the first process."""
        return self.group is None or dist.get_rank(self.group) == 0


class BackgroundJob:
    """One job at a time in a thread; Python waits for it before it exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self.error: BaseException | None = None
        """Error of the last job, until `wait` returns it."""

    def start(self, do: Callable[[], None]) -> None:
        """Start a job after `wait` for the last one. If no thread can be started, the job runs in this thread."""

        def run() -> None:
            try:
                do()
            except BaseException as error:
                self.error = error

        thread = Thread(target=run, name="osora-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # for example with `ulimit -u`
            run()
        else:
            self._thread = thread

    def wait(self) -> BaseException | None:
        """Wait for the end of the job, and return its error once; after an interrupted wait, call this again."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(_SIGN_S)
                move()  # The launcher sees the work of the main thread only.
            self._thread = None
        error, self.error = self.error, None
        return error


def temporary_folder(target: Path, *, token: str) -> Path:
    """Return the temporary name of a checkpoint, the same for all processes with the same token."""
    return target.parent / f"{_PREFIX}{token}-{target.name}"


def remove_unfinished(run: Path) -> None:
    """Remove unfinished folders from the folder of a run: a killed process was saving or removing them."""
    for folder in run.glob(f"{_PREFIX}*") if run.is_dir() else ():
        shutil.rmtree(folder, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Rename a checkpoint, and then remove its files. Raises OutputError if that is not possible."""
    going = temporary_folder(folder, token=secrets.token_hex(4))
    try:
        folder.rename(going)
    except OSError as error:
        raise OutputError(f"cannot remove {folder}: {error.strerror or error}") from error
    shutil.rmtree(going, ignore_errors=True)


def write_share(share: Share, temporary: Path, target: Path) -> None:
    """Write this process's share. The first process gives the folder its name when all are done.

    Raises OutputError on all processes if one of them failed; `target` is unchanged then.
    """
    try:
        model = {name: LazyTensor.of(tensor) for name, tensor in share.tensors.get(MODEL_FOLDER, {}).items()}
        shards = plan_shards(model) if MODEL_FOLDER in share.tensors else {}
        on_all(share.group, lambda: _write(share, shards, temporary))
        hashes = on_all(share.group, lambda: _hashes(share, temporary))
        on_all(share.group, lambda: _finish(share, shards, hashes, temporary, target))
    except BaseException as error:
        if share.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | CheckpointError | OutputError):
            raise
        raise OutputError(
            f"cannot write {target}: {_reason(error)}", hint="make room there, or write elsewhere"
        ) from error


def on_all(group: dist.ProcessGroup | None, do: Callable[[], Any]) -> list[Any]:
    """Call `do` on all processes of a group, and return the results, which must be JSON.

    A process whose call fails raises the error, and the other processes raise OutputError.
    """
    result = failure = None
    try:
        result = do()
    except BaseException as error:
        failure = error
    found = [[None, result]]
    if group is not None:
        found = all_gather_json([failure and _reason(failure), result], group)
    if failure is not None:
        raise failure
    for rank, (reason, _) in enumerate(found):
        if reason is not None:
            raise OutputError(f"rank {rank}: {reason}")
    return [result for _, result in found]


def wrong_files(folder: Path, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the problems of a checkpoint's files, compared with their recorded hashes.

    With `share` (k, n), this is process k of n processes, each of which reads every n-th file.
    """
    if not (folder / RUNNING_STATES_FILE).is_file():
        return [f"{folder} was not written to its end: it lacks {RUNNING_STATES_FILE}"]
    try:
        hashes = recorded_hashes(folder)
    except CheckpointError as error:
        return [error.message]
    if not hashes:
        return [f"{folder / RUNNING_STATES_FILE} is broken: it lacks {SHA256}, the hashes of the files"]
    problems = []
    for path in list(hashes)[share[0] :: share[1]]:
        try:
            if sha256_of(path) != hashes[path]:
                problems.append(f"{path} is not what was written")
        except CheckpointError as error:
            problems.append(error.message)
    return problems


def recorded_hashes(folder: Path) -> dict[Path, str]:
    """Return the SHA-256 of a checkpoint's files from `running_states.json`, empty if the document holds none.

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
        if not is_sha256(digest):
            raise CheckpointError(f"{path} is broken: {shown(str(digest))} is no hash of {shown(name)}")
    return {refuse_outside(folder / name, folder): digest for name, digest in sorted(hashes.items())}


def _write(share: Share, shards: Mapping[str, Collection[str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: tensors for name, tensors in share.tensors.items() if name != MODEL_FOLDER}
    for name, keys in shards.items():
        files[f"{MODEL_FOLDER}/{name}"] = {key: share.tensors[MODEL_FOLDER][key] for key in keys}
    for name, tensors in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        entries: dict[str, LazyTensor] = {key: LazyTensor.of(tensor) for key, tensor in tensors.items()}
        placement = place_tensors(entries, metadata=_METADATA)
        # Other processes write to the file at the same time, so it is not truncated.
        with open(open_regular(path, os.O_CREAT | os.O_WRONLY), "wb", buffering=0) as file:
            os.truncate(file.fileno(), placement.size)
            if share.is_first:
                write_all(file, placement.header)
            for key, entry in entries.items():
                if not tensors[key].is_meta:
                    file.seek(placement.positions[key])
                    entry.write(file)
            os.fsync(file.fileno())
    for name, content in share.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _write_bytes(folder / name, content)


def _hashes(share: Share, folder: Path) -> dict[str, str]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if share.group is not None:
        names = names[dist.get_rank(share.group) :: dist.get_world_size(share.group)]
    return {name: sha256_of(folder / name) for name in names}


def _finish(
    share: Share,
    shards: Mapping[str, Mapping[str, LazyTensor]],
    hashed: Sequence[Mapping[str, str]],
    temporary: Path,
    target: Path,
) -> None:
    if not share.is_first:
        return
    hashes = {name: digest for each in hashed for name, digest in each.items()}
    if shards:
        name = f"{MODEL_FOLDER}/{INDEX_FILE}"
        _write_bytes(temporary / name, json_bytes(make_index(shards, metadata=_METADATA)))
        hashes[name] = sha256_of(temporary / name)
    _write_bytes(
        temporary / RUNNING_STATES_FILE, json_bytes({**share.running_states, SHA256: dict(sorted(hashes.items()))})
    )
    replace_folder(temporary, target)


def _write_bytes(path: Path, content: bytes) -> None:
    with open(path, "wb", opener=open_regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
