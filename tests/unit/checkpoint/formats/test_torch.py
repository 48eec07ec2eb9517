"""Files of torch.save: read and written without holding them, and without running anything."""

import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from hostile_files import payloads, refused
from tiny_weights import bit_equal, held, read
from torch import nn

from opensora_cli.checkpoint.formats.torch import write_torch
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.exceptions import CheckpointError, RequestError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64),
]


def random_of(dtype, *shape):
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return content.to(torch.uint8).view(dtype).view(shape)


def opened(path, select=None):
    return read(open_checkpoint(path, select=select).entries)


def of_all_kinds():
    torch.manual_seed(0)
    base = torch.arange(60.0).view(5, 12)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", nn.Buffer(torch.ones(2)))
    parameter = nn.Parameter(torch.ones(3))
    parameter.tag = "an attribute"
    return {
        **{str(dtype): random_of(dtype, 3, 4) for dtype in DTYPES},
        **{f"{dtype} transposed": random_of(dtype, 3, 4).t() for dtype in DTYPES},
        **model.state_dict(),
        "columns": base[:, 3:7],
        "every other row": base[::2],
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "tied": base,
        "tied again": base,
        "repeated": torch.ones(1, 2).expand(3, 2),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "parameter": parameter,
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "large": torch.rand(3000, 20).t(),
    }


