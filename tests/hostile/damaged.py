"""Files of every format, damaged as disks, downloads and people damage them, before a command reads them."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hostile.inputs import BASES, Inputs
from hostile.sandbox import Folder
from hostile.trial import Case

_READING = tuple(base for base in BASES if base.reads)
_LONGEST_KEPT = 4096


def damaged_file(number: int, inputs: Inputs) -> Case:
    """Return the case of a number: a command, and one of the files that it reads damaged in one way."""
    rng = random.Random(number)
    base = rng.choices(_READING, [1 / each.seconds for each in _READING])[0]
    name = rng.choice(base.reads)
    way = rng.choice(tuple(_WAYS))

    def prepare(folder: Folder) -> None:
        inputs.put(base, folder)
        files = sorted(path for path in (folder.work / name).rglob("*") if path.is_file())
        victim = rng.choice(files) if files else folder.work / name
        _WAYS[way](victim, rng, sorted(path for path in inputs.folder.rglob("*") if path.is_file()))

    def close(folder: Folder) -> None:
        for path in folder.work.rglob("*"):
            if path.name.endswith(_DENIED):
                path.chmod(0)

    return Case(f"damaged {number} ({way} in {name})", base.argv, prepare, close, may_change=base.replaces)


def _cut(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.choice((0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content) + 1)))])


def _flip(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    content = bytearray(path.read_bytes())
    # Mostly near the beginning or the end, where formats keep what they say of themselves.
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if content:
            reach = min(len(content), rng.choice((16, 256, _LONGEST_KEPT, len(content))))
            place = rng.randrange(reach)
            content[place if rng.random() < 0.6 else -1 - place] = rng.randrange(256)
    path.write_bytes(content)


def _splice(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    content = path.read_bytes()
    first, second, third = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    path.write_bytes(rng.choice((content[:first] + content[second:], content[:third] + content[first:])))


def _extend(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    with path.open("ab") as file:
        file.write(rng.choice((b"\0" * 9, b"\n", b"x", rng.randbytes(3000), b"\0" * 10**6)))


def _zero(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    """Leave a hole, as a power failure does."""
    content = bytearray(path.read_bytes())
    start = rng.choice((0, rng.randrange(len(content) + 1)))
    content[start:] = bytes(len(content) - start)
    path.write_bytes(content)


def _replace(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    alike = [other for other in others if other.suffix == path.suffix]
    shutil.copyfile(rng.choice(rng.choice((others, alike or others))), path)


def _noise(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    path.write_bytes(rng.randbytes(rng.choice((1, 100, 5000))))


def _lines(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    lines = path.read_bytes().split(b"\n")
    for _ in range(rng.choice((1, 2, 5))):
        place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        change = rng.randrange(3)
        if change == 0:
            lines[place], lines[other] = lines[other], lines[place]
        elif change == 1:
            lines.insert(place, lines[other])
        elif len(lines) > 1:
            del lines[place]
    path.write_bytes(b"\n".join(lines))


_VALUES = (
    *(None, True, -1, 0, 1.5, float("nan"), 10**30, "", "x", "../../x", "/etc/passwd", "\ud800", [], {}, [[]]),
    *(["x"], 2**63),
)


def _document(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    """Change what a JSON document says; of a safetensors file, its header."""
    content = path.read_bytes()
    try:
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
            _change(header, rng)
            text = json.dumps(header).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        else:
            document = json.loads(content)
            _change(document, rng)
            path.write_text(json.dumps(document))
    except ValueError:
        _values(path, rng, others)


def _values(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    words = path.read_bytes().replace(b",", b" , ").split(b" ")
    words[rng.randrange(len(words))] = json.dumps(rng.choice(_VALUES)).encode()
    path.write_bytes(b" ".join(words).replace(b" , ", b","))


def _change(document: object, rng: random.Random) -> None:
    keys = (
        list(document)
        if isinstance(document, dict)
        else list(range(len(document)))
        if isinstance(document, list)
        else []
    )
    if not keys:
        return
    key = rng.choice(keys)
    inner = document[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        _change(inner, rng)
    elif rng.random() < 0.2:
        del document[key]
    elif rng.random() < 0.2 and isinstance(document, dict):
        document[rng.choice(("x", "../x", "", "a.b"))] = document.pop(key)
    else:
        document[key] = rng.choice(_VALUES)


_BOMB = "a: &a [x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_DOCUMENTS: Sequence[bytes] = (
    *(b"", b"\0", b"---", b"--- \n---\n", b"null", b"[]", b"7", b"text", b"- a\n- b", b"\xef\xbb\xbf{}"),
    *(b"\xff\xfe\0", b"\t", b"{" * 3000, b"[" * 10000, b"a: " * 2000, b"- " * 5000, b"? " * 3000),
    *(b"!!python/object/apply:os.system [touch pwned]", _BOMB.encode(), b"&a [*a]", b"a: &a\n  b: *a", b"<<: *x"),
    *(b"video: {<<: {width: 64}}", b"? [a]\n: b", b"1: 2", b"~: 1", b"video: {width: 64, width: 32}"),
    *(b"x: !!binary aGk=", b"x: !!set {a}", b"x: 2001-01-01", b"%YAML 9.9\n---\na: b", b"extends: gone.yaml"),
    *(b"extends: [a, b]", b"extends: /dev/zero", b"extends: ''"),
    *(b"a: |\n  " + b"x" * 10**6, "原野: 1".encode("utf-16")),
)


def _hostile_document(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    """Put settings in its place that ask too much of a reader of YAML."""
    path.write_bytes(rng.choice(_DOCUMENTS))


def _gone(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    path.unlink()


def _folder(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    path.unlink()
    path.symlink_to(rng.choice((path.name, "nowhere", "/dev/zero", "/dev/full", "/etc/shadow", ".", "/proc/self/mem")))


def _fifo(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


_DENIED = ".denied"


def _deny(path: Path, rng: random.Random, others: Sequence[Path]) -> None:
    """Leave a link to a file that may not be read."""
    denied = path.with_name(path.name + _DENIED)
    path.rename(denied)
    path.symlink_to(denied.name)


_WAYS: Mapping[str, Callable[[Path, random.Random, Sequence[Path]], None]] = {
    "cut": _cut,
    "flipped": _flip,
    "flipped bytes": _flip,
    "spliced": _splice,
    "extended": _extend,
    "zeroed": _zero,
    "replaced": _replace,
    "noise": _noise,
    "other lines": _lines,
    "other values": _document,
    "another document": _document,
    "a hostile document": _hostile_document,
    "gone": _gone,
    "a folder": _folder,
    "a link": _link,
    "a pipe": _fifo,
    "denied": _deny,
}
