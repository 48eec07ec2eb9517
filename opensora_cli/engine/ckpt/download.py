"""`osora ckpt download`: what a released model needs, to where generating looks for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath

from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import require_space
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.hub import HubFile, HubRepo, OfflineProblem, fetch, part_of, read_repo
from opensora_cli.engine.ckpt.hub_records import Record, read_listing, read_record, write_listing, write_record
from opensora_cli.settings.ckpt import DownloadSettings
from opensora_cli.settings.components import FileSettings
from opensora_cli.settings.enums import DownloadPreset

SCHEMA = "osora.ckpt.download/1"

_NAMES = FileSettings()
_SAFETENSORS = ".safetensors"
# The same weights again, in forms that are slower or unsafe to read, or of other frameworks.
_OTHER_WEIGHTS = (".bin", ".h5", ".msgpack", ".ot", ".onnx", ".pt", ".pth", ".ckpt")
_TEXT_ENDINGS = (".json", ".txt", ".model")


@dataclass(frozen=True, slots=True)
class _Source:
    """What is taken from one repository."""

    repo: str
    files: Mapping[str, str]
    """Names there to names here."""
    folders: tuple[str, ...] = ()
    """transformers folders, which keep their names."""

    @property
    def names(self) -> list[str]:
        """What there is here for certain when all is."""
        return [*self.files.values(), *(f"{folder}/config.json" for folder in self.folders)]

    def wants(self, name: str) -> bool:
        """Whether a file of this name may be needed."""
        path = PurePosixPath(name)
        in_folder = str(path.parent) in self.folders and path.name not in ("", "..") and "\\" not in name
        return name in self.files or (in_folder and path.suffix in (_SAFETENSORS, *_OTHER_WEIGHTS, *_TEXT_ENDINGS))


_TEXT_ENCODERS = _Source(_NAMES.hub_repo, {}, (_NAMES.t5, _NAMES.clip))
_PRESETS: dict[DownloadPreset, tuple[_Source, ...]] = {
    DownloadPreset.OPEN_SORA_V2: (
        _Source(_NAMES.hub_repo, {name: name for name in (_NAMES.transformer, _NAMES.vae)}, _TEXT_ENCODERS.folders),
    ),
    DownloadPreset.OPEN_SORA_V2_DC_AE: (
        _Source(
            "hpcai-tech/Open-Sora-v2-Video-DC-AE",
            {name: name for name in ("Open_Sora_v2_Video_DC_AE.safetensors", "F32T4C128_AE.safetensors")},
        ),
        _TEXT_ENCODERS,
    ),
    DownloadPreset.FLUX1_DEV: (
        _Source(
            "black-forest-labs/FLUX.1-dev",
            {"flux1-dev.safetensors": "flux1-dev.safetensors", "ae.safetensors": "flux1-dev-ae.safetensors"},
        ),
        _TEXT_ENCODERS,
    ),
}


class State(StrEnum):
    """What is here of a file."""

    MISSING = "missing"
    PARTIAL = "partial"
    UNCHECKED = "unchecked"
    """A file of this name and size that nothing is known of."""
    PRESENT = "present"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file to download, and where to."""

    file: HubFile
    name: str
    """Below the folder."""
    state: State
    bytes_here: int
    """How much of it need not be fetched."""

    def to_json(self) -> dict[str, object]:
        """Return it as a part of a document."""
        return {
            "name": self.name,
            "repo": self.file.repo,
            "commit": self.file.commit,
            "bytes": self.file.size,
            "hash": self.file.digest,
            "state": self.state.value,
            "bytes_here": self.bytes_here,
        }

    def line(self) -> str:
        """Return it for people."""
        return f"{format_bytes(self.file.size):>12}  {self.name}{_SAID_OF[self.state]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """What a download will fetch; also, with every file present, what it has fetched."""

    preset: DownloadPreset
    folder: Path
    repos: tuple[HubRepo, ...]
    files: tuple[PlannedFile, ...]
    offline: bool
    """Whether the Hub was not asked, so that this is what it said when all was downloaded."""

    @property
    def bytes_to_fetch(self) -> int:
        """What is not here yet."""
        return sum(planned.file.size - planned.bytes_here for planned in self.files)

    def to_json(self) -> dict[str, object]:
        """Return it as a document of the schema `osora.ckpt.download/1`."""
        return {
            "schema": SCHEMA,
            "preset": self.preset.value,
            "folder": str(self.folder),
            "offline": self.offline,
            "repos": [
                {"name": repo.name, "commit": repo.commit, "licence": repo.licence, "gated": repo.is_gated}
                for repo in self.repos
            ],
            "bytes": sum(planned.file.size for planned in self.files),
            "bytes_to_fetch": self.bytes_to_fetch,
            "files": [planned.to_json() for planned in self.files],
        }

    def lines(self) -> list[str]:
        """Return it for people."""
        total = format_bytes(sum(planned.file.size for planned in self.files))
        left = f"{format_bytes(self.bytes_to_fetch)} to fetch" if self.bytes_to_fetch else "all there"
        return [
            *(["the machine is offline (HF_HUB_OFFLINE): this is as it was downloaded"] if self.offline else []),
            *(_about(repo) for repo in self.repos),
            *(planned.line() for planned in self.files),
            f"{total:>12}  in {self.folder}, {left}",
        ]


_SAID_OF = {
    State.MISSING: "",
    State.PARTIAL: " (begun)",
    State.UNCHECKED: " (here, to be checked)",
    State.PRESENT: " (here)",
    State.OTHER: " (another file is here)",
}


def _about(repo: HubRepo) -> str:
    gate = ", given only to those who have accepted its terms: needs a token" if repo.is_gated else ""
    return f"{repo.name}: licence {repo.licence or 'not stated'}{gate}"


def plan_download(settings: DownloadSettings) -> DownloadPlan:
    """Ask the Hub what there is to fetch, and look what is here already.

    A machine that is offline is told what was noted when all was downloaded.

    Raises:
        CheckpointError: the Hub cannot be reached, does not have what is needed or does not give it.
    """
    folder = Path(settings.to)
    sources = _PRESETS[settings.preset]
    repos, offline = _read(sources, settings.preset, folder)
    files = [
        _planned(file, name, folder)
        for source, repo in zip(sources, repos, strict=True)
        for name, file in _needed(source, repo).items()
    ]
    return DownloadPlan(preset=settings.preset, folder=folder, repos=repos, files=tuple(files), offline=offline)


def download(settings: DownloadSettings, *, reporter: Reporter | None = None) -> DownloadPlan:
    """Fetch what `settings.preset` needs, and check all of it against the hashes of the Hub.

    What is here and right is not fetched again; what was begun is gone on with.

    Args:
        settings: what, and where to.
        reporter: shown the sizes, licences and progress; None: nobody.

    Raises:
        CheckpointError: the Hub cannot be reached, refuses, or sends something else than it says.
        OutputError: the folder cannot be written, has too little room, or holds other files of these names.
        KeyboardInterrupt: its argument says how to go on.
    """
    reporter = reporter or SilentReporter()
    plan = plan_download(settings)
    for line in plan.lines():
        reporter.note(line)
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
        raise KeyboardInterrupt("what has arrived is kept: the same command goes on from there") from stop


def _read(sources: Sequence[_Source], preset: DownloadPreset, folder: Path) -> tuple[tuple[HubRepo, ...], bool]:
    """Return what is in the repositories, and whether that is only what is noted here of a machine that is offline."""
    try:
        return tuple(read_repo(source.repo, wanted=source.wants) for source in sources), False
    except OfflineProblem as problem:
        noted = read_listing(folder, preset)
        names = [name for source in sources for name in source.names]
        if all(source.repo in noted for source in sources):
            repos = tuple(_wanted(source, noted[source.repo]) for source in sources)
            names = [name for source, repo in zip(sources, repos, strict=True) for name in _needed(source, repo)]
            if all((folder / name).is_file() for name in names):
                return repos, True
        missing = [name for name in names if not (folder / name).exists()]
        lacking = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(names)}, but no note of a download"
        raise CheckpointError(
            f"{problem.message}; {folder} {lacking}",
            hint="unset HF_HUB_OFFLINE, or copy the files from another machine, .cache included",
        ) from problem


def _wanted(source: _Source, repo: HubRepo) -> HubRepo:
    return replace(repo, files={name: file for name, file in repo.files.items() if source.wants(name)})


def _needed(source: _Source, repo: HubRepo) -> dict[str, HubFile]:
    """Return the files to fetch, by their names here."""
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
    """Whether the folder has the weights in `name` as safetensors, too."""
    path = PurePosixPath(name.removesuffix(".index.json"))
    return path.suffix in _OTHER_WEIGHTS and any(other.endswith(_SAFETENSORS) for other in names)


def _planned(file: HubFile, name: str, folder: Path) -> PlannedFile:
    """Look what is here of a file, without reading it."""
    target = folder / name
    part = part_of(file, target)
    if target.is_file():
        state = _state(file, target, read_record(folder, name))
        here = 0 if state is State.OTHER else file.size
    else:
        here = part.stat().st_size if part.is_file() else 0
        state = State.PARTIAL if here else State.MISSING
    return PlannedFile(file=file, name=name, state=state, bytes_here=here)


def _state(file: HubFile, target: Path, record: Record | None) -> State:
    if target.stat().st_size != file.size:
        return State.OTHER
    if record is None or not record.is_newer_than(target):
        return State.UNCHECKED
    return State.PRESENT if record.digest == file.digest else State.OTHER


def _checked(plan: DownloadPlan, reporter: Reporter) -> DownloadPlan:
    """Find out about the files that are here without a record, by reading them."""
    unchecked = [planned.file.size for planned in plan.files if planned.state is State.UNCHECKED]
    if not unchecked:
        return plan
    files = []
    with reporter.stage("check", total=sum(unchecked), unit=BYTES) as progress:
        for planned in plan.files:
            if planned.state is State.UNCHECKED:
                if planned.file.is_content_of(plan.folder / planned.name, advance=progress.advance):
                    _note(planned, plan.folder)
                    planned = replace(planned, state=State.PRESENT)
                else:
                    planned = replace(planned, state=State.OTHER, bytes_here=0)
            files.append(planned)
    return replace(plan, files=tuple(files))


def _fetch_all(plan: DownloadPlan, reporter: Reporter) -> DownloadPlan:
    """Fetch what is not here, and return the plan as done."""
    left = [planned for planned in plan.files if planned.state is not State.PRESENT]
    with reporter.stage("download", total=sum(planned.file.size for planned in left), unit=BYTES) as progress:
        for planned in left:
            fetch(planned.file, plan.folder / planned.name, advance=progress.advance)
            _note(planned, plan.folder)
    if not plan.offline:
        write_listing(plan.folder, plan.preset, plan.repos)
    done = (replace(planned, state=State.PRESENT, bytes_here=planned.file.size) for planned in plan.files)
    return replace(plan, files=tuple(done))


def _note(planned: PlannedFile, folder: Path) -> None:
    write_record(folder, planned.name, commit=planned.file.commit, digest=planned.file.digest)
