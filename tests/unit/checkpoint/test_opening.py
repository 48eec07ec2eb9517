"""Finding out what a file or folder is by what is in it, whatever it is called."""

import json
import os
import shutil
import tarfile

import pytest
import torch
from hostile_files import refused
from safetensors.torch import save_file
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint import opening
from opensora_cli.checkpoint.formats.colossal import checkpoint_folder_name, epoch_folders, is_complete
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.writing import write_checkpoint
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.exceptions import CheckpointError, RequestError

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


def weights(value):
    return {"a": torch.full((3, 2), float(value)), "b": torch.full((2,), float(value))}


def is_of(value, path, select=None):
    return bit_equal(read(open_checkpoint(path, select=select).entries), weights(value))


def write_model(folder, value):
    write_checkpoint(held(weights(value)), folder, format=Format.SAFETENSORS_SHARDS, shard_bytes=20)


@pytest.fixture
def epoch(tmp_path):
    """A folder as ColossalAI leaves it: the model is all ones, EMA twos, master weights threes."""
    folder = tmp_path / "run" / checkpoint_folder_name(epoch=0, global_step=20)
    write_model(folder / "model", 1)
    save_file(weights(2), folder / "ema.safetensors")
    save_file(weights(3), folder / "master.safetensors")
    (folder / "optimizer").mkdir()
    torch.save({"state": {}}, folder / "optimizer" / "pytorch_optim-00001.bin")
    torch.save({"last_epoch": 1}, folder / "lr_scheduler")
    (folder / "running_states.json").write_text(json.dumps({"epoch": 0, "step": 20}))
    return folder


class TestEpochs:
    def test_the_parts(self, epoch):
        opened = open_checkpoint(epoch)
        assert (opened.format, opened.path, opened.selection) == (Format.COLOSSALAI, epoch, Selection.MODEL)
        assert opened.selections == (Selection.MODEL, Selection.EMA, Selection.MASTER)
        assert {file.parent for file in opened.files} == {epoch / "model"}
        assert len(opened.files) == 3
        assert is_of(1, epoch)
        assert is_of(2, epoch, Selection.EMA)
        assert is_of(3, epoch, Selection.MASTER)
        assert open_checkpoint(epoch, select=Selection.EMA).files == (epoch / "ema.safetensors",)

    def test_an_interrupted_saving_is_refused(self, epoch):
        (epoch / "running_states.json").unlink()
        assert not is_complete(epoch)
        assert "was not written to its end: it lacks running_states.json" in refused(lambda: open_checkpoint(epoch))
        assert is_of(1, epoch / "model")
        assert is_of(2, epoch / "ema.safetensors")

    def test_a_part_that_is_a_link_to_elsewhere_is_refused(self, tmp_path, epoch):
        save_file(weights(2), tmp_path / "secret")
        (epoch / "ema.safetensors").unlink()
        (epoch / "ema.safetensors").symlink_to(tmp_path / "secret")
        assert "link out of its folder" in refused(lambda: open_checkpoint(epoch, select=Selection.EMA))


class TestRuns:
    def test_the_only_one_is_opened(self, epoch):
        assert open_checkpoint(epoch.parent).path == epoch

    def test_of_several_one_must_be_named(self, epoch):
        names = [(0, 100), (2, 5), (10, 100), (0, 3)]
        for number, update in names:
            shutil.copytree(epoch, epoch.parent / checkpoint_folder_name(epoch=number, global_step=update))
        (epoch.parent / "epoch11-global_step200").mkdir()
        (epoch.parent / "epoch11-global_step200" / "optimizer").mkdir()
        (epoch.parent / "tensorboard").mkdir()
        newest = epoch.parent / "epoch10-global_step100"
        assert [folder.name for folder in epoch_folders(epoch.parent)] == [
            *("epoch10-global_step100", "epoch0-global_step100", "epoch0-global_step20"),
            *("epoch2-global_step5", "epoch0-global_step3"),
        ]
        with pytest.raises(RequestError, match="holds 5 checkpoints") as caught:
            open_checkpoint(epoch.parent)
        assert str(newest) in caught.value.hint

    def test_of_a_run_of_this_project_the_newest_is_opened(self, epoch):
        newest = epoch.parent / checkpoint_folder_name(epoch=1, global_step=100)
        shutil.copytree(epoch, newest)
        (epoch.parent / "settings.json").write_text("{}")
        assert open_checkpoint(epoch.parent).path == newest


class TestOthers:
    def test_safetensors_shards_beside_single_files_and_those_of_torch(self, tmp_path):
        write_model(tmp_path / "a", 1)
        save_file(weights(2), tmp_path / "a" / "other.safetensors")
        (tmp_path / "a" / "pytorch_model.bin.index.json").write_text("{}")
        assert is_of(1, tmp_path / "a")

    @pytest.mark.parametrize("part", ["", "model"])
    def test_shards_without_their_index_are_no_checkpoint(self, tmp_path, part):
        write_model(tmp_path / "a" / part, 1)
        (tmp_path / "a" / part / "model.safetensors.index.json").unlink()
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / "a")
        assert caught.value.message == (
            f"{tmp_path / 'a' / part} holds shards without their index: it lacks model.safetensors.index.json"
        )
        assert caught.value.hint == "fetch what is missing; the index maps each tensor to its shard"

    def test_the_only_shard_is_a_whole_and_what_is_being_written_is_ignored(self, tmp_path):
        save_file(weights(1), tmp_path / "model-00001-of-00001.safetensors")
        save_file(weights(2), tmp_path / ".osora-0123456789ab.tmp")
        assert is_of(1, tmp_path)

    def test_only_pointers(self, tmp_path):
        (tmp_path / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        )
        (tmp_path / "README.md").write_text("# Weights")
        assert "a pointer that Git LFS left" in refused(lambda: open_checkpoint(tmp_path))

    def test_a_link_to_elsewhere_is_not_read_even_to_look_what_it_is(self, tmp_path, monkeypatch):
        save_file(weights(1), tmp_path / "secret")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b.safetensors").symlink_to(tmp_path / "secret")
        assert is_of(1, tmp_path / "a" / "b.safetensors")
        monkeypatch.setattr(opening, "read_start", lambda path: pytest.fail(f"{path} was read"))
        assert "link out of its folder" in refused(lambda: open_checkpoint(tmp_path / "a"))
