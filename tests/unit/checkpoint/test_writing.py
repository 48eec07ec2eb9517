"""A checkpoint is written as a whole or not at all, without being held in memory."""

import errno
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import killing
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.checkpoint.views import CastEntry
from opensora_cli.checkpoint.writing import check_target, write_checkpoint
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError

MIB = 2**20
FILES = [Format.SAFETENSORS, Format.TORCH]
FOLDERS = [Format.SAFETENSORS_SHARDS, Format.TORCH_SHARDS, Format.COLOSSALAI, Format.DCP]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    made = {f"blocks.{index}.weight": torch.rand(40, index + 1, generator=generator) for index in range(6)}
    return made | {"steps": torch.tensor(7), "half": torch.rand(5, generator=generator).bfloat16()}


def entries_of(tensors):
    return {name: HeldEntry(tensor) for name, tensor in tensors.items()}


def hash_each(files):
    return [sha256_of(file) for file in files]


def write(tensors, path, format, **options):
    return write_checkpoint(entries_of(tensors), path, format=format, **({"shard_bytes": 1000} | options))


@pytest.mark.parametrize("format", FILES + FOLDERS)
class TestEveryFormat:
    def test_it_is_read_again_bit_for_bit(self, tmp_path, tensors, format):
        advanced = []
        files = write(tensors, tmp_path / "new" / "a", format, advance=advanced.append)
        assert sum(advanced) == sum(tensor.nbytes for tensor in tensors.values())
        opened = open_checkpoint(tmp_path / "new" / "a")
        assert opened.format is format
        assert opened.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            read = opened.entries[name].read()
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read, tensor)
        assert sorted(files) == sorted(path for path in (tmp_path / "new").rglob("*") if path.is_file())

    def test_what_exists_is_replaced_only_when_asked(self, tmp_path, tensors, format):
        write(tensors, tmp_path / "a", format)
        before = killing.tree(tmp_path)
        with pytest.raises(OutputError, match="a exists already"):
            write({"other": torch.ones(3)}, tmp_path / "a", format)
        assert killing.tree(tmp_path) == before
        write({"other": torch.ones(3)}, tmp_path / "a", format, overwrite=True)
        assert list(open_checkpoint(tmp_path / "a").entries) == ["other"]
        assert os.listdir(tmp_path) == ["a"]

    def test_its_own_source_can_be_replaced(self, tmp_path, tensors, format):
        write(tensors, tmp_path / "a", format)
        entries = open_checkpoint(tmp_path / "a").entries
        write_checkpoint(entries, tmp_path / "a", format=format, overwrite=True)
        entries = open_checkpoint(tmp_path / "a").entries
        assert all(torch.equal(entries[name].read(), tensor) for name, tensor in tensors.items())

    def test_a_broken_source_leaves_nothing(self, tmp_path, tensors, format):
        save_file({"a": torch.ones(100_000)}, tmp_path / "source")
        entries, _ = open_safetensors(tmp_path / "source")
        os.truncate(tmp_path / "source", 1000)
        with pytest.raises(CheckpointError, match="has become shorter"):
            write_checkpoint({**entries_of(tensors), **entries}, tmp_path / "a", format=format)
        assert os.listdir(tmp_path) == ["source"]


def test_metadata_and_hashes_are_written(tmp_path, tensors):
    write(tensors, tmp_path / "a", Format.SAFETENSORS_SHARDS, metadata={"source": "a test"}, hash_each=hash_each)
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert index["metadata"]["source"] == "a test"
    assert index["metadata"]["sha256"].keys() == set(os.listdir(tmp_path / "a")) - {INDEX}
    for format in (Format.SAFETENSORS, Format.TORCH, Format.TORCH_SHARDS):
        write(tensors, tmp_path / format, format, metadata={"source": "a test"})
        assert open_checkpoint(tmp_path / format).metadata["source"] == "a test"


