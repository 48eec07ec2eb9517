"""Checkpoints in several files: the index says where everything is, and may say nothing else."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_weights import bit_equal, held, read

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.writing import plan_shards, write_checkpoint
from opensora_cli.core.choices import Format
from opensora_cli.core.exceptions import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"blocks.{index}.weight": torch.rand(index + 1, 100, generator=generator) for index in range(8)}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    return made


def write(folder, tensors, **options):
    write_checkpoint(held(tensors), folder, format=Format.SAFETENSORS_SHARDS, shard_bytes=6000, **options)


def put(folder, weight_map, shards, **more):
    """Write shards and an index as they are given, whether they agree or not."""
    for name, keys in shards.items():
        save_file({key: torch.ones(2) for key in keys}, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))


def open_in(folder):
    return open_checkpoint(folder / INDEX)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        open_in(folder)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 3000
    return caught.value.message


def test_shards_are_in_order_and_not_too_large():
    entries = held({str(index): torch.zeros(count) for index, count in enumerate([5, 5, 1, 30, 2, 8, 1])})
    assert [list(shard) for shard in plan_shards(entries, 40).values()] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4", "5"],
        ["6"],
    ]
    assert list(plan_shards({}, 40).values()) == [{}]


def test_the_library_reads_the_shards(folder, tensors):
    advanced = []
    write(folder, tensors, advance=advanced.append)
    index = json.loads((folder / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert sorted(os.listdir(folder)) == [*names, INDEX]
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    assert len(names) > 2
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    loaded = {key: load_file(folder / name)[key] for key, name in index["weight_map"].items()}
    assert list(loaded) == list(tensors)
    assert bit_equal(loaded, tensors)
    assert sum(advanced) == index["metadata"]["total_size"]


def test_shards_of_torch(folder, tensors):
    weight_map = {name: f"pytorch_model-{index:05d}-of-00008.bin" for index, name in enumerate(tensors)}
    for name, file in weight_map.items():
        torch.save({name: tensors[name]}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = open_checkpoint(folder)
    assert (opened.format, len(opened.files)) == (Format.TORCH, 9)
    assert bit_equal(read(opened.entries), tensors)


def test_a_single_shard_is_refused(folder, tensors):
    write(folder, tensors)
    shard = sorted(folder.glob("*.safetensors"))[1]
    with pytest.raises(CheckpointError, match=r"is shard 2 of \d, a part of a checkpoint") as caught:
        open_checkpoint(shard)
    assert caught.value.hint == "name the index of the shards, or their folder"


class TestIndexAgainstShards:
    def test_missing_shards_are_listed_all_at_once(self, folder):
        put(folder, {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}, {"2.safetensors": "b"})
        message = refusal(folder)
        assert message.endswith("3 shards, of which 2 are missing: 1.safetensors, 3.safetensors")

    @pytest.mark.parametrize(
        ("weight_map", "shards", "message"),
        [
            ({"a": "1", "b\n": "1"}, {"1": "a"}, f"1 lacks tensors that {INDEX} has in it: 'b\\n'"),
            ({"a": "1"}, {"1": ["a", "b\x1b"]}, f"1 has tensors that {INDEX} has not in it: 'b\\x1b'"),
            ({"a": "1", "b": "2"}, {"1": "a", "2": "ab"}, f"2 has tensors that {INDEX} has not in it: a"),
        ],
    )
    def test_what_the_index_and_a_shard_have_not_in_common(self, folder, weight_map, shards, message):
        put(folder, weight_map, shards)
        assert refusal(folder) == f"{folder}/{message}"

    @pytest.mark.parametrize(
        ("content", "word"),
        [
            ("{}", "weight_map"),
            ('{"weight_map": {"a": 1}}', "weight_map"),
            ('{"weight_map": {}, "metadata": 1}', "weight_map"),
        ],
    )
    def test_what_is_no_index(self, folder, content, word):
        (folder / INDEX).write_text(content)
        assert word in refusal(folder)


@pytest.fixture
def secret(tmp_path):
    """A sound shard that lies outside the folder: were it read, opening would succeed."""
    save_file({"a": torch.ones(2)}, tmp_path / "secret")
    return tmp_path / "secret"


class TestOutsideTheFolder:
    @pytest.mark.parametrize(
        "name",
        ["sub/../../secret", "..", "", "/etc/passwd", "sub\\..\\..\\secret", "C:secret", "a\0b", "a\nb"],
    )
    def test_names_that_point_there(self, folder, secret, name):
        (folder / "sub").mkdir()
        put(folder, {"a": name}, {})
        assert "outside its folder" in refusal(folder)

    def test_a_link_there(self, folder, secret):
        put(folder, {"a": "1"}, {})
        (folder / "1").symlink_to("../secret")
        assert "is a link out of its folder" in refusal(folder)

    def test_an_index_that_is_a_link_there(self, folder, tmp_path):
        put(tmp_path, {"a": "1"}, {"1": "a"})
        (folder / INDEX).symlink_to(tmp_path / INDEX)
        assert "is a link out of its folder" in refusal(folder)

    def test_links_and_names_that_stay_inside(self, folder):
        (folder / "sub").mkdir()
        put(folder, {"a": "1", "b": "sub/2"}, {"sub/2": "b", "real": "a"})
        (folder / "1").symlink_to("real")
        assert sorted(open_in(folder).entries) == ["a", "b"]


class TestHubCache:
    @pytest.fixture
    def repo(self, tmp_path):
        """A repository in the Hugging Face cache, as huggingface_hub makes it."""
        repo = tmp_path / "models--org--name"
        snapshot = repo / "snapshots" / "0123abc" / "text_encoder"
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        save_file({"a": torch.ones(2)}, repo / "blobs" / "cafe")
        (repo / "blobs" / "face").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
        for folder, up in ((snapshot, "../../.."), (snapshot.parent, "../..")):
            (folder / "1.safetensors").symlink_to(f"{up}/blobs/cafe")
            (folder / INDEX).symlink_to(f"{up}/blobs/face")
        return repo

    @pytest.mark.parametrize("part", ["snapshots/0123abc", "snapshots/0123abc/text_encoder"])
    def test_its_links_are_followed(self, repo, part):
        opened = open_in(repo / part)
        assert list(opened.entries) == ["a"]
        assert [file.name for file in opened.files] == [INDEX, "1.safetensors"]

    def test_a_blob_that_leads_on_is_not(self, repo, secret):
        (repo / "blobs" / "cafe").unlink()
        (repo / "blobs" / "cafe").symlink_to(secret)
        assert "is a link out of its folder" in refusal(repo / "snapshots" / "0123abc")
