"""A checkpoint is written as a whole or not at all, without being held in memory."""

import os
import resource
import signal

import killing
import pytest
import torch
from safetensors.torch import save_file
from tiny_weights import awkward_state, bit_equal, held, read

from opensora_cli.checkpoint.files import check_target
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.writing import write_checkpoint, write_weights
from opensora_cli.core.choices import Format
from opensora_cli.core.exceptions import CheckpointError, OutputError

MIB = 2**20
FILES = [Format.SAFETENSORS, Format.TORCH]
FOLDERS = [Format.SAFETENSORS_SHARDS, Format.COLOSSALAI, Format.DCP]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors():
    return awkward_state()


def write(tensors, path, format, **options):
    check_target(path, format=format, overwrite=options.get("overwrite", False))
    return write_checkpoint(held(tensors), path, format=format, **({"shard_bytes": 1000} | options))


@pytest.mark.parametrize("format", FILES + FOLDERS)
class TestEveryFormat:
    def test_it_is_read_again_bit_for_bit(self, tmp_path, tensors, format):
        advanced = []
        files = write(tensors, tmp_path / "new" / "a", format, advance=advanced.append)
        assert sum(advanced) == sum(tensor.nbytes for tensor in tensors.values())
        opened = open_checkpoint(tmp_path / "new" / "a")
        assert opened.format is format
        assert bit_equal(read(opened.entries), tensors)
        assert sorted(files) == sorted(path for path in (tmp_path / "new").rglob("*") if path.is_file())

    def test_what_exists_is_replaced_only_when_asked(self, tmp_path, tensors, format):
        write(tensors, tmp_path / "a", format)
        before = killing.tree(tmp_path)
        with pytest.raises(OutputError, match="a exists already"):
            write({"other": torch.ones(3)}, tmp_path / "a", format)
        assert killing.tree(tmp_path) == before
        if format in FOLDERS:
            with pytest.raises(OutputError, match="a exists already"):
                write({"other": torch.ones(3)}, tmp_path / "a", format, overwrite=True)
        else:
            write({"other": torch.ones(3)}, tmp_path / "a", format, overwrite=True)
            assert list(open_checkpoint(tmp_path / "a").entries) == ["other"]
        assert os.listdir(tmp_path) == ["a"]

    def test_a_broken_source_leaves_nothing(self, tmp_path, tensors, format):
        save_file({"a": torch.ones(100_000)}, tmp_path / "source")
        entries, _ = open_safetensors(tmp_path / "source")
        os.truncate(tmp_path / "source", 1000)
        with pytest.raises(CheckpointError, match="has become shorter"):
            write_checkpoint({**held(tensors), **entries}, tmp_path / "a", format=format)
        assert os.listdir(tmp_path) == ["source"]


class TestRefusals:
    @pytest.mark.parametrize(("format", "kind"), [(Format.DCP, "file"), (Format.TORCH, "folder")])
    def test_a_file_in_place_of_a_folder_is_refused_and_the_other_way_round(self, tmp_path, tensors, format, kind):
        if kind == "file":
            (tmp_path / "a").write_text("kept")
        else:
            (tmp_path / "a").mkdir()
        with pytest.raises(OutputError, match=f"is a {kind}"):
            write(tensors, tmp_path / "a", format, overwrite=True)

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


class TestFullDisk:
    def test_it_is_refused_before_anything_is_written(self, tmp_path):
        with pytest.raises(OutputError, match=r"a needs 4611686.0 TB, and its disk has ") as caught:
            check_target(tmp_path / "a", format=Format.SAFETENSORS, overwrite=False, needed=2**62)
        assert caught.value.hint is not None
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("format", FILES + FOLDERS)
    def test_a_disk_that_fills_half_way_keeps_the_old_checkpoint(self, tmp_path, tensors, format):
        """The limit on the size of files stands for the end of the disk: the system refuses to write beyond it."""
        place = tmp_path / ("a" if format in FILES else "b")
        write(tensors, tmp_path / "a", format)
        before = killing.tree(tmp_path)
        larger = {"big": torch.zeros(MIB)}
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, old[1]))
        try:
            with pytest.raises(OutputError, match=r"cannot write .*: File too large") as caught:
                write(larger, place, format, overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert caught.value.hint == "make room there, or write to another disk"
        assert killing.tree(tmp_path) == before
        assert os.listdir(tmp_path) == ["a"]


def test_a_weight_that_is_too_large_for_its_dtype_leaves_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="large has numbers that are too large for float16"):
        write_weights(tmp_path / "a.safetensors", {"large": torch.tensor([1e6])}, dtype=torch.float16)
    assert [*tmp_path.iterdir()] == []