class TestRefusals:
    def test_a_training_is_not_written(self, tmp_path, tensors):
        with pytest.raises(RequestError, match="training"):
            write(tensors, tmp_path / "a", Format.TRAINING)

    @pytest.mark.parametrize(("format", "kind"), [(Format.DCP, "file"), (Format.TORCH, "folder")])
    def test_a_file_in_place_of_a_folder_is_refused_and_the_other_way_round(self, tmp_path, tensors, format, kind):
        if kind == "file":
            (tmp_path / "a").write_text("kept")
        else:
            (tmp_path / "a").mkdir()
        with pytest.raises(OutputError, match=f"is a {kind}"):
            write(tensors, tmp_path / "a", format, overwrite=True)

    @pytest.mark.parametrize(
        "name",
        [
            *("config.json", "Open_Sora_v2.safetensors", "model-my-of-backup.safetensors"),
            *("optimizer/pytorch_optim-00001.bin", "model/model.safetensors.index.json", "empty/"),
            *("pytorch_model.bin.index.json", ".metadata", "model-00009-of-00009.safetensors/"),
        ],
    )
    def test_a_folder_with_more_than_a_checkpoint_is_not_replaced(self, tmp_path, tensors, name):
        write(tensors, tmp_path / "a", Format.SAFETENSORS_SHARDS)
        if name.endswith("/"):
            (tmp_path / "a" / name).mkdir()
        else:
            (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "a" / name).write_text("precious")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OutputError, match=f"would be lost: {name.split('/')[0]}"):
            write(tensors, tmp_path / "a", Format.SAFETENSORS_SHARDS, overwrite=True)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("format", FOLDERS)
    def test_a_folder_of_checkpoints_is_not_replaced(self, tmp_path, tensors, format):
        for each in FOLDERS:
            write(tensors, tmp_path / "all" / each, each)
        write(tensors, tmp_path / "all" / "epoch0" / "model", Format.SAFETENSORS_SHARDS)
        before = killing.tree(tmp_path)
        for folder in (tmp_path / "all", tmp_path / "all" / "epoch0"):
            if (folder.name, format) != ("epoch0", Format.COLOSSALAI):  # which that folder is, and nothing else
                with pytest.raises(OutputError, match="would be lost: "):
                    write(tensors, folder, format, overwrite=True)
        assert killing.tree(tmp_path) == before

    @pytest.mark.parametrize("format", FOLDERS)
    def test_a_checkpoint_of_another_format_is_not_replaced(self, tmp_path, tensors, format):
        write(tensors, tmp_path / "a", format)
        for other in FOLDERS:
            if other is not format:
                with pytest.raises(OutputError, match=f"more than a checkpoint of {other}"):
                    write(tensors, tmp_path / "a", other, overwrite=True)
        assert open_checkpoint(tmp_path / "a").format is format

    @pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.DCP])
    @pytest.mark.parametrize("overwrite", [True, False])
    def test_what_is_neither_file_nor_folder_is_left_alone(self, tmp_path, tensors, format, overwrite):
        os.mkfifo(tmp_path / "a")
        with pytest.raises(OutputError, match="a is neither a file nor a folder"):
            write(tensors, tmp_path / "a", format, overwrite=overwrite)
        assert (tmp_path / "a").is_fifo()
        assert os.listdir(tmp_path) == ["a"]

    @pytest.mark.parametrize("format", FILES + FOLDERS)
    def test_what_appears_while_it_is_written_is_kept(self, tmp_path, tensors, format):
        """As another run may have it that was started with the same name."""

        def appear(_):
            if format in FILES:
                (tmp_path / "a").write_text("precious")
            else:
                (tmp_path / "a").mkdir(exist_ok=True)
                (tmp_path / "a" / "thesis.txt").write_text("precious")

        with pytest.raises(OutputError, match="a exists already") as caught:
            write(tensors, tmp_path / "a", format, advance=appear)
        assert caught.value.hint is not None
        assert os.listdir(tmp_path) == ["a"]
        kept = tmp_path / "a" if format in FILES else tmp_path / "a" / "thesis.txt"
        assert kept.read_text() == "precious"

    @pytest.mark.parametrize("format", FOLDERS)
    def test_what_appears_in_a_folder_that_may_be_replaced_is_kept(self, tmp_path, tensors, format):
        write(tensors, tmp_path / "a", format)
        notes = tmp_path / "a" / "notes.txt"
        with pytest.raises(OutputError, match=r"would be lost: notes\.txt"):
            write(tensors, tmp_path / "a", format, overwrite=True, advance=lambda _: notes.write_text("precious"))
        assert notes.read_text() == "precious"
        notes.unlink()
        assert open_checkpoint(tmp_path / "a").entries.keys() == tensors.keys()

    def test_an_empty_folder_is_filled(self, tmp_path, tensors):
        (tmp_path / "a").mkdir()
        write(tensors, tmp_path / "a", Format.SAFETENSORS_SHARDS)
        assert open_checkpoint(tmp_path / "a").entries.keys() == tensors.keys()

    def test_a_file_in_place_of_the_parent_folder_is_refused(self, tmp_path, tensors):
        (tmp_path / "a").write_text("kept")
        with pytest.raises(OutputError, match=r"cannot write .*: .*a is not a folder"):
            write(tensors, tmp_path / "a" / "b", Format.SAFETENSORS)

    @pytest.mark.parametrize("format", FILES + FOLDERS)
    @pytest.mark.parametrize("name", ["a", "new/folder/a"])
    def test_a_folder_without_write_permission_is_refused(self, tmp_path, tensors, monkeypatch, format, name):
        # Root, whom tests may run as, may write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("it was about to be written"))
        with pytest.raises(OutputError, match=r"cannot write .*: nothing may be written to") as caught:
            check_target(tmp_path / name, format=format, needed=0, overwrite=False)
        assert caught.value.hint == "choose a folder that you may write to"


