"""A server in its own process, and requests to it."""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_adapters import write_lora

from opensora_cli.engine.components.few_steps import sampling_metadata
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.settings.load import usual_settings

SMALL = {"num_frames": 5, "steps": 2}
LONG_S = 120
TOKEN = "a-secret-of-letters"
BOUNDARY = "a-boundary"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Served:
    """A running `osora serve`; `start` starts it again on the same folder."""

    def __init__(self, folder: Path, *options: str, save_every: float = 0.2, **environment: str):
        self.folder, self.port = folder, free_port()
        self.options, self.environment = ("--save-every", str(save_every), *options), {**os.environ, **environment}
        self.log = folder.with_suffix(".log")
        self.start()

    def start(self):
        words = ["serve", "--model", "demo", "--port", str(self.port), "--folder", str(self.folder), *self.options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "opensora_cli", *words], stdout=log, stderr=log, env=self.environment
            )
        limit = time.monotonic() + LONG_S
        while time.monotonic() < limit:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.call("GET", "/healthz")
            except OSError:
                time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        children = self.children() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for child in children:
            child.kill()

    def children(self):
        return psutil.Process(self.process.pid).children()

    def request(self, method, path, body=None, **headers):
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        for name, value in {"content-type": "application/json", **headers}.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=LONG_S) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def call(self, method, path, body=None, **headers):
        status, _, text = self.request(method, path, body, **headers)
        assert status == 200, text
        return json.loads(text)

    def error(self, method, path, body=None, **headers):
        status, _, text = self.request(method, path, body, **headers)
        return status, json.loads(text)["error"]

    def make(self, prompt="raining, sea", **values):
        return self.call("POST", "/v1/videos", {"prompt": prompt, "settings": SMALL, **values})["id"]

    def make_broken(self):
        """Queue a video whose reference is then damaged; another one must be running."""
        body, kind = form(prompt="a boat", settings=json.dumps(SMALL), input_reference=picture(200, 100))
        video_id = self.call("POST", "/v1/videos", body, content_type=kind)["id"]
        for path in (self.folder / "jobs" / video_id).glob("reference_*"):
            path.write_bytes(b"broken")
        return video_id

    def until(self, video_id, condition):
        limit = time.monotonic() + LONG_S
        while time.monotonic() < limit:
            video = self.call("GET", f"/v1/videos/{video_id}")
            if condition(video):
                return video
            time.sleep(0.05)
        raise AssertionError(video)

    def finished(self, video_id):
        return self.until(video_id, lambda video: video["status"] in ("completed", "failed", "cancelled"))

    def result(self, video_id):
        return (self.folder / "jobs" / video_id / "video.mp4").read_bytes()


def form(**parts):
    """Return the body and headers of a form; a part of bytes is a file."""
    lines = []
    for name, value in parts.items():
        is_file = isinstance(value, bytes)
        file = '; filename="../../upload.png"' if is_file else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        lines.append(head + (value if is_file else value.encode()) + b"\r\n")
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={BOUNDARY}"


def picture(width, height, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, kind)
    return file.getvalue()


def turbo_weights(folder):
    """Write the demo's transformer with a few-step adapter of 3 steps, and return the folder."""
    from opensora_cli.engine.components.architectures import transformer_on_meta

    folder.mkdir()
    shutil.copy(packaged_demo() / "transformer.safetensors", folder)
    write_lora(folder / "turbo", transformer_on_meta(usual_settings("demo").model), like=r"single_blocks\.0\.linear2")
    file = folder / "turbo" / "adapter_model.safetensors"
    sampling = {"num_inference_steps": 3, "guidance_scale": 1.0}
    save_file(load_file(file), file, metadata=sampling_metadata("demo", sampling))
    return folder


def is_running(video):
    return video["status"] == "in_progress" and video["stage"].get("stage") == "denoise" and video["stage"]["done"] > 0
