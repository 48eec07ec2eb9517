"""Values that nobody types on purpose, for options, settings and paths."""

import os
import random
import socket
from collections.abc import Sequence

from hostile.sandbox import Folder

_WORDS = """
- -- -x = a=b a.b=c , 0,,1 0,0 * ? ~ ~root $HOME %s%n none null auto true no yes [] {} nan inf -inf 0 -0 1 -1 2 3 7
0.5 1.5 1e-400 1e309 -1e309 1e4 0x10 0b1 1_000 1,5 9999999999999999999999999 -9999999999999999999999999 2147483648
9223372036854775807 18446744073709551616 ٣ ½ Ⅷ 16:9 1:0 0:0 -1:1 1:1:1 : 9: 1e3:1 nan:1 0px -1px 64px 256px 1e9px
99999px px 0B 1B -1GiB 1e400GB 1XB GiB cpu cuda cuda:99 cuda:-1 cuda: cuda:x meta mps CPU 原野 é é re:( re:(a+)+$=b
re:.*=x a= =b ** [! ../x --help --json @x | demo open-sora-v2
"""
WORDS: Sequence[str] = (
    *_WORDS.split(),
    *("", " ", "\\", "[1, 2", "{a: b", "&a *a", "!!int x", "9" * 5000, "24 GiB", "😀" * 40, "\u202egnp.exe"),
    *("\ufeffx", "\u2028", "a\nb", "a\rb", "a\tb", "\x07", "\x1b[31mred", "\udc80", "x\udcff.mp4", "x" * 5000),
    *("x," * 2500, "[" * 3000, "$(touch pwned)", "`touch pwned`", "'; touch pwned;'"),
)

_PATHS = """
gone gone/deeper/x.mp4 folder folder/ fifo socket loop dangling denied denied/x secret read-only read-only/x.mp4
/dev/zero /dev/full /dev/null /dev/stdin /dev/random /proc/self/mem /proc/self/environ /proc/1/fd/0 /sys / . ..
/etc/shadow /etc/passwd empty empty.json empty.yaml empty.csv empty.safetensors empty.mp4 empty.png empty.pt
empty.py noise noise.json noise.yaml noise.csv noise.safetensors noise.mp4 noise.png noise.pt noise.py text.json
text.yaml text.csv text.safetensors text.mp4 text.png text.pt text.py text.parquet https://example.invalid/x.mp4
file:///etc/passwd x.mp4/ x.mp4/y.mp4 text.json/x.png out.exe out out.png out.mp4 out.safetensors out.json .mp4
"""
PATHS: Sequence[str] = (
    *_PATHS.split(),
    *("x" * 300, "a/" * 2500, "name with blanks.mp4", "new\nline.mp4", "x\udcff.png", "C:\\x"),
)

_ENDINGS = ("", ".json", ".yaml", ".csv", ".safetensors", ".mp4", ".png", ".pt", ".py")


def put_obstacles(folder: Folder) -> None:
    work = folder.work
    for name in ("folder", "denied", "read-only"):
        (work / name).mkdir()
    os.mkfifo(work / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(work / "socket"))
    (work / "loop").symlink_to("loop")
    (work / "dangling").symlink_to("nowhere")
    (work / "secret").write_text("secret\n")
    noise = random.Random(0).randbytes(3000)
    for ending in _ENDINGS:
        (work / f"empty{ending}").touch()
        (work / f"noise{ending}").write_bytes(noise)
        (work / f"text{ending}").write_text("a text, of one line\n")
    (work / "text.parquet").write_text("PAR1 and no more")


def close_obstacles(folder: Folder) -> None:
    """Take the rights away that `PATHS` are to lack."""
    for name, mode in (("denied", 0), ("secret", 0), ("read-only", 0o500)):
        (folder.work / name).chmod(mode)


def hostile_value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    if kind < 0.9:
        return rng.choice(PATHS)
    return "".join(
        chr(rng.choice((rng.randrange(1, 128), rng.randrange(128, 0xD800)))) for _ in range(rng.randrange(20))
    )
