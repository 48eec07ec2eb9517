"""What a hostile case must leave behind: a documented exit code, one clear line, whole files, and nothing else."""

import csv
import hashlib
import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import yaml
from hostile.sandbox import Folder, Outcome
from PIL import Image

TRACEBACKS, HANGS, HALF, LOST = "tracebacks", "hangs", "half files", "lost results"
LEFT, PROCESSES, ALARMS, UNCLEAR = "left-over files", "left-over processes", "false alarms", "unclear messages"

DOCUMENTED = frozenset({0, 2, 3, 4, 5, 130})
_NOISE = re.compile(r"Traceback \(most recent call last\)|Exception ignored in|Fatal Python error|\.py:\d+: \w*Warning")
_TEMPORARY = re.compile(r"^\.osora-|\.(tmp|part|partial|incomplete|lock)$|^tmp\w{6,}$|^pwned$")
_UNFINISHED = re.compile(r"\.osora-|\.saving-|\.part$|\.lock$")
# The last is of the program that matplotlib asks for fonts, which keeps one where the system's is out of date.
_CACHES = ("home/.cache/matplotlib/", "home/.config/matplotlib/", "home/.cache/fontconfig/")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONGEST_LINE = 2100
_SHOWN = 2000

Tree = Mapping[str, str]
"""Relative paths to what is there: the hash of a file, the target of a link, or the kind of something else."""


@dataclass(frozen=True)
class Fault:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def tree(folder: Folder) -> Tree:
    """Return all that is in the folder of a case, but empty folders."""
    found: dict[str, str] = {}
    for path, names, files in os.walk(folder.root):
        for name in files + [each for each in names if os.path.islink(os.path.join(path, each))]:
            each = Path(path, name)
            found[str(each.relative_to(folder.root))] = _content(each)
    return found


def faults_of_outcome(outcome: Outcome, *, codes: frozenset[int]) -> list[Fault]:
    """Return what is wrong with how a command ended and what it printed; `codes` are those that it may end with."""
    if outcome.hung:
        return [Fault(HANGS, f"after {outcome.seconds:.0f} s\n{outcome.stderr[-2 * _SHOWN :]}")]
    found = []
    noise = _NOISE.search(outcome.stderr)
    if outcome.code is None or outcome.code not in DOCUMENTED or noise:
        found.append(Fault(TRACEBACKS, f"{outcome}\n{outcome.stderr[-_SHOWN:]}"))
    elif outcome.code not in codes:
        found.append(Fault(ALARMS, f"{outcome}\n{outcome.stderr[-_SHOWN:]}"))
    elif outcome.code and (text := _unclear(outcome)):
        found.append(Fault(UNCLEAR, text))
    if outcome.left_processes:
        found.append(Fault(PROCESSES, "\n".join(outcome.left_processes)))
    return found


def faults_of_files(
    before: Tree, after: Tree, root: Path, *, may_change: Sequence[str] = (), may_keep: Sequence[str] = ()
) -> list[Fault]:
    found = []
    for path, content in before.items():
        if after.get(path) != content and not _is_in(path, may_change):
            found.append(Fault(LOST, f"{path} is {'changed' if path in after else 'gone'}"))
    for path in sorted(after.keys() - before.keys()):
        if path.startswith((*_CACHES, *may_keep)):
            continue
        is_elsewhere = path.startswith(("tmp/", "home/"))
        if _TEMPORARY.search(Path(path).name) or is_elsewhere:
            found.append(Fault(LEFT, path))
    for path, content in after.items():
        if before.get(path) != content and not path.startswith(_CACHES) and (reason := broken(root / path)):
            found.append(Fault(HALF, f"{path}: {reason}"))
    return found


def is_unfinished(path: str) -> bool:
    """Return whether a path is what a command that was killed may leave, and the next run removes."""
    return _UNFINISHED.search(path) is not None


def broken(path: Path) -> str | None:
    """Return why a file is not what its name promises; None if it is, or promises nothing."""
    read = _READERS.get(path.suffix)
    if path.is_symlink() or not path.is_file() or read is None:
        return None
    try:
        read(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _content(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"-> {os.readlink(path)}"
    if stat.S_ISREG(mode):
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    return str(stat.S_IFMT(mode))


def _is_in(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _unclear(outcome: Outcome) -> str | None:
    lines = [line.removeprefix("error: ") for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    if not lines:
        # Reports of what was checked are results, and on stdout.
        return None if outcome.stdout.strip() else f"{outcome} without an error: {outcome.stderr[-500:]!r}"
    wrong = [line for line in lines if not line.strip() or len(line) > _LONGEST_LINE or _CONTROLS.search(line)]
    return f"{len(wrong[0])} characters: {wrong[0][:500]!r}" if wrong else None


def _read_json(path: Path) -> None:
    json.loads(path.read_text())


def _read_lines(path: Path) -> None:
    for line in path.read_text().splitlines():
        json.loads(line)


def _read_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text()) is not None, "empty"


def _read_csv(path: Path) -> None:
    # As osora writes them, since file names may be no Unicode.
    with path.open(newline="", errors="surrogateescape") as file:
        assert next(csv.reader(file)), "no columns"


def _read_parquet(path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.read_table(path)


def _read_safetensors(path: Path) -> None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert path.stat().st_size == 8 + length + max(ends, default=0), "another size than its header says"


def _read_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None


def _read_picture(path: Path) -> None:
    with Image.open(path) as picture:
        picture.load()


def _read_video(path: Path) -> None:
    with av.open(str(path)) as file:
        assert sum(1 for _ in file.decode(file.streams.video[0])), "no frames"


_READERS = {
    **dict.fromkeys((".json",), _read_json),
    **dict.fromkeys((".jsonl",), _read_lines),
    **dict.fromkeys((".yaml", ".yml"), _read_yaml),
    **dict.fromkeys((".csv",), _read_csv),
    **dict.fromkeys((".parquet",), _read_parquet),
    **dict.fromkeys((".safetensors",), _read_safetensors),
    **dict.fromkeys((".pt", ".pth", ".bin"), _read_zip),
    **dict.fromkeys((".png", ".jpg", ".gif", ".webp"), _read_picture),
    **dict.fromkeys((".mp4",), _read_video),
}