class TestFullDisk:
    def test_it_is_refused_before_anything_is_written(self, tmp_path):
        huge = CastEntry(HeldEntry(torch.zeros(1).expand(2**60)), torch.float32, name="x")
        with pytest.raises(OutputError, match=r"a needs 4611686.0 TB, and its disk has ") as caught:
            write_checkpoint({"a": huge}, tmp_path / "a", format=Format.SAFETENSORS)
        assert caught.value.hint is not None
        assert os.listdir(tmp_path) == []

    def test_a_disk_of_unknown_size_is_written(self, tmp_path, tensors, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
        write(tensors, tmp_path / "a", Format.SAFETENSORS)
        assert open_checkpoint(tmp_path / "a").entries.keys() == tensors.keys()

    @pytest.mark.parametrize("format", FILES + FOLDERS)
    def test_a_disk_that_fills_half_way_keeps_the_old_checkpoint(self, tmp_path, tensors, format):
        """The limit on the size of files stands for the end of the disk: the system refuses to write beyond it."""
        write(tensors, tmp_path / "a", format)
        before = killing.tree(tmp_path)
        larger = {"big": torch.zeros(MIB)}
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, old[1]))
        try:
            with pytest.raises(OutputError, match=r"cannot write .*: File too large") as caught:
                write(larger, tmp_path / "a", format, overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert caught.value.hint == "make room there, or write to another disk"
        assert killing.tree(tmp_path) == before
        assert os.listdir(tmp_path) == ["a"]

    @pytest.mark.parametrize("format", [Format.SAFETENSORS, Format.SAFETENSORS_SHARDS])
    def test_a_full_disk_leaves_nothing(self, tmp_path, tensors, format, monkeypatch):
        write_bytes = os.write
        calls = []

        def fill(descriptor, content):
            calls.append(len(content))
            if len(calls) > 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write_bytes(descriptor, content)

        monkeypatch.setattr(os, "write", fill)
        with pytest.raises(OutputError, match=r"cannot write .*a: No space left on device"):
            write(tensors, tmp_path / "a", format)
        assert os.listdir(tmp_path) == []


KILLED = """
import json, os, shutil, sys
from pathlib import Path
import torch
import killing
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.checkpoint.writing import write_checkpoint

folder, stride, formats = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.fsync = lambda _: None  # a killed process loses nothing that it wrote

def hash_each(files):
    return [sha256_of(file) for file in files]

def entries(value):
    return {f"layer.{index}": HeldEntry(torch.full((50, 10), value + index)) for index in range(3)}

def write(entries, path, format):
    # What must not be replaced comes to its name in another way.
    overwrite = path.exists()
    write_checkpoint(entries, path, format=format, shard_bytes=2500, hash_each=hash_each, overwrite=overwrite)

write(entries(2.0), folder / "source", Format.SAFETENSORS_SHARDS)
source = open_checkpoint(folder / "source").entries

def outcomes(format, *, over):
    before, work = folder / f"{format} {over}", folder / "work"
    before.mkdir()
    if over == "old":
        write(entries(1.0), before / "a", format)
    target = work / "a"
    found = []

    def prepare():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(before, work)

    def check():
        now = killing.tree(target)
        found.append(next((name for name, state in states.items() if state == now), "broken"))
        if found[-1] in ("old", "new"):
            read = {name: entry.read() for name, entry in open_checkpoint(target).entries.items()}
            expected = entries({"old": 1.0, "new": 2.0}[found[-1]])
            assert read.keys() == expected.keys()
            assert all(torch.equal(read[name], entry.read()) for name, entry in expected.items())
        others = [path.name for path in work.iterdir() if path != target]
        assert all(name.startswith(".osora-") and name.endswith(".tmp") for name in others), others

    prepare()
    states = {over: killing.tree(target)}
    write(source, target, format)
    states["new"] = killing.tree(target)
    assert states["new"] != states[over]
    killing.kill_at_every_step(prepare, lambda: write(source, target, format), check, stride=stride)
    return found

cases = [(each, over) for each in formats for over in ("old", "nothing")]
print(json.dumps({f"{each} over {over}": outcomes(Format(each), over=over) for each, over in cases}))
"""


def check_kills(folder, formats, *, stride):
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", KILLED, str(folder), str(stride), *formats]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print({what: len(found) for what, found in report.items()})
    assert len(report) == 2 * len(formats)
    for what, found in report.items():
        before = what.split(" over ")[1]
        # First what was there before, from one step on the new, and nothing else at any time.
        assert found == [before] * found.count(before) + ["new"] * found.count("new"), what
        assert found.count(before) > 5 / stride, what
        assert found.count("new") >= 1, what


class TestKilled:
    def test_at_some_steps_of_a_save(self, tmp_path):
        check_kills(tmp_path, FILES + FOLDERS, stride=7)

    @pytest.mark.slow
    def test_at_every_step_of_a_save(self, tmp_path):
        check_kills(tmp_path, FILES + FOLDERS, stride=1)


LIMITED = """
import os, resource, sys
from pathlib import Path
import torch
from opensora_cli.checkpoint.views import CastEntry
from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shards import sha256_of
from opensora_cli.checkpoint.writing import write_checkpoint

source, target, spare = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
entries = open_checkpoint(source).entries
total = sum(entry.nbytes for entry in entries.values())
largest = max(entry.nbytes for entry in entries.values())
os.fsync = lambda _: None  # what is removed at once need not reach the disk
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = used + 2 * largest + spare
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

def write(entries, format):
    files = write_checkpoint(
        entries,
        target,
        format=format,
        shard_bytes=total // 3,
        hash_each=lambda files: [sha256_of(file) for file in files],
        overwrite=True,
    )
    written = sum(file.stat().st_size for file in files)
    print(format, written / total, flush=True)
    return written

for format in map(Format, sys.argv[4:]):
    assert write(entries, format) >= total
    for file in sorted(target.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    target.rmdir() if target.is_dir() else target.unlink()
small = {k: CastEntry(e, torch.bfloat16, name=k) for k, e in entries.items()}
assert total // 2 <= write(small, Format.SAFETENSORS) < total

try:
    held = [entry.read() for entry in entries.values()]
except (MemoryError, RuntimeError):
    print("the limit is there")
"""


def sparse_file(path, *, tensors, numel):
    """Make a safetensors file of zeros that take no room on the disk."""
    size = 4 * numel
    header = {
        f"layer.{index}": {"dtype": "F32", "shape": [numel], "data_offsets": [index * size, (index + 1) * size]}
        for index in range(tensors)
    }
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    os.truncate(path, 8 + len(content) + tensors * size)


def check_memory(source, target, *, spare, formats):
    command = [sys.executable, "-c", LIMITED, str(source), str(target), str(spare), *formats]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The last word is the proof that holding the tensors would have been noticed.
    assert done.stdout.endswith("the limit is there\n"), done.stdout


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmData is read from Linux's /proc")
class TestMemory:
    def test_a_checkpoint_of_several_times_the_limit(self, tmp_path):
        """Stricter than the promise of twice the largest tensor and 256 MB, so that a smaller file proves it."""
        sparse_file(tmp_path / "source", tensors=24, numel=MIB)
        formats = [Format.SAFETENSORS_SHARDS, Format.TORCH]
        check_memory(tmp_path / "source", tmp_path / "a", spare=32 * MIB, formats=formats)

    @pytest.mark.slow
    def test_four_gigabytes(self, tmp_path):
        sparse_file(tmp_path / "source", tensors=64, numel=16 * MIB)
        rng = np.random.default_rng(0)
        with (tmp_path / "source").open("r+b") as file:
            file.seek(-(2**32), os.SEEK_END)
            for _ in range(4096):
                file.write(rng.standard_normal(2**14, dtype=np.float32).tobytes() * 16)
        formats = [Format.SAFETENSORS_SHARDS, Format.TORCH, Format.DCP]
        check_memory(tmp_path / "source", tmp_path / "a", spare=256 * MIB, formats=formats)
