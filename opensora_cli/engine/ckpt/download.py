"""`osora ckpt download`: fetch the files of a released model into the folder that `osora generate` reads."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from opensora_cli.checkpoint.files import is_sha256
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import require_space, write_bytes_atomic
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.locks import open_regular, sole_run
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.hub import HubFile, HubRepo, fetch, is_content, part_of, read_repo
from opensora_cli.models.registry import ARCHITECTURES, WeightNames
from opensora_cli.settings.tools import DownloadSettings

_SAFETENSORS = ".safetensors"
# Formats of the same weights that are slower or unsafe to read, or belong to other frameworks.
_OTHER_WEIGHTS = (".bin", ".h5", ".msgpack", ".ot", ".onnx", ".pt", ".pth", ".ckpt")
_LONGEST_NAME = 200
"""Limit of a file name in bytes. File systems allow 255, and partial files have longer endings."""
_TEXT_ENDINGS = (".json", ".txt", ".model")
_RECORDS = Path(".cache", "huggingface", "download")
_SLACK_S = 1.0
"""Seconds by which times of file systems are coarser than those of clocks."""
_MAX_RECORD_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class _Source:
    """Files to take from one repository."""

    repo: str
    files: Mapping[str, str]
    """Names in the repository to local names."""
    folders: tuple[str, ...] = ()
    """Folders of transformers models, which keep their names."""

    def wants(self, name: str) -> bool:
        """Return whether a file with this name may be needed."""
        path = PurePosixPath(name)
        is_sound = path.name not in ("", "..") and "\\" not in name and name.isprintable()
        in_folder = str(path.parent) in self.folders and is_sound and len(path.name.encode()) <= _LONGEST_NAME
        return name in self.files or (in_folder and path.suffix in (_SAFETENSORS, *_OTHER_WEIGHTS, *_TEXT_ENDINGS))

    def needed(self, repo: HubRepo) -> list[HubFile]:
        """Return the files to fetch, with their local names. Raises CheckpointError if the repository lacks some."""
        lacking = [name for name in self.files if name not in repo.files]
        needed = [
            repo.files[there].model_copy(update={"name": here})
            for there, here in self.files.items()
            if there in repo.files
        ]
        for folder in self.folders:
            inside = {name: file for name, file in repo.files.items() if name.startswith(f"{folder}/")}
            if f"{folder}/config.json" not in inside:
                lacking.append(f"{folder}/config.json")
            # Weights that are also in safetensors files are superfluous.
            superfluous = _OTHER_WEIGHTS if any(name.endswith(_SAFETENSORS) for name in inside) else ()
            needed += [
                file for name, file in inside.items() if not name.removesuffix(".index.json").endswith(superfluous)
            ]
        if lacking:
            raise CheckpointError(f"{repo.name} has no {', '.join(lacking)}", hint="check HF_ENDPOINT if it is set")
        return needed


def _sources(preset: str) -> list[_Source]:
    """Return the sources of a model. Text encoders are in the repository of the first released model."""
    entry, text = ARCHITECTURES[preset], WeightNames().hub_repo
    files, folders = entry.files, (entry.files.t5, entry.files.clip)
    names = {entry.hub_names.get(name, name): name for name in (files.transformer, files.vae)}
    if files.hub_repo == text:
        return [_Source(text, names, folders)]
    return [_Source(files.hub_repo, names), _Source(text, {}, folders)]


class DownloadPlan(Document):
    """Plan of a download and, with every file present, its result."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.download/3"

    preset: str
    folder: Path
    repos: tuple[HubRepo, ...]
    bytes: int
    bytes_to_fetch: int
    files: tuple[HubFile, ...]

    def lines(self) -> list[str]:
        """Return the plan for people."""
        left = f"{format_bytes(self.bytes_to_fetch)} to fetch" if self.bytes_to_fetch else "all there"
        return [
            *(repo.line() for repo in self.repos),
            *(
                f"{format_bytes(file.bytes):>12}  {file.name}"
                + (f" ({format_bytes(file.bytes_here)} here)" if file.bytes_here else "")
                for file in self.files
            ),
            f"{format_bytes(self.bytes):>12}  in {self.folder}, {left}",
        ]


def plan_download(settings: DownloadSettings) -> DownloadPlan:
    """List the files to fetch from the Hub, and the files that exist already.

    Raises CheckpointError if the Hub cannot be reached, lacks needed files, or refuses access.
    """
    folder, sources = Path(settings.to), _sources(settings.preset)
    repos = tuple(read_repo(source.repo, wanted=source.wants) for source in sources)
    needed = [file for source, repo in zip(sources, repos, strict=True) for file in source.needed(repo)]
    files = tuple(file.model_copy(update={"bytes_here": _bytes_here(file, folder)}) for file in needed)
    return DownloadPlan(
        preset=settings.preset,
        folder=folder,
        repos=repos,
        bytes=sum(file.bytes for file in files),
        bytes_to_fetch=sum(file.bytes - file.bytes_here for file in files),
        files=files,
    )


