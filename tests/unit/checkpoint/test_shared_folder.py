"""A checkpoint folder that several processes write: here threads."""

import errno
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opensora_cli.checkpoint import shared_folder
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.shared_folder import (
    Share,
    recorded_hashes,
    remove_unfinished,
    temporary_folder,
    write_share,
    wrong_files,
)
from opensora_cli.core.exceptions import CheckpointError, OutputError

NAME = "epoch0-global_step1"


def tensors(count: int = 5) -> dict[str, Tensor]:
    made = {f"w{number}": torch.full((number + 1, 3), float(number)) for number in range(count)}
    return {**made, "half": torch.ones(3, dtype=torch.float16), "empty": torch.zeros(0, 2), "scalar": torch.tensor(7)}


def share_of(process: int, processes: int, *, files: Mapping[str, bytes] | None = None, count: int = 5) -> Share:
    """Every process has every n-th tensor."""
    own = {
        name: tensor if number % processes == process else tensor.to("meta")
        for number, (name, tensor) in enumerate(tensors(count).items())
    }
    return Share(
        tensors={"ema.safetensors": own, "model": own},
        files=files if files is not None else {f"random/rank{process}.pt": bytes([process])},
        running_states={"global_step": 1},
        process=process,
        processes=processes,
    )


def write_all(folder: Path, shares: list[Share]) -> list[BaseException]:
    target, errors = folder / NAME, []

    def run(share: Share) -> None:
        try:
            write_share(share, temporary_folder(target, token="ab"), target)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[share], daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_all_shares_make_one_checkpoint(tmp_path: Path, processes: int) -> None:
    assert write_all(tmp_path, [share_of(process, processes) for process in range(processes)]) == []
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    for name in ("ema.safetensors", "model/model-00001-of-00001.safetensors"):
        entries, _ = open_safetensors(tmp_path / NAME / name)
        found = {key: entry.read() for key, entry in entries.items()}
        assert found.keys() == tensors().keys()
        for key, tensor in tensors().items():
            assert torch.equal(found[key], tensor)
            assert found[key].dtype == tensor.dtype
    assert [(tmp_path / NAME / f"random/rank{process}.pt").read_bytes() for process in range(processes)] == [
        bytes([process]) for process in range(processes)
    ]
    hashes = recorded_hashes(tmp_path / NAME)
    assert len(hashes) == 3 + processes
    assert wrong_files(tmp_path / NAME) == []
    index = json.loads((tmp_path / NAME / "model/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors().keys()
    (shard,) = index["metadata"]["sha256"]
    assert index["metadata"]["sha256"][shard] == hashes[tmp_path / NAME / "model" / shard]
    assert json.loads((tmp_path / NAME / "running_states.json").read_text())["global_step"] == 1


def test_the_same_bytes_whoever_writes_them(tmp_path: Path) -> None:
    for processes in (1, 3):
        shares = [share_of(process, processes, files={}) for process in range(processes)]
        assert write_all(tmp_path / str(processes), shares) == []
    contents = [
        {
            str(path.relative_to(tmp_path / each)): path.read_bytes()
            for path in (tmp_path / each).rglob("*.*")
            if path.is_file()
        }
        for each in ("1", "3")
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4


def test_an_older_one_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    assert write_all(tmp_path, [share_of(0, 1, count=2)]) == []
    assert write_all(tmp_path, [share_of(0, 1)]) == []
    assert "w4" in open_safetensors(tmp_path / NAME / "ema.safetensors")[0]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_ends_all(tmp_path: Path, failing: int) -> None:
    shares = [share_of(process, 2) for process in range(2)]
    # Its folder is a file of another one's.
    shares[failing] = share_of(failing, 2, files={"ema.safetensors/x": b""})
    errors = write_all(tmp_path, shares)
    assert len(errors) == 2
    assert all(isinstance(error, OutputError) for error in errors)
    assert not (tmp_path / NAME).exists()
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_one_whose_disk_is_full_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_file, write_flag = shared_folder._write_bytes, shared_folder.write_bytes_atomic

    def file_on_full_disk(path: Path, content: bytes) -> None:
        if path.name == f"rank{failing}.pt":
            raise full
        write_file(path, content)

    def flag_on_full_disk(path: Path, content: bytes) -> None:
        # There is room for an empty file, and for no reason in it.
        if path.name.endswith(f"-{failing}") and content:
            raise OutputError(f"cannot write {path}: {full.strerror}")
        write_flag(path, content)

    monkeypatch.setattr(shared_folder, "_write_bytes", file_on_full_disk)
    monkeypatch.setattr(shared_folder, "write_bytes_atomic", flag_on_full_disk)
    reported = {str(error) for error in write_all(tmp_path, [share_of(process, 2) for process in range(2)])}
    assert reported == {
        f"cannot write {tmp_path / NAME}: No space left on device",
        f"rank {failing}: cannot write its part, nor why: is the disk full?",
    }


def test_what_is_wrong_is_found_by_every_share_of_the_work(tmp_path: Path) -> None:
    assert write_all(tmp_path, [share_of(0, 1)]) == []
    folder = tmp_path / NAME
    (folder / "ema.safetensors").write_bytes(b"?")
    (folder / "random/rank0.pt").unlink()
    assert len(wrong_files(folder)) == 2
    assert sorted(wrong_files(folder, share=(0, 2)) + wrong_files(folder, share=(1, 2))) == sorted(wrong_files(folder))


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"sha256": 3}', b'{"sha256": {"../x": "ab"}}'])
def test_hashes_that_are_broken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "running_states.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        recorded_hashes(tmp_path)
