"""Links and pipes under the names that osora writes: the command ends at once, and their targets stay unchanged."""

import os
import sys
from pathlib import Path

import pytest
import tiny_training
import torch
from tiny_world import RecordingReporter

from opensora_cli.checkpoint.shared_folder import Share, temporary_folder, write_share
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.ranks import find_context, linked
from opensora_cli.engine.ckpt.download import recorded_digest
from opensora_cli.engine.ckpt.hub import HubFile, fetch, part_of
from opensora_cli.engine.launch.launcher import LaunchRequest, launch
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.metrics import Metrics
from opensora_cli.settings.devices import ParallelSettings

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other links, and no pipes in folders")

_FILE = HubFile(name="x", repo="a/b", commit="0" * 40, bytes=3, hash="0" * 64, hub_name="x")


def _rank_log(folder: Path) -> None:
    request = LaunchRequest(parallel=ParallelSettings(), gpus=1, device_type="cpu", log_dir=folder)
    launch(request, [], command=(sys.executable, "-c", "print('started')"))


def _log_of_this_rank(folder: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OSORA_RANK_LOG")
    values = ("0", "0", "2", "2", "127.0.0.1", "1", str(folder / "rank0.log"))
    os.environ["OSORA_RANK_CHANNEL"] = "0"  # which is not used: the log comes first
    with linked(find_context(dict(zip(names, values, strict=True)))):
        pass


def _part(folder: Path) -> None:
    fetch(_FILE, folder / "x", advance=lambda count: None)


def _checkpoint(folder: Path) -> None:
    tensors = {"model.safetensors": {"a": torch.zeros(3)}}
    share = Share(tensors=tensors, files={}, running_states={})
    write_share(share, temporary_folder(folder / "last", token="x"), folder / "last")


def _checkpoint_file(folder: Path) -> None:
    share = Share(tensors={}, files={"settings.json": b"{}"}, running_states={})
    write_share(share, temporary_folder(folder / "last", token="x"), folder / "last")


PLACES = {
    "rank0.log": _rank_log,
    "rank0.log of itself": _log_of_this_rank,
    part_of(_FILE, Path("x")).name: _part,
    ".saving-x-last/model.safetensors": _checkpoint,
    ".saving-x-last/settings.json": _checkpoint_file,
}
"""Predictable name of a file -> function that writes or reads it."""


@pytest.mark.parametrize("is_pipe", [False, True], ids=["link", "pipe"])
@pytest.mark.parametrize("name", PLACES)
def test_what_lies_under_a_name_of_osora_keeps_what_it_has(name: str, is_pipe: bool, tmp_path: Path) -> None:
    kept, path = tmp_path / "kept", tmp_path / "shared" / name.removesuffix(" of itself")
    kept.write_bytes(b"kept\n" * 100)
    path.parent.mkdir(parents=True)
    os.mkfifo(path) if is_pipe else path.symlink_to(kept)
    with pytest.raises(OutputError, match=r"cannot (write|read|start) .*: it is a (link|pipe)"):
        PLACES[name](tmp_path / "shared")
    assert kept.read_bytes() == b"kept\n" * 100
    # A failed checkpoint is removed, with links but not their targets.
    assert os.path.lexists(path) is not name.startswith(".saving")


def test_a_log_of_training_that_became_a_link_is_kept_back(tmp_path: Path) -> None:
    kept, reporter = tmp_path / "kept", RecordingReporter()
    kept.write_bytes(b"kept")
    (tmp_path / "log.jsonl").symlink_to(kept)
    settings, alone = tiny_training.vae_settings(tmp_path), Distribution(torch.device("cpu"))
    Metrics(settings, distribution=alone, output=tmp_path, reporter=reporter).on_validation(1, {"loss": 0.5})
    assert kept.read_bytes() == b"kept"
    [warning] = reporter.warnings
    assert f"cannot write {tmp_path / 'log.jsonl'}: it is a link" in warning


def test_a_record_of_a_download_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "x.metadata")
    assert recorded_digest(tmp_path, "x") is None
