"""Folders of torch.distributed.checkpoint: theirs are read, ours are theirs, and neither is trusted."""

import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_files import PROGRAMS, little_memory, mutations, opened_or_refused, payloads, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as described

from opensora_cli.checkpoint.contents import Format, Selection
from opensora_cli.checkpoint.formats.dcp import METADATA_FILE, open_dcp, write_dcp
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.core.exceptions import CheckpointError, RequestError

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


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, tuple(found[name].shape)) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(found[name].to(torch.float64), tensor.to(torch.float64)), name


def read(folder, select=None):
    return {name: entry.read() for name, entry in open_dcp(folder, select=select).entries.items()}


@pytest.fixture
def folder(tmp_path):
    """A folder of ours."""
    (tmp_path / "ours").mkdir()
    write_dcp(tmp_path / "ours", {name: HeldEntry(tensor) for name, tensor in tensors().items()})
    return tmp_path / "ours"


class TestReading:
    def test_a_state_dict(self, tmp_path):
        dcp.save(tensors(), checkpoint_id=tmp_path)
        opened = open_dcp(tmp_path)
        assert (opened.format, opened.selections) == (Format.DCP, ())
        assert set(opened.files) == {tmp_path / METADATA_FILE, tmp_path / DATA}
        assert_same(read(tmp_path), tensors())

    def test_a_training(self, tmp_path):
        ema = {name: tensor.to(torch.float32) * 2 for name, tensor in tensors().items()}
        optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        dcp.save({"model": tensors(), "ema": ema, "optimizer": optimizer, "step": 7}, checkpoint_id=tmp_path)
        opened = open_dcp(tmp_path)
        assert (opened.selection, opened.selections) == (Selection.MODEL, (Selection.MODEL, Selection.EMA))
        assert_same(read(tmp_path), tensors())
        assert_same(read(tmp_path, Selection.EMA), ema)
        with pytest.raises(RequestError, match="has no master weights"):
            open_dcp(tmp_path, select=Selection.MASTER)

    def test_names_with_dots_are_no_nesting(self, tmp_path):
        dcp.save({"model.a": torch.ones(1), "model.b": torch.ones(1)}, checkpoint_id=tmp_path)
        assert list(open_dcp(tmp_path).entries) == ["model.a", "model.b"]

    def test_one_file_for_each_tensor(self, tmp_path):
        writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
        dcp.save(tensors(), storage_writer=writer)
        assert len(open_dcp(tmp_path).files) == len(tensors()) + 1
        assert_same(read(tmp_path), tensors())


class TestWriting:
    def test_torch_reads_it(self, folder):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
        dcp.load(loaded, checkpoint_id=folder)
        assert_same(loaded, tensors())

    def test_progress_and_order(self, tmp_path):
        advanced = []
        write_dcp(tmp_path, {name: HeldEntry(tensor) for name, tensor in tensors().items()}, advance=advanced.append)
        assert sum(advanced) == sum(tensor.nbytes for tensor in tensors().values())
        assert list(open_dcp(tmp_path).entries) == list(tensors())

    def test_the_metadata_comes_last(self, tmp_path):
        class Unreadable(HeldEntry):
            def elements(self, start, stop):
                raise CheckpointError("a bad sector")

        with pytest.raises(CheckpointError, match="a bad sector"):
            write_dcp(tmp_path, {"a": Unreadable(torch.ones(1))})
        assert [path.name for path in tmp_path.iterdir()] == [DATA]
        assert "was not written to its end" in refused(lambda: open_dcp(tmp_path))


def change(folder, changed):
    """Rewrite the metadata of a folder with what `changed` makes of it."""
    path = folder / METADATA_FILE
    path.write_bytes(pickle.dumps(changed(pickle.loads(path.read_bytes()))))


