"""Files of torch.save: read and written without holding them, and without running anything."""

import pickle
import struct
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
from hostile_files import FUZZED, PROGRAMS, fuzz, little_memory, mutations, opened_or_refused, payloads, refused
from hypothesis import strategies as st
from tiny_weights import bit_equal, held, read
from torch import nn

from opensora_cli.checkpoint.contents import TORCH_MAGIC
from opensora_cli.checkpoint.formats import torch as torch_format
from opensora_cli.checkpoint.formats.pickles import DTYPES as ALL_DTYPES
from opensora_cli.checkpoint.formats.pickles import STORAGE_NAMES
from opensora_cli.checkpoint.formats.torch import open_torch, write_torch
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.weight_choices import Format, Selection

FORMS = [
    pytest.param({"_use_new_zipfile_serialization": form}, id=name) for name, form in (("zip", True), ("old", False))
]
DTYPES = [dtype for dtype in ALL_DTYPES.values() if dtype is not torch.complex32]


def random_of(dtype, *shape):
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return content.to(torch.uint8).view(dtype).view(shape)


def opened(path, select=None):
    return read(open_torch(path, select=select).entries)


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
    @pytest.mark.parametrize("form", FORMS)
    def test_all_kinds_of_tensors_are_read_bit_for_bit(self, tmp_path, form):
        tensors = of_all_kinds()
        if not form["_use_new_zipfile_serialization"]:
            # torch itself cannot read what has no storage class of its own from such a file.
            tensors = {name: tensor for name, tensor in tensors.items() if tensor.dtype in STORAGE_NAMES}
        torch.save(tensors, tmp_path / "a", **form)
        assert bit_equal(opened(tmp_path / "a"), tensors)

    def test_values_that_are_no_tensors_are_left_out(self, tmp_path):
        others = {
            **{"size": torch.Size([1]), "dtype": torch.int8, "device": torch.device("cpu"), "set": {1}, "none": None},
            **{"complex": 1j, "counter": Counter("aab"), "layout": torch.strided, "list": [1, "a"], "long": 2**70},
            **{"tuple": {(1, "a"): 3, None: 2, 1.5: 3}},
        }
        torch.save({"x": torch.ones(2), "others": others}, tmp_path / "a")
        assert list(open_torch(tmp_path / "a").entries) == ["x"]

    @pytest.mark.parametrize("protocol", [3, 4, 5])
    def test_another_pickle_protocol_is_refused_with_what_to_do(self, tmp_path, protocol):
        torch.save({"x": torch.ones(2)}, tmp_path / "a", pickle_protocol=protocol)
        with pytest.raises(CheckpointError, match=f"is a pickle of protocol {protocol}") as caught:
            open_torch(tmp_path / "a")
        assert "save it again" in caught.value.hint

    def test_nested_names_are_joined(self, tmp_path):
        torch.save({"a": OrderedDict(b=torch.ones(1), c=[torch.ones(2), {3: torch.ones(4)}])}, tmp_path / "a")
        assert list(open_torch(tmp_path / "a").entries) == ["a.b", "a.c.0", "a.c.1.3"]
        torch.save({}, tmp_path / "a")
        assert open_torch(tmp_path / "a").entries == {}

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two tensors called 'a.b'"),
            *((value, "holds no tensors") for value in (3, {"a": 1}, [None], "text")),
            (torch.ones(1), "without a name"),
            ({"a": torch.eye(3).to_sparse()}, "imports 'torch._utils._rebuild_sparse_tensor'"),
            ({"a": torch.tensor([1j]).conj()}, "yet to be conjugated"),
        ],
    )
    def test_what_is_no_state_dict_is_refused(self, tmp_path, value, reason):
        torch.save(value, tmp_path / "a")
        assert reason in refused(lambda: open_torch(tmp_path / "a"))


