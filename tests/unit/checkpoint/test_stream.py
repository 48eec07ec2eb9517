"""Tensors arrive in files byte for byte, in few and large steps, without being held."""

import errno
import os
import random
from pathlib import Path

import pytest
import torch

from opensora_cli.checkpoint import stream
from opensora_cli.checkpoint.stream import Extent, HeldEntry, StoredEntry, copy_entries, merged, write_all
from opensora_cli.checkpoint.views import CastEntry
from opensora_cli.core.exceptions import CheckpointError

MIB = 2**20


@pytest.fixture
def source(tmp_path):
    """Two files of random bytes."""
    rng = random.Random(0)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(rng.randbytes(5 * MIB))
    return tmp_path


def stored(path, offset, length):
    return StoredEntry((length,), torch.uint8, [Extent(path, offset, length)])


def content(entry):
    return b"".join(extent.path.read_bytes()[extent.offset :][: extent.length] for extent in entry.extents())


def copied(entries, path, **options):
    with path.open("wb", buffering=0) as file:
        copy_entries(entries, file, **options)
    return path.read_bytes()


def test_stored_tensors(source):
    rng = random.Random(1)
    entries = [
        stored(source / rng.choice("ab"), offset, rng.choice([0, 1, 1000, 2 * MIB + 5, 5 * MIB - offset]))
        for offset in [0, 1, 7, MIB, 2 * MIB - 3] * 3
    ]
    advanced = []
    assert copied(entries, source / "out", advance=advanced.append) == b"".join(map(content, entries))
    assert sum(advanced) == sum(entry.nbytes for entry in entries)


def test_stored_and_computed_tensors_in_turn(source):
    first, last = stored(source / "a", 0, 4000), stored(source / "b", 4, 80)
    values = torch.rand(3 * MIB + 1, generator=torch.Generator().manual_seed(0))
    flags = torch.tensor([True, False, True])
    entries = [
        first,
        CastEntry(HeldEntry(values), torch.bfloat16, name="x"),
        HeldEntry(flags),
        HeldEntry(torch.empty(0, 4)),
        last,
    ]
    expected = [values.to(torch.bfloat16).view(torch.uint8), flags.view(torch.uint8)]
    computed = b"".join(tensor.numpy().tobytes() for tensor in expected)
    advanced = []
    assert copied(entries, source / "out", advance=advanced.append) == content(first) + computed + content(last)
    assert sum(advanced) == sum(entry.nbytes for entry in entries)
    assert max(advanced) <= MIB


def test_it_goes_to_the_position_of_the_file_and_moves_it(source):
    with (source / "out").open("wb", buffering=0) as file:
        write_all(file, b"before")
        copy_entries([stored(source / "a", 10, 20)], file)
        copy_entries([HeldEntry(torch.tensor([7, 8], dtype=torch.uint8))], file)
        assert file.tell() == 28
        write_all(file, b"after")
    assert (source / "out").read_bytes() == b"before" + (source / "a").read_bytes()[10:30] + b"\x07\x08after"


def test_neighbours_are_copied_in_one_run(source, monkeypatch):
    reads = []
    read = stream.read_extent
    monkeypatch.setattr(stream, "read_extent", lambda extent, buffer: reads.append(extent) or read(extent, buffer))
    neighbours = [stored(source / "a", start, 1000) for start in range(0, 100_000, 1000)]
    entries = [*neighbours, stored(source / "b", 100_000, 50)]
    assert copied(entries, source / "out") == b"".join(map(content, entries))
    assert reads == [Extent(source / "a", 0, 100_000), Extent(source / "b", 100_000, 50)]


def test_runs_are_merged_only_where_they_meet():
    a, b = Path("a"), Path("b")
    extents = [Extent(a, 0, 4), Extent(a, 9, 0), Extent(a, 4, 4), Extent(a, 9, 1), Extent(b, 10, 1), Extent(a, 11, 1)]
    assert list(merged(extents)) == [Extent(a, 0, 8), Extent(a, 9, 1), Extent(b, 10, 1), Extent(a, 11, 1)]
    assert list(merged([])) == []


def test_a_system_that_writes_little_at_a_time_or_nothing(source, monkeypatch):
    def full(_descriptor, _rest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, tensor = os.write, torch.arange(10_000)
    monkeypatch.setattr(os, "write", lambda descriptor, rest: write(descriptor, rest[:700]))
    assert copied([HeldEntry(tensor)], source / "out") == tensor.numpy().tobytes()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        copied([HeldEntry(tensor)], source / "out")


def test_a_source_that_is_too_short_or_gone(source):
    with pytest.raises(CheckpointError, match="a has become shorter"):
        copied([stored(source / "a", 5 * MIB - 10, 11)], source / "out")
    with pytest.raises(CheckpointError, match="c does not exist"):
        copied([stored(source / "c", 0, 1)], source / "out")
