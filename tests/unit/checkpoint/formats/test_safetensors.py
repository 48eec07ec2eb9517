"""Safetensors files: what the library writes is read, what is written the library reads, and nothing else passes."""

import json
import os
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint.formats.safetensors import _DTYPES, open_safetensors, write_safetensors
from opensora_cli.core.exceptions import CheckpointError, RequestError

DTYPES = list(_DTYPES.values())


@pytest.fixture
def tensors():
    """One tensor of every dtype, the small ones of odd lengths, some empty, one a scalar."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for index, dtype in enumerate(DTYPES):
        count = (index % 4) * 3 * dtype.itemsize
        content = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)
        made[f"block.{index}.weight"] = content.view(dtype).reshape(3, -1) if count else torch.empty(0, 5, dtype=dtype)
    made['scalar "雨" \n'] = torch.tensor(1.5)
    return made


def pack(header, data=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def described(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(path):
    """Return why `path` is refused, None if it is not, after checking that it is one line that names the file."""
    try:
        open_safetensors(path)
    except CheckpointError as error:
        message = error.message
    else:
        return None
    assert str(path) in message
    assert message.isprintable()
    assert len(message) < 2000
    return message


def test_what_the_library_wrote_is_read(tmp_path, tensors):
    save_file(tensors, tmp_path / "a", metadata={"origin": "a test", "雨": "rain"})
    entries, metadata = open_safetensors(tmp_path / "a")
    assert list(metadata.items()) == [("origin", "a test"), ("雨", "rain")]
    assert bit_equal(read(entries), tensors)


class TestWriting:
    def test_the_library_reads_it(self, tmp_path, tensors):
        write_safetensors(tmp_path / "a", held(tensors), metadata={"origin": "a test"})
        assert bit_equal(load_file(tmp_path / "a"), tensors)
        with safe_open(tmp_path / "a", "pt") as file:
            assert file.metadata() == {"format": "pt", "origin": "a test"}

    def test_and_so_do_we(self, tmp_path, tensors):
        write_safetensors(tmp_path / "a", held(tensors), metadata={})
        entries, _ = open_safetensors(tmp_path / "a")
        assert bit_equal(read(entries), tensors)
        # Written again from the file, in the order in which it was read: the same file.
        write_safetensors(tmp_path / "b", entries, metadata={})
        assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
        # Every tensor starts at a multiple of its element.
        for entry in entries.values():
            assert entry.extent.offset % entry.dtype.itemsize == 0

    @pytest.mark.parametrize(
        ("name", "dtype", "word"),
        [
            ("a", torch.complex128, "complex128"),
            ("__metadata__", torch.float32, "called"),
            ("a\ud800", torch.float32, "called"),
        ],
    )
    def test_what_the_format_cannot_hold_is_refused_before_writing(self, tmp_path, name, dtype, word):
        with pytest.raises(RequestError, match=word):
            write_safetensors(tmp_path / "a", held({name: torch.ones(1, dtype=dtype)}), metadata={})
        assert os.listdir(tmp_path) == []


BROKEN = {
    "header too small": b"",
    "<html>": (b"<html>404 not found, try again</html>", "no sound safetensors file: "),
    "absurd length": (struct.pack("<Q", 2**63) + b"{}", "header too large"),
    "dtype of less than a byte": (pack({"a": described("F4", shape=[8])}, b"1234"), "which torch cannot have"),
    "hidden overflow": (pack({"a": described(shape=[0, 2**62, 2**62], offsets=(0, 0))}), ""),
    "many dimensions": (pack({"a": described(shape=[1] * 65)}, b"1234"), "which torch cannot have"),
    # The places of tensors follow from their sizes.
    "overlap": (pack({"a": described(), "b\x1b[2J": described(offsets=(2, 6))}, b"123456"), "no sound safetensors"),
    "data beyond": (pack({"a": described()}, b"12345"), "is truncated, or longer"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_and_hostile_headers(tmp_path, case):
    content, word = BROKEN[case] if isinstance(BROKEN[case], tuple) else (BROKEN[case], case)
    (tmp_path / "a.safetensors").write_bytes(content)
    assert word in refusal(tmp_path / "a.safetensors")
