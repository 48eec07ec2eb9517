"""Uploaded references: kept under random names, and decoded once by a child process with limits.

Run as a program, this module is that child process: it reads a picture or video as `--ref` does.
"""

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile

from opensora_cli.core.exceptions import MediaError
from opensora_cli.core.files import atomic_path
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.core.redaction import ABSOLUTE_PATH, BEFORE_PATH

LARGEST = 512 * 2**20
"""Most bytes of the uploaded files of a request."""
STAND_INS = {"picture": 1, "video": 300}
"""Kinds of references, and the number of frames that stand for one in a plan."""
_CHECK_S = 60.0
_MEMORY = 4 * 2**30
_MOST_PIXELS = 8192 * 8192
_MOST_FRAMES = 300
"""Frames of a video that are decoded."""
_checks = asyncio.Semaphore(2)
"""Files that are decoded at the same time."""
_PICTURES = (".png", ".jpg", ".gif", ".webp")
_KINDS = {
    rb"\x89PNG\r\n\x1a\n": ".png",
    rb"\xff\xd8\xff": ".jpg",
    rb"GIF8": ".gif",
    rb"RIFF.{4}WEBP": ".webp",
    rb"\x1aE\xdf\xa3": ".webm",
    rb".{4}ftyp": ".mp4",
}
"""Ending of a file by its first bytes."""
_PATH = re.compile(rf"{BEFORE_PATH}(?:~|\.\.?)?{ABSOLUTE_PATH}")
_REFERENCE = re.compile(r"reference_(\d+)_[0-9a-f]{8}\.\w+")


def without_paths(document: Any) -> Any:
    """Return a JSON value whose texts name no folder of the server: files keep their names, and uploads are counted."""
    if isinstance(document, dict):
        return {name: without_paths(each) for name, each in document.items()}
    if isinstance(document, list):
        return [without_paths(each) for each in document]
    if not isinstance(document, str):
        return document
    text = _PATH.sub(lambda match: Path(match[0]).name, document.replace("file://", ""))
    return _REFERENCE.sub(lambda match: f"reference {int(match[1]) + 1}", text)


async def keep(upload: UploadFile, folder: Path, *, number: int) -> Path:
    """Write an upload into a folder, and return its file, whose name has the number but nothing from the client.

    Raises MediaError if it is of another type, or cannot be decoded within the limits.
    """
    head = await upload.read(16)
    ending = next((each for start, each in _KINDS.items() if re.match(start, head, re.DOTALL)), None)
    if ending is None:
        raise MediaError("the reference is no PNG, JPEG, GIF, WebP, MP4 or WebM", hint="convert it to one of these")
    path = folder / f"reference_{number}_{secrets.token_hex(4)}{ending}"
    await upload.seek(0)
    with path.open("xb") as file:
        await asyncio.to_thread(shutil.copyfileobj, upload.file, file)
    async with _checks:
        await _check(path)
    return path


async def _check(path: Path) -> None:
    """Decode a file in a process of its own. Raises MediaError if that fails, or takes too much time or memory."""
    command = [*module_command("opensora_cli.server.uploads"), str(path)]
    try:
        done = await asyncio.to_thread(
            subprocess.run, command, env=safe_environment(os.environ), stderr=subprocess.PIPE, timeout=_CHECK_S
        )
    except subprocess.TimeoutExpired:
        raise MediaError(f"the reference takes over {_CHECK_S:g} s to decode") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines and done.returncode == 3 else "it takes too much memory, or is broken"
        raise MediaError(f"the reference cannot be read: {reason}")


def stand_in(kind: str, folder: Path) -> Path:
    """Return a file that a plan reads in place of a reference."""
    from PIL import Image

    path = folder / f"stand_in_{kind}.gif"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Equal frames would become one.
        frames = [Image.new("L", (64, 64), 255 * (number % 2)) for number in range(STAND_INS[kind])]
        with atomic_path(path, replace=True) as written:
            frames[0].save(written, "GIF", save_all=True, append_images=frames[1:], duration=40)
    return path


def _main(path: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_CHECK_S), int(_CHECK_S)))
    import av
    from PIL import Image

    def check(width: int, height: int) -> None:
        if width * height > _MOST_PIXELS:
            raise ValueError(f"{width}x{height} pixels are too many")

    Image.MAX_IMAGE_PIXELS = _MOST_PIXELS
    try:
        if Path(path).suffix in _PICTURES:
            with Image.open(path) as picture:
                check(*picture.size)
                picture.load()
        else:
            with av.open(path) as container:
                if not container.streams.video:
                    raise ValueError("it has no picture track")
                for frame in islice(container.decode(video=0), _MOST_FRAMES):
                    check(frame.width, frame.height)
    except (OSError, ValueError, av.FFmpegError, Image.DecompressionBombError) as error:
        print(str(error).replace(path, "the file"), file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    _main(sys.argv[1])
