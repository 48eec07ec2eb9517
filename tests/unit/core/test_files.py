"""A file that osora writes is whole or not there."""

import errno
import json
import os
from pathlib import Path

import pytest

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import atomic_folder, atomic_path, write_bytes_atomic, write_json_atomic


def test_the_content_arrives_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / "new" / "folder" / "a.bin", b"content")
    assert (tmp_path / "new" / "folder" / "a.bin").read_bytes() == b"content"
    assert os.listdir(tmp_path / "new" / "folder") == ["a.bin"]


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_a_failing_block_leaves_the_old_file(tmp_path: Path, interruption: type[BaseException]) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def write_half() -> None:
        with atomic_path(target) as temporary:
            temporary.write_bytes(b"ne")
            raise interruption

    with pytest.raises(interruption):
        write_half()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_the_file_is_flushed_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.bin"
    there_when_flushed: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: there_when_flushed.append(target.exists()))
    write_bytes_atomic(target, b"content")
    assert there_when_flushed == [False, True]  # the file, then its folder


def test_a_full_disk_is_one_line_with_path_and_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError) as caught:
        write_bytes_atomic(tmp_path / "a.bin", b"content")
    assert caught.value.message == f"cannot write {tmp_path / 'a.bin'}: No space left on device"
    assert caught.value.hint is not None
    assert os.listdir(tmp_path) == []


def test_a_file_in_place_of_a_folder_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file")
    with pytest.raises(OutputError, match="samples"):
        write_bytes_atomic(tmp_path / "samples" / "a.bin", b"content")


def test_a_name_as_long_as_the_file_system_allows_can_be_written(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / ("n" * 255), b"content")
    assert os.listdir(tmp_path) == ["n" * 255]


def test_json_keeps_every_language_and_undecodable_arguments(tmp_path: Path) -> None:
    document = {"prompt": 'Regen, Meer "雨" 🌊\n', "argument": "caf\udce9", "seed": 42}
    write_json_atomic(tmp_path / "a.json", document)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == document
    assert "雨" in text


def test_json_refuses_numbers_that_are_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "a.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_folder_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_folder(tmp_path / "frames") as temporary:
            (temporary / f"{content}.txt").write_text(content)
    assert os.listdir(tmp_path) == ["frames"]
    assert os.listdir(tmp_path / "frames") == ["second.txt"]


def test_a_failing_block_leaves_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "old.txt").write_text("old")

    def write_half() -> None:
        with atomic_folder(tmp_path / "frames") as temporary:
            (temporary / "new.txt").write_text("new")
            raise OSError(errno.EIO, "broken disk")

    with pytest.raises(OutputError, match="broken disk"):
        write_half()
    assert os.listdir(tmp_path) == ["frames"]
    assert os.listdir(tmp_path / "frames") == ["old.txt"]