class TestBrokenFolders:
    def test_no_metadata(self, tmp_path):
        assert "lacks .metadata" in refused(lambda: open_dcp(tmp_path))

    def test_no_data(self, folder):
        (folder / DATA).unlink()
        assert f"lacks 1 of its files: '{DATA}'" in refused(lambda: open_dcp(folder))

    def test_data_cut_short(self, folder):
        with (folder / DATA).open("r+b") as file:
            file.truncate((folder / DATA).stat().st_size - 1)
        assert "is truncated" in refused(lambda: open_dcp(folder))

    @pytest.mark.parametrize(
        "name", ["../secret", "/etc/passwd", "a/../../secret", "link", "..", "", "a\0b", "a\nb", 3]
    )
    def test_data_outside_the_folder(self, tmp_path, folder, name):
        shutil.copy(folder / DATA, tmp_path / "secret")
        (folder / "link").symlink_to(tmp_path / "secret")

        def changed(metadata):
            stored = {index: replace(info, relative_path=name) for index, info in metadata.storage_data.items()}
            return replace(metadata, storage_data=stored)

        change(folder, changed)
        refused(lambda: open_dcp(folder))

    @pytest.mark.parametrize(
        ("offset", "length"), [(-1, 10), (0, 10**12), (10**12, 10), (0, -1), (0, 3), (7, 2000), ("0", 10), (2**63, 1)]
    )
    def test_data_elsewhere_in_the_file(self, folder, offset, length):
        def changed(metadata):
            info = next(iter(metadata.storage_data.values()))
            info.offset, info.length = offset, length
            return metadata

        change(folder, changed)
        with little_memory():
            refused(lambda: open_dcp(folder))

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
            ([((0, 0), (3, 3)), ((3, 0), (2, 3))], "another tensor"),
            ([], "missing"),
        ],
    )
    def test_chunks_that_do_not_fit(self, folder, chunks, reason):
        def changed(metadata):
            found = [described.ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in chunks]
            metadata.state_dict_metadata["blocks.0.weight"].chunks = found
            return metadata

        change(folder, changed)
        assert reason in refused(lambda: open_dcp(folder))

    def test_a_chunk_in_no_file(self, folder):
        def changed(metadata):
            stored = {index: info for index, info in metadata.storage_data.items() if index.fqn != "long"}
            return replace(metadata, storage_data=stored)

        change(folder, changed)
        assert "a chunk of 'long' is in no file" in refused(lambda: open_dcp(folder))

    def test_another_dtype_than_promised(self, folder):
        def changed(metadata):
            metadata.state_dict_metadata["half"].properties.dtype = torch.float16
            return metadata

        change(folder, changed)
        assert "holds another tensor than" in refused(lambda: open_dcp(folder))

    def test_transformed_files_are_refused(self, folder):
        def changed(metadata):
            for info in metadata.storage_data.values():
                info.transform_descriptors = ["zstd"]
            return metadata

        change(folder, changed)
        assert "transformed" in refused(lambda: open_dcp(folder))

    @pytest.mark.parametrize("content", [{"a": 1}, None, described.Metadata(None), described.BytesStorageMetadata()])
    def test_metadata_of_something_else(self, folder, content):
        (folder / METADATA_FILE).write_bytes(pickle.dumps(content))
        refused(lambda: open_dcp(folder))

    @pytest.mark.parametrize("keys", [(), ("a", ("b",)), "text", [1], 3])
    def test_nesting_that_cannot_be(self, folder, keys):
        change(folder, lambda metadata: replace(metadata, planner_data={"long": keys}))
        assert "without a name" in refused(lambda: open_dcp(folder))

    @pytest.mark.parametrize("keys", [("half",), ("half", "a")])
    def test_two_tensors_of_one_name(self, folder, keys):
        change(folder, lambda metadata: replace(metadata, planner_data={"long": keys}))
        refused(lambda: open_dcp(folder))

    @pytest.mark.parametrize("name", payloads(None))
    def test_no_payload_is_run(self, tmp_path, folder, name):
        content = payloads(tmp_path / "canary")[name]
        (folder / METADATA_FILE).write_bytes(content)
        reason = refused(lambda: open_dcp(folder))
        assert "is refused: it imports" in reason
        assert not (tmp_path / "canary").exists()


def write_small(folder):
    write_dcp(folder, {"a": HeldEntry(torch.arange(6.0).view(2, 3)), "b": HeldEntry(torch.ones(2))})
    return folder


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("fuzzed"))


with tempfile.TemporaryDirectory() as small:
    METADATA_BYTES, DATA_BYTES = ((write_small(Path(small)) / name).read_bytes() for name in (METADATA_FILE, DATA))
METADATAS = st.one_of(mutations(METADATA_BYTES), PROGRAMS)


def check(folder, name, content):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    opened_or_refused(lambda: read(folder))
    (folder / name).write_bytes(whole)
    assert set(read(folder)) == {"a", "b"}


@settings(max_examples=150)
@given(content=METADATAS)
def test_arbitrary_metadata_is_read_or_refused(fuzzed, content):
    check(fuzzed, METADATA_FILE, content)


@settings(max_examples=100)
@given(content=mutations(DATA_BYTES))
def test_arbitrary_data_is_read_or_refused(fuzzed, content):
    check(fuzzed, DATA, content)


@pytest.mark.slow
class TestThousands:
    @settings(max_examples=4000, derandomize=False)
    @given(content=METADATAS)
    def test_arbitrary_metadata(self, fuzzed, content):
        check(fuzzed, METADATA_FILE, content)

    @settings(max_examples=2000, derandomize=False)
    @given(content=mutations(DATA_BYTES))
    def test_arbitrary_data(self, fuzzed, content):
        check(fuzzed, DATA, content)
