"""`osora ckpt download`: fetch the files of a released model into the folder that `osora generate` reads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import require_space
from opensora_cli.core.folder_lock import sole_run
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.hub import HubFile, HubRepo, OfflineProblem, fetch, part_of, read_repo
from opensora_cli.engine.ckpt.hub_records import Record, read_listing, read_record, write_listing, write_record
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

    @property
    def names(self) -> list[str]:
        """Local names of files that every complete download has."""
        return [*self.files.values(), *(f"{folder}/config.json" for folder in self.folders)]

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


class DownloadRepo(Document):
    """Repository of a download."""

    name: str
    commit: str
    licence: str | None
    gated: bool

    def line(self) -> str:
        """Return it for people."""
        gate = ", given only to those who have accepted its terms: needs a token" if self.gated else ""
        return f"{self.name}: licence {self.licence or 'not stated'}{gate}"


class PlannedFile(Document):
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

    SCHEMA: ClassVar[str | None] = "osora.ckpt.download/1"

    preset: str
    folder: Path
    offline: bool
    """Whether the machine is offline, so that the repositories come from the record of an earlier download."""
    repos: tuple[DownloadRepo, ...]
    bytes: int
    bytes_to_fetch: int
    files: tuple[PlannedFile, ...]
    hub_repos: tuple[HubRepo, ...] = Field(exclude=True)

    def with_files(self, files: Iterable[PlannedFile]) -> "DownloadPlan":
        """Return the plan with new states of the files."""
        files = tuple(files)
        return self.model_copy(update={"files": files, "bytes_to_fetch": _bytes_to_fetch(files)})

    def lines(self) -> list[str]:
        """Return the plan for people."""
        left = f"{format_bytes(self.bytes_to_fetch)} to fetch" if self.bytes_to_fetch else "all there"
        return [
            *(["the machine is offline (HF_HUB_OFFLINE): this is as it was downloaded"] if self.offline else []),
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


def _bytes_to_fetch(files: Iterable[PlannedFile]) -> int:
    return sum(planned.bytes - planned.bytes_here for planned in files)


def plan_download(settings: DownloadSettings) -> DownloadPlan:
    """List the files to fetch from the Hub, and the files that exist already.

    Offline, the list comes from the record of a complete download.

    Raises:
        CheckpointError: the Hub cannot be reached, lacks needed files, or refuses access.
    """
    folder = Path(settings.to)
    sources = _sources(settings.preset)
    repos, offline = _read(sources, settings.preset, folder)
    files = [
        _planned(file, name, folder)
        for source, repo in zip(sources, repos, strict=True)
        for name, file in _needed(source, repo).items()
    ]
    return DownloadPlan(
        preset=settings.preset,
        folder=folder,
        offline=offline,
        repos=tuple(
            DownloadRepo(name=repo.name, commit=repo.commit, licence=repo.licence, gated=repo.is_gated)
            for repo in repos
        ),
        bytes=sum(planned.bytes for planned in files),
        bytes_to_fetch=_bytes_to_fetch(files),
        files=tuple(files),
        hub_repos=repos,
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
    if plan.offline:  # nothing is fetched, and the folder may be read-only
        return _completed(plan, settings, reporter)
    problem, hint = f"another run downloads into {plan.folder}", "wait until it ends, or give another folder with --to"
    with sole_run(plan.folder / ".osora-download.lock", problem=problem, hint=hint):
        # Files that another run fetched after this one was planned are not fetched again.
        files = (_planned(planned.file, planned.name, plan.folder) for planned in plan.files)
        return _completed(plan.with_files(files), settings, reporter)


def _completed(plan: DownloadPlan, settings: DownloadSettings, reporter: Reporter) -> DownloadPlan:
    """Check the existing files, fetch the rest, and return the finished plan. Errors are those of `download`."""
    plan = _checked(plan, reporter)
    others = [str(plan.folder / planned.name) for planned in plan.files if planned.state is State.OTHER]
    if others and not settings.overwrite:
        raise OutputError(
            f"other files than on the Hub are there: {', '.join(others)}",
            hint="give another folder with --to, or replace them with --overwrite",
        )
    require_space(plan.folder, plan.bytes_to_fetch)
    try:
        return _fetch_all(plan, reporter)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("what has arrived is kept: the same command continues from there") from stop


def _read(sources: Sequence[_Source], preset: str, folder: Path) -> tuple[tuple[HubRepo, ...], bool]:
    """Return the repositories, and whether they come from the local record because the machine is offline."""
    try:
        return tuple(read_repo(source.repo, wanted=source.wants) for source in sources), False
    except OfflineProblem as problem:
        recorded = read_listing(folder, preset)
        names = [name for source in sources for name in source.names]
        if all(source.repo in recorded for source in sources):
            repos = tuple(
                replace(repo, files={name: file for name, file in repo.files.items() if source.wants(name)})
                for source, repo in ((source, recorded[source.repo]) for source in sources)
            )
            names = [name for source, repo in zip(sources, repos, strict=True) for name in _needed(source, repo)]
            if all((folder / name).is_file() for name in names):
                return repos, True
        missing = [name for name in names if not (folder / name).exists()]
        lacking = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(names)}, but no record of a download"
        raise CheckpointError(
            f"{problem.message}; {folder} {lacking}",
            hint="unset HF_HUB_OFFLINE, or copy the files from another machine, .cache included",
        ) from problem


def _needed(source: _Source, repo: HubRepo) -> dict[str, HubFile]:
    """Return the files to fetch, by their local names."""
    lacking = [name for name in source.files if name not in repo.files]
    needed = {here: repo.files[there] for there, here in source.files.items() if there in repo.files}
    for folder in source.folders:
        inside = {name: file for name, file in repo.files.items() if name.startswith(f"{folder}/")}
        if f"{folder}/config.json" not in inside:
            lacking.append(f"{folder}/config.json")
        needed |= {name: file for name, file in inside.items() if not _is_superfluous(name, inside)}
    if lacking:
        raise CheckpointError(f"{repo.name} has no {', '.join(lacking)}", hint="check HF_ENDPOINT if it is set")
    return needed


def _is_superfluous(name: str, names: Iterable[str]) -> bool:
    """Return whether the weights in `name` are also in safetensors files of the folder."""
    path = PurePosixPath(name.removesuffix(".index.json"))
    return path.suffix in _OTHER_WEIGHTS and any(other.endswith(_SAFETENSORS) for other in names)


def _planned(file: HubFile, name: str, folder: Path) -> PlannedFile:
    """Compare a file with the local file, without reading it."""
    target = folder / name
    part = part_of(file, target)
    if target.is_file():
        state = _state(file, target, read_record(folder, name))
        here = 0 if state is State.OTHER else file.size
    else:
        here = part.stat().st_size if part.is_file() else 0
        state = State.PARTIAL if here else State.MISSING
    return PlannedFile(
        name=name,
        repo=file.repo,
        commit=file.commit,
        bytes=file.size,
        hash=file.digest,
        state=state,
        bytes_here=here,
        file=file,
    )


def _state(file: HubFile, target: Path, record: Record | None) -> State:
    if target.stat().st_size != file.size:
        return State.OTHER
    if record is None or not record.is_newer_than(target):
        return State.UNCHECKED
    return State.PRESENT if record.digest == file.digest else State.OTHER


def _checked(plan: DownloadPlan, reporter: Reporter) -> DownloadPlan:
    """Hash the local files without a record."""
    unchecked = [planned.bytes for planned in plan.files if planned.state is State.UNCHECKED]
    if not unchecked:
        return plan
    files = []
    with reporter.stage("check", total=sum(unchecked), unit=BYTES) as progress:
        for planned in plan.files:
            if planned.state is State.UNCHECKED:
                if planned.file.is_content_of(plan.folder / planned.name, advance=progress.advance):
                    _record(planned, plan.folder)
                    planned = planned.model_copy(update={"state": State.PRESENT})
                else:
                    planned = planned.model_copy(update={"state": State.OTHER, "bytes_here": 0})
            files.append(planned)
    return plan.with_files(files)


def _fetch_all(plan: DownloadPlan, reporter: Reporter) -> DownloadPlan:
    """Fetch the missing files, and return the finished plan."""
    left = [planned for planned in plan.files if planned.state is not State.PRESENT]
    with reporter.stage("download", total=sum(planned.bytes for planned in left), unit=BYTES) as progress:
        for planned in left:
            fetch(planned.file, plan.folder / planned.name, advance=progress.advance, report=reporter.warn)
            _record(planned, plan.folder)
    if not plan.offline:
        write_listing(plan.folder, plan.preset, plan.hub_repos)
    return plan.with_files(
        planned.model_copy(update={"state": State.PRESENT, "bytes_here": planned.bytes}) for planned in plan.files
    )


def _record(planned: PlannedFile, folder: Path) -> None:
    write_record(folder, planned.name, commit=planned.commit, digest=planned.hash)
