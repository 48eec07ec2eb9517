"""Files of settings in which one thing or more is wrong."""

import random
from collections.abc import Sequence

from hostile.command_lines import settings_names
from hostile.inputs import Inputs
from hostile.sandbox import Folder
from hostile.trial import Case
from hostile.values import close_obstacles, hostile_value, put_obstacles

_READERS: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    ("generate.yaml", ("tiny",), ("generate", "raining", "--config", "changed.yaml", "--dry-run")),
    ("generate.yaml", ("tiny",), ("generate", "raining", "--config", "changed.yaml", "--dry-run")),
    ("generate.yaml", (), ("mem-profile", "--config", "changed.yaml", "--runs", "0")),
    ("vae.yaml", ("clips", "clips.csv"), ("train", "--config", "changed.yaml", "--check-data", "--json")),
    ("vae.yaml", ("clips", "clips.csv"), ("train", "--config", "changed.yaml", "--check-data")),
    ("mmdit.yaml", ("frozen", "clips", "clips.csv"), ("train", "--config", "changed.yaml", "--check-data")),
    ("clips.yaml", ("frozen", "clips", "clips.csv"), ("train", "--config", "changed.yaml", "--check-data")),
    ("clips.yaml", ("frozen", "clips", "clips.csv"), ("data", "cache", "--config", "changed.yaml")),
    ("vae.yaml", ("picture.png",), ("vae", "stats", "picture.png", "--config", "changed.yaml")),
    ("vae.yaml", (), ("train", "--from", "changed.yaml", "--dry-run")),
    ("reference.py", (), ("generate", "x", "--config", "changed.py", "--dry-run")),
    ("made.mp4.json", ("tiny",), ("generate", "--from", "changed.json", "--weights", "tiny", "--dry-run")),
)

_BOMB = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
)
_DOCUMENTS: Sequence[bytes] = (
    *(b"", b"\0", b"---", b"--- \n---\n", b"null", b"[]", b"7", b"text", b"- a\n- b", b"\xef\xbb\xbf{}"),
    *(b"\xff\xfe\0", b"\t", b"{" * 3000, b"[" * 10000, b"a: " * 2000, b"- " * 5000, b"? " * 3000),
    *(b"!!python/object/apply:os.system [touch pwned]", _BOMB.encode(), b"&a [*a]", b"a: &a\n  b: *a", b"<<: *x"),
    *(b"video: {<<: {width: 64}}", b"? [a]\n: b", b"1: 2", b"~: 1", b"video: {width: 64, width: 32}"),
    *(b"x: !!binary aGk=", b"x: !!set {a}", b"x: 2001-01-01", b"%YAML 9.9\n---\na: b", b"extends: changed.yaml"),
    *(b"extends: gone.yaml", b"extends: [a, b]", b"extends: /dev/zero", b"extends: fifo"),
    *(b"extends: denied/x.yaml", b"extends: folder", b"extends: ''", b"a: |\n  " + b"x" * 10**6),
    "原野: 1".encode("utf-16"),
)
_WORDS = """
null ~ [] {} [1] true no 16:9 1e-4 .nan .inf -.inf 0x10 0o7 1_0 '0' *x 999999999999999999999999999999 -1 0 1e309
!!python/name:os.system 2026-11-22 [[[[[[]]]]]] '
"""
_NODES: Sequence[str] = (
    *_WORDS.split(),
    *("{a: 1}", '"\\0"', '"\\ud800"', "!!str 1", "!!float 1", "!!int '1'", "&x 1", "9" * 5000),
    *("!!python/object/apply:os.system [touch pwned]", "| \n"),
)


def yaml_text(number: int, inputs: Inputs) -> Case:
    """Return the case of a number."""
    rng = random.Random(number)
    source, others, argv = rng.choice(_READERS)
    content = (inputs.folder / source).read_bytes()
    if rng.random() < 0.12:
        content = rng.choice(_DOCUMENTS)
    elif rng.random() < 0.2:
        content = _spoilt(content, rng)
    else:
        content = _changed(content.decode(), rng).encode("utf-8", "surrogateescape")

    def prepare(folder: Folder) -> None:
        put_obstacles(folder)
        inputs.put_names(others, folder)
        changed = next(word for word in argv if word.startswith("changed"))
        (folder.work / changed).write_bytes(content)

    return Case(f"settings {number}", argv, prepare, close_obstacles)


def _spoilt(content: bytes, rng: random.Random) -> bytes:
    """Change bytes, wherever they are."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            changed[place : place + rng.randrange(1, 20)] = b""
        elif kind == 2:
            changed[place:place] = rng.choice(
                (b"\0", b"\t", b":", b"- ", b"{", b"]", b'"', b"\n", b"\xff", b"&a ", b"#")
            )
        else:
            changed = changed[: place + 1]
    return bytes(changed)


def _changed(text: str, rng: random.Random) -> str:
    """Change values, lines and keys."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(lines))
        before, colon, _ = lines[place].partition(":")
        kind = rng.randrange(5)
        if kind <= 1 and colon:
            lines[place] = f"{before}: {_node(rng)}"
        elif kind == 2:
            lines.insert(place, lines[place])
        elif kind == 3:
            section, _, name = rng.choice(settings_names()).partition(".")
            lines += [f"{section}: {_node(rng)}" if not name else f"{section}: {{{name}: {_node(rng)}}}"]
        elif kind == 4 and len(lines) > 1:
            del lines[place]
    return "\n".join(lines) + "\n"


def _node(rng: random.Random) -> str:
    return rng.choice(_NODES) if rng.random() < 0.6 else hostile_value(rng)
