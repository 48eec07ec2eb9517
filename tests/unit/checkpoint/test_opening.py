"""Finding out what a file is by what is in it, whatever it is called."""

import os
import tarfile

import pytest
import torch
from hostile_files import refused
from safetensors.torch import save_file
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import Format
from opensora_cli.core.exceptions import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3)}
ENTRIES = held(TENSORS)


WRITERS = {save_file: Format.SAFETENSORS, torch.save: Format.TORCH}


@pytest.mark.parametrize("name", ["a", "model.safetensors.index.json"])
@pytest.mark.parametrize("write", WRITERS)
def test_formats_are_found_by_content_not_name(tmp_path, write, name):
    write(TENSORS, tmp_path / name)
    opened = open_checkpoint(tmp_path / name)
    assert (opened.format, opened.path, opened.files) == (WRITERS[write], tmp_path / name, (tmp_path / name,))
    assert bit_equal(read(opened.entries), TENSORS)


@pytest.mark.parametrize(
    ("content", "reason", "hint"),
    [
        (b"", "is empty", "fetch it again"),
        (b"GGUF\3\0\0\0" + bytes(64), "is a GGUF file, which osora does not read", "get the safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer that Git LFS left", "git lfs pull"),
        (b"\n<!DOCTYPE html>\n<html><body>Sign in</body></html>", "a web page", "logged in"),
        (b"<html>", "a web page", "logged in"),
        (b"PK\x05\x06" + bytes(18), "begins with b'PK", None),
        (b"\x89PNG\r\n\x1a\n", "begins with b'\\x89PNG", None),
        (b'{"error": "Repository not found"}', "no weight_map", None),
        (b"{", "is broken: no JSON", None),
        (bytes(1000), "begins with b'\\x00", None),
        (b"\x80\x02N.", "is a file of torch.save", "ends in .pt"),
    ],
)
def test_other_files_are_refused_with_a_hint(tmp_path, content, reason, hint):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "a.safetensors")
    assert reason in caught.value.message
    assert "a.safetensors" in caught.value.message
    if hint is not None:
        assert hint in caught.value.hint


def test_a_tarball_of_an_old_torch_is_refused(tmp_path):
    (tmp_path / "pickle").write_bytes(b"\x80\x02N.")
    with tarfile.open(tmp_path / "a.pt", "w") as archive:
        archive.add(tmp_path / "pickle", "pickle")
    assert "a tar archive" in refused(lambda: open_checkpoint(tmp_path / "a.pt"))


def test_missing_files_are_refused(tmp_path):
    assert "does not exist" in refused(lambda: open_checkpoint(tmp_path / "a"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "does not exist" in refused(lambda: open_checkpoint(tmp_path / "link"))
    refused(lambda: open_checkpoint(tmp_path / ("a" * 300)))
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "a\0b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a")
    assert "is not a file" in refused(lambda: open_checkpoint(tmp_path / "a"))
    assert "holds no checkpoint" in refused(lambda: open_checkpoint(tmp_path))
