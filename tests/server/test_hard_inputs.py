"""Requests, clients and machines that a server must survive."""

import asyncio
import json
import socket
import struct
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from urllib.parse import quote

import psutil
import pytest
from served import BOUNDARY, SMALL, form, picture

from opensora_cli.core.exceptions import MediaError
from opensora_cli.server.uploads import _check

GIB = 2**30
MULTIPART = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"


@pytest.fixture(autouse=True, scope="module")
def warm(served):
    """Make a video first, for which the server starts a process that stays."""
    served.finished(served.make())


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    """Check that the server keeps no file, connection or memory of what it refused, and reports no bug."""
    process = psutil.Process(served.process.pid)

    def files():
        return {path for folder in (served.folder / "jobs", served.folder.parent / "tmp") for path in folder.iterdir()}

    before, memory = files(), process.memory_info().rss
    descriptors = process.num_fds()
    yield
    limit = time.monotonic() + 30
    while process.num_fds() > descriptors or not files() <= before:
        assert time.monotonic() < limit, (process.num_fds(), files() - before)
        time.sleep(0.05)
    assert process.memory_info().rss < memory + 48 * 2**20
    assert "Traceback" not in served.log.read_text()


def opened(served, text=""):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    connection.sendall(text.replace("HOST", f"Host: 127.0.0.1:{served.port}\r\n").encode())
    return connection


def upload(served, content, name="boat.png"):
    body, kind = form(prompt="a boat", settings=json.dumps(SMALL), input_reference=content)
    return served.error("POST", "/v1/videos", body.replace(b"../../upload.png", name.encode()), content_type=kind)


@pytest.mark.slow
def test_a_large_upload_without_a_length_is_refused_while_it_streams(served):
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="input_reference"; filename="a.png"\r\n\r\n'.encode()
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    sent, answer = 0, b""
    with opened(served, f"POST /v1/videos HTTP/1.1\r\nHOST{MULTIPART}Transfer-Encoding: chunked\r\n\r\n") as connection:
        connection.sendall(f"{len(head):x}\r\n".encode() + head + b"\r\n")
        with suppress(OSError):
            while sent < 5 * GIB:
                connection.sendall(chunk)
                sent += 2**20
        with suppress(OSError):  # the answer may be lost when the server closes while the client sends
            answer = connection.recv(4096)
    assert sent < 0.6 * GIB
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")


def png_bomb():
    packer = zlib.compressobj()
    row = bytes(1 + 50_000 // 8)
    pixels = b"".join(packer.compress(row * 1000) for _ in range(50)) + packer.flush()

    def block(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", pixels) + block(b"IEND", b"")


def test_a_picture_bomb_is_refused(served):
    content = png_bomb()
    assert len(content) < 2**20
    started = time.monotonic()
    status, error = upload(served, content)
    assert (status, error["code"]) == (400, "media_error")
    assert "pixels" in error["message"]
    assert time.monotonic() - started < 20


def test_a_file_that_takes_long_to_decode_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("opensora_cli.server.uploads._CHECK_S", 0.01)
    (tmp_path / "a.png").write_bytes(picture(64, 64))
    with pytest.raises(MediaError, match=r"over 0.01 s"):
        asyncio.run(_check(tmp_path / "a.png"))


def test_the_process_that_decodes_has_limits(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(picture(64, 64))
    code = (
        "import resource, sys\n"
        "from opensora_cli.server import uploads\n"
        f"uploads._main({str(file)!r})\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[0] <= 4 * 2**30\n"
        "assert resource.getrlimit(resource.RLIMIT_CPU)[0] <= 60\n"
        "bytearray(5 * 2**30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("MemoryError")


@pytest.mark.parametrize("name", ["..", "../../etc/passwd", "%2e%2e", ".\x00", "jobs.sqlite", "video_", "' OR 1=1 --"])
def test_ids_never_become_paths(served, name):
    for path in (name, quote(name, safe="")):
        for method, end in (("GET", ""), ("GET", "/content"), ("GET", "/preview"), ("DELETE", ""), ("POST", "/cancel")):
            with opened(
                served, f"{method} /v1/videos/{quote(path, safe='/%.')}{end} HTTP/1.1\r\nHOST\r\n"
            ) as connection:
                assert connection.recv(4096)[9:12] in (b"404", b"405"), (method, path, end)
    assert (served.folder / "jobs.sqlite").exists()


def test_clients_that_vanish_in_an_upload_or_an_event_stream_leave_nothing(served):
    body, _ = form(prompt="a boat", input_reference=picture(200, 100))
    head = f"POST /v1/videos HTTP/1.1\r\nHOST{MULTIPART}Content-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with opened(served, head) as connection:
            connection.sendall(body[: len(body) // 2])
    for path in ("/v1/events", "/v1/events", "/v1/videos"):
        connections = [opened(served, f"GET {path} HTTP/1.1\r\nHOST\r\n") for _ in range(20)]
        for connection in connections[::2]:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        for connection in connections:
            connection.close()
    video_id = served.make()
    assert served.finished(video_id)["status"] == "completed"
    served.call("DELETE", f"/v1/videos/{video_id}")


def test_slow_clients_keep_nobody_from_an_answer(served):
    body, _ = form(prompt="a boat", input_reference=picture(200, 100))
    texts = (
        "",
        "GET /v1/videos HT",
        f"POST /v1/videos HTTP/1.1\r\nHOST{MULTIPART}Content-Length: {len(body)}\r\n\r\n--",
        "GET /v1/events HTTP/1.1\r\nHOST\r\n",
        "GET /page.js HTTP/1.1\r\nHOST\r\n" * 50,  # answers that nobody reads
    )
    connections = [opened(served, text) for text in texts for _ in range(40)]
    video_id = served.make()
    assert served.finished(video_id)["status"] == "completed"
    for _ in range(20):
        served.call("GET", "/healthz")
    for connection in connections:
        connection.close()
    served.call("DELETE", f"/v1/videos/{video_id}")