def with_pickle(path, content, **records):
    """Write an archive as torch has it, with any pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        for name, record in records.items():
            archive.writestr(f"archive/{name}", record)
        archive.writestr("archive/version", b"3\n")
    return path


def tensor_pickle(*, numel=4, offset=0, shape=(2, 2), stride=(2, 1), key="0", kind=b"FloatStorage"):
    """Return the pickle of `{"x": tensor}` with any numbers in it, in the form of torch."""
    text = {name: pickle.dumps(value, protocol=2)[2:-1] for name, value in locals().items() if name != "kind"}
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\n" + text["key"] + b"X\x03\x00\x00\x00cpu" + text["numel"]
    )
    view = text["offset"] + text["shape"] + text["stride"] + b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"tQ" + view + b"tRs."


class TestReading:
    def test_all_kinds_of_tensors_are_read_bit_for_bit(self, tmp_path):
        torch.save(of_all_kinds(), tmp_path / "a")
        assert bit_equal(opened(tmp_path / "a"), of_all_kinds())

    def test_nested_names_are_joined(self, tmp_path):
        torch.save({"a": OrderedDict(b=torch.ones(1), c=[torch.ones(2), {3: torch.ones(4)}])}, tmp_path / "a")
        assert list(open_checkpoint(tmp_path / "a").entries) == ["a.b", "a.c.0", "a.c.1.3"]
        torch.save({}, tmp_path / "a")
        assert open_checkpoint(tmp_path / "a").entries == {}

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two tensors called 'a.b'"),
            *((value, "holds no tensors") for value in (3, {"a": 1}, [None], "text")),
            (torch.ones(1), "without a name"),
            ({"a": torch.eye(3).to_sparse()}, "is not dense"),
            ({"a": torch.tensor([1j]).conj()}, "yet to be conjugated"),
        ],
    )
    def test_what_is_no_state_dict_is_refused(self, tmp_path, value, reason):
        torch.save(value, tmp_path / "a")
        assert reason in refused(lambda: open_checkpoint(tmp_path / "a"))


class TestSelecting:
    def test_a_training_of_this_project(self, tmp_path):
        model = nn.Linear(2, 2)
        ema = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        state = {"step": 7, "model": model.state_dict(), "ema": ema, "optimizers": [optimizer]}
        torch.save(state, tmp_path / "a")
        found = open_checkpoint(tmp_path / "a")
        assert (found.format, found.selection) == (Format.TORCH, Selection.MODEL)
        assert found.selections == (Selection.MODEL, Selection.EMA)
        assert bit_equal(read(found.entries), model.state_dict())
        assert bit_equal(opened(tmp_path / "a", Selection.EMA), ema)
        with pytest.raises(RequestError, match="has no master weights: it has model, ema"):
            open_checkpoint(tmp_path / "a", select=Selection.MASTER)

    @pytest.mark.parametrize("key", ["model", "state_dict", "module"])
    def test_a_wrapper_is_taken_off(self, tmp_path, key):
        torch.save({key: {"a": torch.ones(1)}, "optimizer": {"state": {0: torch.ones(3)}}, "lr": 0.1}, tmp_path / "a")
        found = open_checkpoint(tmp_path / "a")
        assert list(found.entries) == ["a"]
        assert (found.format, found.selection, found.selections) == (Format.TORCH, None, ())


class TestWriting:
    @pytest.fixture
    def written(self, tmp_path):
        advanced = []
        write_torch(tmp_path / "a", held(of_all_kinds()), advance=advanced.append)
        assert sum(advanced) == sum(tensor.nbytes for tensor in of_all_kinds().values())
        return tmp_path / "a"

    @pytest.mark.parametrize("mmap", [False, True])
    def test_torch_reads_it(self, written, mmap):
        loaded = torch.load(written, weights_only=True, mmap=mmap)
        assert bit_equal(loaded, of_all_kinds())
        with zipfile.ZipFile(written) as archive:
            assert archive.testzip() is None


class TestBrokenFiles:
    def test_a_file_cut_anywhere_is_refused(self, tmp_path):
        torch.save({"a": torch.arange(20.0), "b": torch.arange(5)}, tmp_path / "a")
        whole = (tmp_path / "a").read_bytes()
        for end in range(0, len(whole), 7):
            (tmp_path / "a").write_bytes(whole[:end])
            refused(lambda: open_checkpoint(tmp_path / "a"))

    @pytest.mark.parametrize(
        ("claim", "reason"),
        [
            ({"numel": 10**12, "shape": (10**6, 10**6), "stride": (10**6, 1)}, "is broken"),
            ({"shape": (10**6, 10**6), "stride": (0, 0)}, "larger than the file"),
            ({"offset": 10**6}, "is broken"),
            ({"offset": -1}, "is broken"),
            ({"shape": (2, 2, 1)}, "is broken"),
            ({"numel": "4"}, "is broken"),
            ({"key": "../0"}, "is broken"),
        ],
    )
    def test_tensors_that_cannot_be(self, tmp_path, claim, reason):
        path = with_pickle(tmp_path / "a", tensor_pickle(**claim), **{"data/0": bytes(16)})
        assert reason in refused(lambda: open_checkpoint(path))

    @pytest.mark.parametrize(
        "program",
        [
            b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
            b"\x80\x02" + b"}q\x00" + b"(X\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bh\x00u" * 40 + b".",
        ],
    )
    def test_dictionaries_in_themselves_are_refused(self, tmp_path, program):
        assert "too deep" in refused(lambda: open_checkpoint(with_pickle(tmp_path / "a", program)))

    def test_compressed_records_are_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"N" * 10**6)
        assert (tmp_path / "a").stat().st_size < 2000
        assert "compressed" in refused(lambda: open_checkpoint(tmp_path / "a"))

    def test_whole_models_are_refused(self, tmp_path):
        torch.save(nn.Linear(1, 1), tmp_path / "a")
        with pytest.raises(CheckpointError, match=r"imports 'torch\.nn\.modules\.linear\.Linear'") as caught:
            open_checkpoint(tmp_path / "a")
        assert "state_dict" in caught.value.hint


@pytest.mark.parametrize("name", payloads(None))
def test_no_payload_is_run(tmp_path, name):
    content = payloads(tmp_path / "canary")[name]
    refused(lambda: open_checkpoint(with_pickle(tmp_path / "zip", content)))
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_sizes_and_places_beyond_32_bits(tmp_path):
    numel = 2**32 + 7
    write_torch(
        tmp_path / "a",
        {
            "large": LazyTensor((numel,), torch.int8, lambda: torch.zeros(numel, dtype=torch.int8)),
            "behind": LazyTensor.of(torch.arange(5)),
        },
    )
    loaded = torch.load(tmp_path / "a", weights_only=True, mmap=True)
    assert loaded["large"].numel() == numel
    assert loaded["behind"].tolist() == list(range(5))
    entries = open_checkpoint(tmp_path / "a").entries
    assert entries["large"].shape == (numel,)
    assert entries["large"].read()[-2:].tolist() == [0, 0]
    assert entries["behind"].read().tolist() == list(range(5))
    (tmp_path / "a").unlink()