def _bytes_here(file: HubFile, folder: Path) -> int:
    """Compare a file with the local one, or with its part, without reading it."""
    target, part = folder / file.name, part_of(file, folder / file.name)
    if target.is_file():
        is_same = target.stat().st_size == file.bytes and (recorded_digest(folder, file.name) or file.hash) == file.hash
        return file.bytes if is_same else 0
    return part.stat().st_size if part.is_file() else 0


def download(settings: DownloadSettings, *, reporter: Reporter | None = None) -> DownloadPlan:
    """Fetch the files of `settings.preset`, and check all of them against the hashes of the Hub.

    Correct files are not fetched again; partial files are resumed.

    Raises:
        CheckpointError: the Hub cannot be reached, refuses, or sends content with another hash.
        OutputError: the folder cannot be written, has too little room, or holds other files with these names, or
            another process downloads into it.
        KeyboardInterrupt: its argument says how to continue.
    """
    reporter = reporter or SilentReporter()
    plan = plan_download(settings)
    for line in plan.lines():
        reporter.note(line)
    problem, hint = f"another run downloads into {plan.folder}", "wait until it ends, or give another folder with --to"
    with sole_run(plan.folder / ".osora-download.lock", problem=problem, hint=hint):
        left = _left(plan, reporter)
        others = [str(plan.folder / file.name) for file in left if (plan.folder / file.name).is_file()]
        if others and not settings.overwrite:
            raise OutputError(
                f"other files than on the Hub are there: {', '.join(others)}",
                hint="give another folder with --to, or replace them with --overwrite",
            )
        require_space(plan.folder, sum(file.bytes - file.bytes_here for file in left))
        try:
            with reporter.stage("download", total=sum(file.bytes for file in left), unit=BYTES) as progress:
                for file in left:
                    fetch(file, plan.folder / file.name, advance=progress.advance)
                    write_record(plan.folder, file.name, commit=file.commit, digest=file.hash)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt("what has arrived is kept: the same command continues from there") from stop
    present = tuple(file.model_copy(update={"bytes_here": file.bytes}) for file in plan.files)
    return plan.model_copy(update={"files": present, "bytes_to_fetch": 0})


def _left(plan: DownloadPlan, reporter: Reporter) -> list[HubFile]:
    """Return the files to fetch: the missing and the different ones. Files without a record are hashed."""
    folder = plan.folder
    same = [file for file in plan.files if (folder / file.name).is_file() and file.bytes_here == file.bytes]
    left = [file for file in plan.files if file not in same]
    unknown = [file for file in same if not recorded_digest(folder, file.name)]
    total = sum(file.bytes for file in unknown)
    with (reporter if total else SilentReporter()).stage("check", total=total, unit=BYTES) as progress:
        for file in unknown:
            if is_content(file, folder / file.name, advance=progress.advance):
                write_record(folder, file.name, commit=file.commit, digest=file.hash)
            else:
                left.append(file.model_copy(update={"bytes_here": 0}))
    return left


def write_record(folder: Path, name: str, *, commit: str, digest: str) -> None:
    """Record the commit and hash of `name` below `folder`, as huggingface_hub does: three lines, with the time last.
    Raises OutputError if the record cannot be written.
    """
    write_bytes_atomic(folder / _RECORDS / f"{name}.metadata", f"{commit}\n{digest}\n{time.time()}\n".encode())


def recorded_digest(folder: Path, name: str) -> str | None:
    """Return the recorded hash of `name` below `folder`.

    The result is None without a record, and empty if the file was modified after it was recorded. Raises OSError if
    there is a record and no file.
    """
    try:
        with open(folder / _RECORDS / f"{name}.metadata", "rb", opener=open_regular) as file:
            _, digest, written = file.read(_MAX_RECORD_BYTES).decode().split()
        recorded_at = float(written)
    except (OSError, ValueError):
        return None
    return digest if (folder / name).stat().st_mtime <= recorded_at + _SLACK_S else ""


def downloaded_sha256(path: Path) -> str | None:
    """Return the SHA-256 of an existing file on the Hub, if its download was recorded.

    A file in the Hugging Face cache is a link to a blob, whose name is the hash. For a file that was modified after
    the download, the result is None.
    """
    blob = path.resolve()
    if blob.parent.name == "blobs" and is_sha256(blob.name):
        return blob.name
    for folder in path.absolute().parents:
        digest = recorded_digest(folder, path.absolute().relative_to(folder).as_posix())
        if digest is not None:
            return digest if is_sha256(digest) else None
    return None