class TestSelecting:
    def test_a_training_of_this_project(self, tmp_path):
        model = nn.Linear(2, 2)
        ema = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        state = {"step": 7, "model": model.state_dict(), "ema": ema, "optimizers": [optimizer]}
        torch.save(state, tmp_path / "a")
        found = open_torch(tmp_path / "a")
        assert (found.format, found.selection) == (Format.TORCH, Selection.MODEL)
        assert found.selections == (Selection.MODEL, Selection.EMA)
        assert found.metadata == {"step": "7"}
        assert bit_equal(read(found.entries), model.state_dict())
        assert bit_equal(opened(tmp_path / "a", Selection.EMA), ema)
        with pytest.raises(RequestError, match="has no master weights: it has model, ema"):
            open_torch(tmp_path / "a", select=Selection.MASTER)

    def test_the_generator_of_a_distillation_is_the_model(self, tmp_path):
        model = nn.Linear(2, 2).state_dict()
        ema = {name: -tensor for name, tensor in model.items()}
        torch.save({"generator": model, "generator_ema": ema}, tmp_path / "a")
        assert open_torch(tmp_path / "a").selections == (Selection.MODEL, Selection.EMA)
        assert bit_equal(opened(tmp_path / "a", Selection.EMA), ema)

    def test_an_average_without_names_is_refused(self, tmp_path):
        model = nn.Linear(2, 2).state_dict()
        average = {"decay": 0.99, "shadow_params": list(model.values())}
        torch.save({"model": model, "ema": average}, tmp_path / "a")
        assert bit_equal(opened(tmp_path / "a", Selection.MODEL), model)
        with pytest.raises(CheckpointError, match=r"its ema weights are a list \(shadow_params\) without names"):
            open_torch(tmp_path / "a", select=Selection.EMA)

    @pytest.mark.parametrize("key", ["model", "state_dict", "module"])
    def test_a_wrapper_is_taken_off(self, tmp_path, key):
        torch.save({key: {"a": torch.ones(1)}, "optimizer": {"state": {0: torch.ones(3)}}, "lr": 0.1}, tmp_path / "a")
        found = open_torch(tmp_path / "a")
        assert list(found.entries) == ["a"]
        assert (found.format, found.selection, found.selections) == (Format.TORCH, None, ())
        assert found.metadata == {"lr": "0.1"}

    def test_weights_that_are_not_there(self, tmp_path):
        torch.save({"a": torch.ones(1)}, tmp_path / "a")
        assert list(open_torch(tmp_path / "a", select=Selection.MODEL).entries) == ["a"]
        with pytest.raises(RequestError, match="has no ema weights: it has only one set"):
            open_torch(tmp_path / "a", select=Selection.EMA)


class TestWriting:
    @pytest.fixture
    def written(self, tmp_path):
        """All kinds of tensors, with metadata."""
        advanced, metadata = [], {"licence": "frei", "command": "caf\udce9"}
        write_torch(tmp_path / "a", held(of_all_kinds()), metadata=metadata, advance=advanced.append)
        assert sum(advanced) == sum(tensor.nbytes for tensor in of_all_kinds().values())
        return tmp_path / "a"

    @pytest.mark.parametrize("mmap", [False, True])
    def test_torch_reads_it(self, written, mmap):
        loaded = torch.load(written, weights_only=True, mmap=mmap)
        assert bit_equal(loaded, of_all_kinds())
        assert all(tensor.is_contiguous() for tensor in loaded.values())

    def test_we_read_it_with_its_metadata(self, written):
        assert bit_equal(opened(written), of_all_kinds())
        assert open_torch(written).metadata == {"licence": "frei", "command": "caf\\udce9"}

    def test_it_is_a_sound_archive_with_aligned_data(self, written):
        with zipfile.ZipFile(written) as archive:
            assert archive.testzip() is None
            offsets = [info.header_offset for info in archive.infolist()]
        content = written.read_bytes()
        starts = [at + 30 + sum(struct.unpack_from("<2H", content, at + 26)) for at in offsets]
        assert [start % 64 for start in starts] == [0] * len(starts)

    def test_a_dtype_that_torch_cannot_save_is_refused(self, tmp_path):
        with pytest.raises(RequestError, match="does not write bits8"):
            write_torch(tmp_path / "a", held({"x": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}))
        assert not (tmp_path / "a").exists()


def _repeated():
    """Return what makes a tensor of a billion elements that are all the same byte of the file."""
    return tensor_pickle(shape=(10**9,), stride=(0,), numel=4)[9:-2]


