"""A manifest has whole lines alone, also where the disk is full in the middle of one."""

import errno
import json
import os

import pytest

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.generate.manifest import Manifest
from opensora_cli.engine.generate.prompts import Row, Shard


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
