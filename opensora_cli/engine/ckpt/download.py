"""`osora ckpt download`: fetch the files of a released model into the folder that `osora generate` reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import require_space
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.locks import sole_run
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.hub import HubFile, HubRepo, fetch, is_content, part_of, read_repo
from opensora_cli.engine.ckpt.hub_records import recorded_digest, write_record
from opensora_cli.models.registry import ARCHITECTURES, WeightNames
from opensora_cli.settings.ckpt import DownloadSettings

_SAFETENSORS = ".safetensors"
# Formats of the same weights that are slower or unsafe to read, or belong to other frameworks.
_OTHER_WEIGHTS = (".bin", ".h5", ".msgpack", ".ot", ".onnx", ".pt", ".pth", ".ckpt")
_LONGEST_NAME = 200
"""Limit of a file name in bytes. File systems allow 255, and partial files have longer endings."""
_TEXT_ENDINGS = (".json", ".txt", ".model")


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


def _sources(preset: str) -> list[_Source]:
    """Return the sources of a model. Text encoders are in the repository of the first released model."""
    entry, text = ARCHITECTURES[preset], WeightNames().hub_repo
    files, folders = entry.files, (entry.files.t5, entry.files.clip)
    names = {entry.hub_names.get(name, name): name for name in (files.transformer, files.vae)}
    if files.hub_repo == text:
        return [_Source(text, names, folders)]
    return [_Source(files.hub_repo, names), _Source(text, {}, folders)]


class State(StrEnum):
    """State of a local file."""

    MISSING = "missing"
    PARTIAL = "partial"
    UNCHECKED = "unchecked"
    """A file with this name and size exists, without a record of its hash."""
    PRESENT = "present"
    OTHER = "other"


class PlannedDownload(Document):
    """File to download."""

    name: str
    """Path of the file below the folder."""
    repo: str
    commit: str
    bytes: int
    hash: str
    state: State
    bytes_here: int
    """Bytes of the file that need not be fetched."""
    file: HubFile = Field(exclude=True)

    def line(self) -> str:
        """Return it for people."""
        return f"{format_bytes(self.bytes):>12}  {self.name}{_STATE_NOTES[self.state]}"


class DownloadPlan(Document):
    """Plan of a download and, with every file present, its result."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.download/2"

    preset: str
    folder: Path
    repos: tuple[HubRepo, ...]
    bytes: int
    bytes_to_fetch: int
    files: tuple[PlannedDownload, ...]

    def lines(self) -> list[str]:
        """Return the plan for people."""
        left = f"{format_bytes(self.bytes_to_fetch)} to fetch" if self.bytes_to_fetch else "all there"
        return [
            *(repo.line() for repo in self.repos),
            *(planned.line() for planned in self.files),
            f"{format_bytes(self.bytes):>12}  in {self.folder}, {left}",
        ]


_STATE_NOTES = {
    State.MISSING: "",
    State.PARTIAL: " (partial)",
    State.UNCHECKED: " (here, not yet checked)",
    State.PRESENT: " (here)",
    State.OTHER: " (another file is here)",
}


def plan_download(settings: DownloadSettings) -> DownloadPlan:
    """List the files to fetch from the Hub, and the files that exist already.

    Raises:
        CheckpointError: the Hub cannot be reached, lacks needed files, or refuses access.
    """
    folder, sources = Path(settings.to), _sources(settings.preset)
    repos = tuple(read_repo(source.repo, wanted=source.wants) for source in sources)
    needed = [_needed(source, repo) for source, repo in zip(sources, repos, strict=True)]
    files = tuple(_planned(file, name, folder) for each in needed for name, file in each.items())
    return DownloadPlan(
        preset=settings.preset,
        folder=folder,
        repos=repos,
        bytes=sum(planned.bytes for planned in files),
        bytes_to_fetch=_bytes_to_fetch(files),
        files=files,
    )


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
        files = _checked(plan, reporter)
        others = [str(plan.folder / planned.name) for planned in files if planned.state is State.OTHER]
        if others and not settings.overwrite:
            raise OutputError(
                f"other files than on the Hub are there: {', '.join(others)}",
                hint="give another folder with --to, or replace them with --overwrite",
            )
        require_space(plan.folder, _bytes_to_fetch(files))
        left = [planned for planned in files if planned.state is not State.PRESENT]
        try:
            with reporter.stage("download", total=sum(planned.bytes for planned in left), unit=BYTES) as progress:
                for planned in left:
                    target = plan.folder / planned.name
                    fetch(planned.file, target, advance=progress.advance)
                    write_record(plan.folder, planned.name, commit=planned.commit, digest=planned.hash)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt("what has arrived is kept: the same command continues from there") from stop
    present = tuple(
        planned.model_copy(update={"state": State.PRESENT, "bytes_here": planned.bytes}) for planned in files
    )
    return plan.model_copy(update={"files": present, "bytes_to_fetch": 0})


def _bytes_to_fetch(files: Iterable[PlannedDownload]) -> int:
    return sum(planned.bytes - planned.bytes_here for planned in files)


def _needed(source: _Source, repo: HubRepo) -> dict[str, HubFile]:
    """Return the files to fetch, by their local names."""
    lacking = [name for name in source.files if name not in repo.files]
    needed = {here: repo.files[there] for there, here in source.files.items() if there in repo.files}
    for folder in source.folders:
        inside = {name: file for name, file in repo.files.items() if name.startswith(f"{folder}/")}
        if f"{folder}/config.json" not in inside:
            lacking.append(f"{folder}/config.json")
        has_safetensors = any(name.endswith(_SAFETENSORS) for name in inside)
        for name, file in inside.items():
            # Weights that are also in safetensors files are superfluous.
            if not (has_safetensors and PurePosixPath(name.removesuffix(".index.json")).suffix in _OTHER_WEIGHTS):
                needed[name] = file
    if lacking:
        raise CheckpointError(f"{repo.name} has no {', '.join(lacking)}", hint="check HF_ENDPOINT if it is set")
    return needed


def _planned(file: HubFile, name: str, folder: Path) -> PlannedDownload:
    """Compare a file with the local file, without reading it."""
    target, part = folder / name, part_of(file, folder / name)
    here = file.size
    if not target.is_file():
        here = part.stat().st_size if part.is_file() else 0
        state = State.PARTIAL if here else State.MISSING
    elif target.stat().st_size != file.size:
        state = State.OTHER
    elif digest := recorded_digest(folder, name):
        state = State.PRESENT if digest == file.digest else State.OTHER
    else:
        state = State.UNCHECKED
    return PlannedDownload(
        name=name,
        repo=file.repo,
        commit=file.commit,
        bytes=file.size,
        hash=file.digest,
        state=state,
        bytes_here=0 if state is State.OTHER else here,
        file=file,
    )


def _checked(plan: DownloadPlan, reporter: Reporter) -> list[PlannedDownload]:
    """Compare the local files again, which another run may have fetched, and hash those without a record."""
    files = [_planned(planned.file, planned.name, plan.folder) for planned in plan.files]
    unchecked = [number for number, planned in enumerate(files) if planned.state is State.UNCHECKED]
    if not unchecked:
        return files
    with reporter.stage("check", total=sum(files[number].bytes for number in unchecked), unit=BYTES) as progress:
        for number in unchecked:
            planned = files[number]
            update: dict[str, object] = {"state": State.OTHER, "bytes_here": 0}
            if is_content(planned.file, plan.folder / planned.name, advance=progress.advance):
                write_record(plan.folder, planned.name, commit=planned.commit, digest=planned.hash)
                update = {"state": State.PRESENT}
            files[number] = planned.model_copy(update=update)
    return files