class TestBrokenFiles:
    @pytest.mark.parametrize("form", [True, False], ids=["zip", "old"])
    def test_a_file_cut_anywhere_is_refused(self, tmp_path, form):
        tensors = {"a": torch.arange(20.0), "b": torch.arange(5)}
        torch.save(tensors, tmp_path / "a", _use_new_zipfile_serialization=form)
        whole = (tmp_path / "a").read_bytes()
        for end in range(0, len(whole), 7):
            (tmp_path / "a").write_bytes(whole[:end])
            refused(lambda: open_torch(tmp_path / "a"))

    @pytest.mark.parametrize(
        ("claim", "reason"),
        [
            ({"numel": 10**12, "shape": (10**6, 10**6), "stride": (10**6, 1)}, "longer than its data"),
            ({"shape": (10**6, 10**6), "stride": (0, 0)}, "repeats its data"),
            ({"shape": (2**40, 2**40), "stride": (0, 0)}, "is broken"),
            ({"shape": (0, 2**62), "stride": (1, 1)}, "impossible shape"),
            ({"shape": (1,) * 65, "stride": (1,) * 65}, "impossible shape"),
            ({"offset": 1}, "is broken"),
            ({"offset": -1}, "is broken"),
            ({"shape": (2, 2, 1)}, "is broken"),
            ({"numel": "4"}, "is broken"),
            ({"key": "../0"}, "is broken"),
            ({"kind": b"QInt8Storage"}, "imports 'torch.QInt8Storage'"),
        ],
    )
    def test_tensors_that_cannot_be(self, tmp_path, claim, reason):
        path = with_pickle(tmp_path / "a", tensor_pickle(**claim), **{"data/0": bytes(16)})
        assert reason in refused(lambda: open_torch(path))

    @pytest.mark.parametrize(
        ("program", "reason"),
        [
            (b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "too deep"),
            (b"\x80\x02" + b"}q\x00" + b"(X\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bh\x00u" * 40 + b".", "too deep"),
            (b"\x80\x02" + b"]" * 3 + b"a" * 2 + b"r\xff\xff\xff\xff.", "holds no tensors"),
            (b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "imports 'builtins.bytearray'"),
            (b"\x80\x02ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R.", "imports 'torch.FloatTensor'"),
            (b"\x80\x02ctorch.storage\nUntypedStorage\nJ\xff\xff\xff\x7f\x85R.", "is broken"),
            (b"\x80\x02B\xff\xff\xff\x7fabc.", "is broken"),
            (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00abc.", "a pickle of protocol 5"),
            (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00makeK\x01sb.", "is broken"),
            (b"\x80\x02" + b"(" * 10**5 + b".", "is broken"),
            (b"\x80\x02)" + b"q\x00h\x00\x86" * 40 + b"q\x00}h\x00Ns.", "nests tuples too deep"),
            (
                b"\x80\x02(]("
                + b"K\x01" * 10_000
                + b"eq\x00cbuiltins\nset\nq\x01]("
                + b"h\x01h\x00\x85R" * 10_000
                + b"et.",
                "more operations than",
            ),
            (b"\x80\x02(]q\x00h\x00\x85q\x01h\x00(NNecbuiltins\nset\nh\x01Rt.", "holds no tensors"),
            *(
                (b"\x80\x02" + program, "")
                for name in (b"builtins\nset", b"collections\nCounter")
                for program in (
                    b"c" + name + b"\n" + _repeated() + b"\x85R.",
                    b"c" + name + b"\n](" + _repeated() + b"e\x85R.",
                    b"ccollections\nOrderedDict\n)R" + _repeated() + b"b.",
                    b"ctorch._tensor\n_rebuild_from_type_v2\n(c"
                    + name
                    + b"\nctorch\nTensor\n"
                    + _repeated()
                    + b"\x85}tR.",
                )
            ),
        ],
    )
    def test_pickles_that_would_take_all_memory(self, tmp_path, program, reason):
        path = with_pickle(tmp_path / "a", program)
        with little_memory():
            assert reason in refused(lambda: open_torch(path))

    def test_records_that_lie_over_each_other_are_refused(self, tmp_path):
        path = with_pickle(tmp_path / "a", b"\x80\x02}.", **{f"data/{number}": bytes(4000) for number in range(3)})
        content = bytearray(path.read_bytes())
        # In the directory, all records are made as long as the rest of the file.
        for start in (at for at in range(len(content)) if content[at : at + 4] == b"PK\x01\x02"):
            if b"data/" in content[start + 46 : start + 80]:
                content[start + 20 : start + 28] = struct.pack("<II", 9000, 9000)
        path.write_bytes(content)
        assert "longer than the file" in refused(lambda: open_torch(path))

    def test_a_key_that_would_overflow_the_stack_is_refused(self, tmp_path):
        path = with_pickle(tmp_path / "a", b"\x80\x02](" + b"N" * 200_000 + b"e}N" + b"\x85" * 300_000 + b"K\x01s.")
        assert "nests tuples too deep" in refused(lambda: open_torch(path))

    def test_long_programs_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(torch_format, "_MAX_OPERATIONS", 1000)
        path = with_pickle(tmp_path / "a", b"\x80\x02" + b"N" * 1000 + b".")
        assert "more operations than" in refused(lambda: open_torch(path))

    @pytest.mark.slow
    def test_the_longest_program_takes_no_more_than_the_memory_there_is(self, tmp_path):
        path = with_pickle(tmp_path / "a", b"\x80\x02" + b"]q\x00" * (torch_format._MAX_OPERATIONS // 2 - 10) + b".")
        with little_memory(256_000_000):
            assert "holds no tensors" in refused(lambda: open_torch(path))

    def test_a_directory_of_many_records_takes_little_memory(self, tmp_path):
        """Each fifty bytes would become an object of nine hundred."""
        record = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *[0] * 9, 4, *[0] * 6) + b"name"
        directory = record * 300_000
        end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0, 0, len(directory), 4, 0)
        (tmp_path / "a").write_bytes(TORCH_MAGIC + directory + end)
        with little_memory():
            assert "its directory has more than" in refused(lambda: open_torch(tmp_path / "a"))

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    @pytest.mark.parametrize(
        ("records", "reason"),
        [
            ([("data.pkl", b"a"), ("data.pkl", b"b")], "two records of the same name"),
            ([("readme.txt", b"a")], "not of torch.save"),
            ([("data.pkl", b"\x80\x02N."), ("constants.pkl", b"\x80\x02).")], "TorchScript"),
            ([("data.pkl", tensor_pickle()), ("data/0", bytes(16)), ("byteorder", b"big")], "big-endian"),
            ([("data.pkl", tensor_pickle())], "is broken"),
            ([("data.pkl", tensor_pickle()), ("data/0", bytes(15)), ("version", b"3")], "longer than its data"),
        ],
    )
    def test_other_archives_are_refused(self, tmp_path, records, reason):
        with zipfile.ZipFile(tmp_path / "a", "w") as archive:
            for name, content in records:
                archive.writestr(f"archive/{name}", content)
        assert reason in refused(lambda: open_torch(tmp_path / "a"))

    def test_compressed_records_are_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"N" * 10**6)
        assert (tmp_path / "a").stat().st_size < 2000
        assert "compressed" in refused(lambda: open_torch(tmp_path / "a"))

    def test_whole_models_are_refused(self, tmp_path):
        torch.save(nn.Linear(1, 1), tmp_path / "a")
        with pytest.raises(CheckpointError, match=r"imports 'torch\.nn\.modules\.linear\.Linear'") as caught:
            open_torch(tmp_path / "a")
        assert "state_dict" in caught.value.hint


class TestPayloads:
    @pytest.fixture
    def canary(self, tmp_path):
        yield tmp_path / "canary"
        assert not (tmp_path / "canary").exists()

    def test_these_payloads_work(self, tmp_path):
        for name in ("os.system", "eval", "stack global", "by reduce", "after tensors"):
            content = payloads(tmp_path / name)[name]
            pickle.loads(content)
            assert (tmp_path / name).exists()

    @pytest.mark.parametrize("name", payloads(None))
    def test_none_is_run(self, tmp_path, canary, name):
        content = payloads(canary)[name]
        reason = refused(lambda: open_torch(with_pickle(tmp_path / "zip", content)))
        assert "is refused: it imports" in reason or "a pickle of protocol" in reason
        (tmp_path / "plain").write_bytes(b"\x80" + content if content[0] != 0x80 else content)
        refused(lambda: open_torch(tmp_path / "plain"))
        torch.save({"a": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
        whole = (tmp_path / "old").read_bytes()
        for mark in (b".\x80", b"}q\x00X\x01\x00\x00\x00a"):
            place = whole.rindex(mark) + (1 if mark[:1] == b"." else 0)
            (tmp_path / "old").write_bytes(whole[:place] + content + whole[place:])
            refused(lambda: open_torch(tmp_path / "old"))


def read_all(path):
    for entry in open_torch(path).entries.values():
        entry.read()


@FUZZED
def test_arbitrary_pickles_are_read_or_refused(tmp_path, examples):
    torch.save({"model": {"a": torch.ones(2, 3), "b": torch.ones(3, 2).t()}, "step": 3}, tmp_path / "a")
    sound = zipfile.ZipFile(tmp_path / "a").read("a/data.pkl")

    def check(content):
        with_pickle(tmp_path / "a", content, **{"data/0": bytes(24), "data/1": bytes(24)})
        opened_or_refused(lambda: read_all(tmp_path / "a"))

    fuzz(check, st.one_of(mutations(sound), PROGRAMS), examples)


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
    entries = open_torch(tmp_path / "a").entries
    assert entries["large"].shape == (numel,)
    assert entries["large"].read()[-2:].tolist() == [0, 0]
    assert entries["behind"].read().tolist() == list(range(5))
    torch.save({"large": torch.zeros(numel, dtype=torch.int8), "behind": torch.arange(5)}, tmp_path / "a")
    entries = open_torch(tmp_path / "a").entries
    assert entries["large"].read()[-2:].tolist() == [0, 0]
    assert entries["behind"].read().tolist() == list(range(5))
    (tmp_path / "a").unlink()
