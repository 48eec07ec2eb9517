"""Folders as trainings and downloads leave them."""

import json
import shutil

import pytest
import torch
from hostile_files import refused
from safetensors.torch import save_file
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint import opening
from opensora_cli.checkpoint.formats.colossal import checkpoint_folder_name, epoch_folders, is_complete
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.writing import write_shards
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.weight_choices import Format, Selection


def weights(value):
    return {"a": torch.full((3, 2), float(value)), "b": torch.full((2,), float(value))}


def is_of(value, path, select=None):
    return bit_equal(read(open_checkpoint(path, select=select).entries), weights(value))


def write_model(folder, value):
    folder.mkdir(parents=True)
    write_shards(folder / "model.safetensors.index.json", held(weights(value)), shard_bytes=20, metadata={})


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

    def test_an_average_of_torch(self, epoch):
        (epoch / "ema.safetensors").unlink()
        torch.save(weights(4), epoch / "ema.pt")
        assert is_of(4, epoch, Selection.EMA)

    def test_what_is_not_there(self, epoch):
        (epoch / "ema.safetensors").unlink()
        with pytest.raises(RequestError, match="has no ema weights: it has model, master"):
            open_checkpoint(epoch, select=Selection.EMA)

    def test_its_model_folder(self, epoch):
        opened = open_checkpoint(epoch / "model")
        assert (opened.format, opened.selections) == (Format.SAFETENSORS_SHARDS, ())
        assert is_of(1, epoch / "model")

    def test_a_model_of_torch_shards(self, epoch):
        shutil.rmtree(epoch / "model")
        (epoch / "model").mkdir()
        torch.save(weights(5), epoch / "model" / "pytorch_model-00001.bin")
        index = {"weight_map": dict.fromkeys(weights(5), "pytorch_model-00001.bin")}
        (epoch / "model" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert is_of(5, epoch)
        assert open_checkpoint(epoch / "model").format is Format.TORCH_SHARDS

    def test_an_interrupted_saving_is_refused(self, epoch):
        (epoch / "running_states.json").unlink()
        assert not is_complete(epoch)
        assert "was not written to its end: it lacks running_states.json" in refused(lambda: open_checkpoint(epoch))
        assert is_of(1, epoch / "model")
        assert is_of(2, epoch / "ema.safetensors")

    def test_a_converted_one_has_only_its_model(self, tmp_path):
        write_model(tmp_path / "a" / "model", 6)
        assert open_checkpoint(tmp_path / "a").format is Format.COLOSSALAI
        assert is_of(6, tmp_path / "a")

    def test_a_part_that_is_a_link_to_elsewhere_is_refused(self, tmp_path, epoch):
        save_file(weights(2), tmp_path / "secret")
        (epoch / "ema.safetensors").unlink()
        (epoch / "ema.safetensors").symlink_to(tmp_path / "secret")
        assert "link out of its folder" in refused(lambda: open_checkpoint(epoch, select=Selection.EMA))

    def test_a_folder_that_holds_itself(self, tmp_path):
        (tmp_path / "model").symlink_to(tmp_path)
        refused(lambda: open_checkpoint(tmp_path))


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

    def test_only_an_unfinished_one(self, epoch):
        (epoch / "running_states.json").unlink()
        (epoch.parent / "epoch0-global_step3").mkdir()
        (epoch.parent / "log.jsonl").write_text("{}\n")
        assert f"{epoch} was not written to its end" in refused(lambda: open_checkpoint(epoch.parent))
        save_file(weights(2), epoch.parent / "transformer.safetensors")
        assert is_of(2, epoch.parent)


class TestOthers:
    def test_several_files(self, tmp_path):
        for name in ("Open_Sora_v2", "hunyuan_vae"):
            save_file(weights(1), tmp_path / f"{name}.safetensors")
        with pytest.raises(RequestError, match=r"several checkpoints: Open_Sora_v2\.safetensors, hunyuan_vae\.safete"):
            open_checkpoint(tmp_path)

    def test_a_safetensors_file_beside_others(self, tmp_path):
        save_file(weights(1), tmp_path / "adapter_model")
        torch.save({"seed": torch.ones(1)}, tmp_path / "rng_state.pth")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "README.md").write_text("# Weights")
        opened = open_checkpoint(tmp_path)
        assert (opened.format, opened.path) == (Format.SAFETENSORS, tmp_path)
        assert is_of(1, tmp_path)

    def test_a_single_file_of_torch(self, tmp_path):
        torch.save(weights(1), tmp_path / "weights")
        assert is_of(1, tmp_path)

    def test_safetensors_shards_beside_single_files_and_those_of_torch(self, tmp_path):
        write_model(tmp_path / "a", 1)
        save_file(weights(2), tmp_path / "a" / "other.safetensors")
        (tmp_path / "a" / "pytorch_model.bin.index.json").write_text("{}")
        assert is_of(1, tmp_path / "a")

    def test_several_indexes(self, tmp_path):
        write_model(tmp_path / "a", 1)
        shutil.copy(tmp_path / "a" / "model.safetensors.index.json", tmp_path / "a" / "b.safetensors.index.json")
        with pytest.raises(RequestError, match="several checkpoints"):
            open_checkpoint(tmp_path / "a")
        assert is_of(1, tmp_path / "a" / "b.safetensors.index.json")

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

    @pytest.mark.parametrize(
        ("save", "name", "missing"),
        [
            (
                save_file,
                "model-00002-of-00004.safetensors",
                "model.safetensors.index.json and, of shards 1 to 4: 1, 3, 4",
            ),
            (
                torch.save,
                "pytorch_model-00001-of-999999999.bin",
                "pytorch_model.bin.index.json and, of shards 1 to 999999999: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...",
            ),
        ],
    )
    def test_so_is_a_single_shard_of_whatever_number(self, tmp_path, save, name, missing):
        save(weights(1), tmp_path / name)
        assert refused(lambda: open_checkpoint(tmp_path)).endswith(f"it lacks {missing}")
        assert is_of(1, tmp_path / name)

    def test_the_only_shard_is_a_whole_and_what_is_being_written_is_ignored(self, tmp_path):
        save_file(weights(1), tmp_path / "model-00001-of-00001.safetensors")
        save_file(weights(2), tmp_path / ".osora-0123456789ab.tmp")
        assert is_of(1, tmp_path)

    def test_nothing(self, tmp_path):
        assert "there is no file" in refused(lambda: open_checkpoint(tmp_path))
        (tmp_path / "README.md").write_text("# Weights")
        (tmp_path / "two\nlines").write_text("# Weights")
        assert "there is only README.md, 'two\\nlines'" in refused(lambda: open_checkpoint(tmp_path))

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

    def test_a_snapshot_of_the_hugging_face_cache(self, tmp_path):
        blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
        write_model(blobs, 1)
        snapshot.mkdir(parents=True)
        for file in list(blobs.iterdir()):
            (snapshot / file.name).symlink_to(file)
        assert is_of(1, snapshot)
