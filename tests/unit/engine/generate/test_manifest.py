"""A manifest has whole lines alone, also where the disk is full in the middle of one."""

import errno
import json
import os

import pytest

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.generate.manifest import Manifest
from opensora_cli.engine.generate.prompts import Row, Shard


@pytest.mark.parametrize("outputs", [["../sea.mp4"], ["sea.mp4", "../sea.mp4"], ["/proc/version"], ["a\0b"], []])
def test_files_outside_the_folder_are_no_results(tmp_path, outputs):
    (tmp_path / "sea.mp4").write_bytes(b"video")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "sea.mp4").write_bytes(b"video")
    line = {"row": 1, "key": "first", "prompt": "sea", "status": "done"}
    listed = [{"path": path, "seed": 1, "bytes": 0 if path == "/proc/version" else 5} for path in outputs]
    (folder / "manifest.jsonl").write_text(json.dumps(line | {"outputs": listed}) + "\n")
    with Manifest(folder, Shard()) as manifest:
        assert manifest.finished("first") is None


def test_a_line_that_cannot_be_written_whole_is_taken_back(tmp_path, monkeypatch):
    write = os.write

    def full(fd, content):
        if len(content) < 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content[: len(content) // 2])

    row = Row(1, {"prompt": "raining, sea"})
    (tmp_path / "sea.mp4").write_bytes(b"video")
    with Manifest(tmp_path, Shard()) as manifest:
        manifest.add_failed(row, "first", "a reference is missing")
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(OutputError, match="No space left"):
                manifest.add_failed(row, "second", "a reference is missing")
        manifest.add_done(row, "third", [tmp_path / "sea.mp4"], seeds=[42], seconds=1.0)
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["first", "third"]
    with Manifest(tmp_path, Shard()) as manifest:
        assert manifest.finished("third") == [tmp_path / "sea.mp4"]
