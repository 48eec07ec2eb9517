"""Folders of torch.distributed.checkpoint: theirs are read, ours are theirs, and neither is trusted."""

import io
import pickle
import shutil
from enum import Enum

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_files import little_memory, payloads, refused
from tiny_weights import bit_equal, held, read
from torch.distributed.checkpoint import metadata as described

from opensora_cli.checkpoint.formats.dcp import DCP_METADATA, write_dcp
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.exceptions import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = "__0_0.distcp"


def tensors():
    torch.manual_seed(0)
    return {
        "blocks.0.weight": torch.rand(5, 3),
        "half": torch.rand(7).bfloat16(),
        "eighth": torch.rand(6).to(torch.float8_e4m3fn),
        "long": torch.arange(4).view(2, 2),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.rand(3, 4).t(),
    }


def opened(folder, select=None):
    return read(open_checkpoint(folder, select=select).entries)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ours").mkdir()
    write_dcp(tmp_path / "ours", held(tensors()))
    return tmp_path / "ours"


class TestReading:
    def test_a_state_dict(self, tmp_path):
        dcp.save(tensors(), checkpoint_id=tmp_path)
        found = open_checkpoint(tmp_path)
        assert (found.format, found.selections) == (Format.DCP, ())
        assert set(found.files) == {tmp_path / DCP_METADATA, tmp_path / DATA}
        assert bit_equal(read(found.entries), tensors())

    def test_enumerations_as_python_before_3_11_4_pickles_them(self, tmp_path):
        class Older(pickle.Pickler):
            def reducer_override(self, value):
                return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented

        dcp.save(tensors(), checkpoint_id=tmp_path)
        metadata = tmp_path / DCP_METADATA
        described_anew = io.BytesIO()
        Older(described_anew).dump(pickle.loads(metadata.read_bytes()))
        assert b"getattr" in described_anew.getvalue()
        metadata.write_bytes(described_anew.getvalue())
        assert bit_equal(opened(tmp_path), tensors())

    def test_a_training(self, tmp_path):
        ema = {name: tensor.to(torch.float32) * 2 for name, tensor in tensors().items()}
        optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        dcp.save({"model": tensors(), "ema": ema, "optimizer": optimizer, "step": 7}, checkpoint_id=tmp_path)
        assert bit_equal(opened(tmp_path), tensors())
        assert bit_equal(opened(tmp_path, Selection.EMA), ema)


class TestWriting:
    def test_torch_reads_it(self, folder):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
        dcp.load(loaded, checkpoint_id=folder)
        assert bit_equal(loaded, tensors())

    def test_the_metadata_comes_last(self, tmp_path):
        def fail():
            raise CheckpointError("a bad sector")

        with pytest.raises(CheckpointError, match="a bad sector"):
            write_dcp(tmp_path, {"a": LazyTensor((1,), torch.float32, fail)})
        assert [path.name for path in tmp_path.iterdir()] == [DATA]
        assert "was not written to its end" in refused(lambda: open_checkpoint(tmp_path))


def change(folder, do):
    path = folder / DCP_METADATA
    metadata = pickle.loads(path.read_bytes())
    do(metadata)
    path.write_bytes(pickle.dumps(metadata))


class TestBrokenFolders:
    def test_data_that_is_cut_short_or_gone(self, folder):
        with (folder / DATA).open("r+b") as file:
            file.truncate((folder / DATA).stat().st_size - 1)
        assert "is truncated" in refused(lambda: open_checkpoint(folder))
        (folder / DATA).unlink()
        assert f"lacks 1 of its files: {DATA}" in refused(lambda: open_checkpoint(folder))

    @pytest.mark.parametrize("name", ["../secret", "link", "..", "a\0b", 3])
    def test_data_outside_the_folder(self, tmp_path, folder, name):
        shutil.copy(folder / DATA, tmp_path / "secret")
        (folder / "link").symlink_to(tmp_path / "secret")

        change(folder, lambda found: [setattr(info, "relative_path", name) for info in found.storage_data.values()])
        refused(lambda: open_checkpoint(folder))

    @pytest.mark.parametrize(
        ("offset", "length"), [(-1, 10), (0, 10**12), (10**12, 10), (0, -1), (0, 3), (7, 2000), ("0", 10), (2**63, 1)]
    )
    def test_data_elsewhere_in_the_file(self, folder, offset, length):
        def move(metadata):
            info = next(iter(metadata.storage_data.values()))
            info.offset, info.length = offset, length

        change(folder, move)
        with little_memory():
            refused(lambda: opened(folder))

    @pytest.mark.parametrize(
        ("chunks", "reason"),
        [
            ([((0, 0), (5, 2))], "missing"),
            ([((0, 0), (5, 3)), ((0, 0), (5, 3))], "overlap"),
            ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "overlap"),
            ([((0, 0), (5, 2)), ((0, 1), (5, 1))], "overlap"),
            ([((0, 0), (6, 3))], "reaches beyond"),
            ([((1, 0), (5, 3))], "reaches beyond"),
            ([((0,), (15,))], "reaches beyond"),
            ([((0, 0), (5,))], "is broken"),
            ([((0, 0), (3, 3)), ((3, 0), (2, 3))], "in no file"),
            ([], "missing"),
        ],
    )
    def test_chunks_that_do_not_fit(self, folder, chunks, reason):
        made = [described.ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in chunks]
        change(folder, lambda found: setattr(found.state_dict_metadata["blocks.0.weight"], "chunks", made))
        assert reason in refused(lambda: opened(folder))

    def test_another_dtype_than_promised(self, folder):
        change(folder, lambda found: setattr(found.state_dict_metadata["half"].properties, "dtype", torch.float16))
        assert "holds another tensor for" in refused(lambda: opened(folder))

    def test_transformed_files_are_refused(self, folder):
        change(
            folder, lambda found: [setattr(i, "transform_descriptors", ["zstd"]) for i in found.storage_data.values()]
        )
        assert "transformed" in refused(lambda: open_checkpoint(folder))

    @pytest.mark.parametrize("keys", [("half",), ("half", "a")])
    def test_two_tensors_of_one_name(self, folder, keys):
        change(folder, lambda metadata: setattr(metadata, "planner_data", {"long": keys}))
        refused(lambda: open_checkpoint(folder))

    def test_no_payload_is_run(self, tmp_path, folder):
        content = payloads(tmp_path / "canary")["os.system"]
        (folder / DCP_METADATA).write_bytes(content)
        assert "is refused: it imports" in refused(lambda: open_checkpoint(folder))
        assert not (tmp_path / "canary").exists()
