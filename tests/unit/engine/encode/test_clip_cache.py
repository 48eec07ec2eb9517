"""Cache of encoded clips: clips come back bitwise identical; other caches are refused; broken files are named."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
from hostile_files import NO_OBJECTS

from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.data.batches import ClipRequest
from opensora_cli.engine.encode.clip_cache import (
    HEADER_FILE,
    CacheWriter,
    ClipCache,
    is_cache_of,
    write_header,
)
from opensora_cli.engine.encode.clips import EmptyPrompt

IDENTITY = {"autoencoder": "a", "T5": "t"}
REQUEST = ClipRequest(
    path="a.mp4",
    caption="a sea",
    motion_score=None,
    start=0,
    interval=1,
    num_frames=5,
    height=32,
    width=48,
    fps=24.0,
)
EMPTY = EmptyPrompt(torch.arange(8.0).view(2, 4), torch.arange(3.0))


def encoded(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "latents": torch.randn(4, 2, 4, 6, generator=generator),
        "head1": torch.randn(4, 1, 4, 6, generator=generator).bfloat16(),
        "prompt_embeds": torch.randn(2, 4, generator=generator),
        "pooled_prompt_embeds": torch.randn(3, generator=generator),
    }


def other(number):
    return replace(REQUEST, path=f"{number}.mp4")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "cache"
    write_header(folder, IDENTITY, EMPTY)
    return folder


def fill(folder, numbers, **limits):
    writer = CacheWriter(folder, **limits)
    for number in numbers:
        writer.add(other(number), encoded(number))
    writer.flush()


def test_clips_from_several_files_are_bitwise_identical(folder):
    clip_bytes = sum(tensor.nbytes for tensor in encoded(0).values())
    fill(folder, range(5), shard_bytes=2 * clip_bytes)
    assert len(list(folder.glob("clips-*.safetensors"))) == 3
    cache = pickle.loads(pickle.dumps(ClipCache(folder)))
    assert len(cache) == 5
    for number in range(5):
        assert cache.names(other(number)) == set(encoded(number))
        clip, wanted = cache.clip(other(number)), encoded(number)
        assert clip.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert clip[name].dtype == tensor.dtype
            assert torch.equal(clip[name], tensor)
    # With open files it can still be sent to other processes.
    assert torch.equal(pickle.loads(pickle.dumps(cache)).clip(other(0))["latents"], encoded(0)["latents"])
    empty = cache.empty_prompt()
    assert torch.equal(empty.prompt_embeds_LC, EMPTY.prompt_embeds_LC)
    assert torch.equal(empty.pooled_prompt_embeds_V, EMPTY.pooled_prompt_embeds_V)
    with pytest.raises(FileProblem, match=r"lacks 7\.mp4") as error:
        cache.clip(other(7))
    assert "osora data cache" in error.value.hint


def test_the_newest_tensors_of_a_clip_count(folder):
    def add(file, names, *, hour):
        writer = CacheWriter(folder)
        writer.add(REQUEST, {name: encoded(file[1])[name] for name in names}, file=file)
        writer.flush()
        shard = max(folder.glob("clips-*"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(shard, (3600 * hour, 3600 * hour))
        cache, other_file = ClipCache(folder), second if file == first else first
        tensors = cache.clip(REQUEST)
        assert all(torch.equal(tensor, encoded(file[1])[name]) for name, tensor in tensors.items())
        assert cache.names(REQUEST, file=file) == tensors.keys()
        assert not cache.names(REQUEST, file=other_file)
        return {*tensors}

    first, second, latents, every = (10, 5), (10, 3), {"latents"}, {"latents", "head1"}
    assert add(first, every, hour=1) == every
    assert add(second, latents, hour=2) == latents
    assert add(second, {"head1"}, hour=3) == every
    assert add(first, every, hour=4) == every  # back again: the first file is written anew
    assert len([*folder.glob("clips-*")]) == 3


def test_a_cache_of_another_identity_is_refused(folder, tmp_path):
    assert is_cache_of(folder, dict(reversed(IDENTITY.items())))
    assert not is_cache_of(tmp_path / "none", IDENTITY)
    fill(folder, range(1))
    assert is_cache_of(folder, {"T5": IDENTITY["T5"]}, complete=False)
    with pytest.raises(FileProblem, match=r"differs in: autoencoder$"):
        is_cache_of(folder, {"autoencoder": "b"}, complete=False)
    with pytest.raises(FileProblem, match=r"was made for another run, which differs in: autoencoder$") as error:
        is_cache_of(folder, {"T5": IDENTITY["T5"]})
    assert "train_mmdit.cache=FOLDER" in error.value.hint
    with pytest.raises(FileProblem, match=r"differs in: T5, autoencoder, fit$"):
        is_cache_of(folder, {"autoencoder": "b", "T5": "u", "fit": "crop"})


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
@pytest.mark.parametrize("name", [HEADER_FILE, "clips-*.safetensors"])
def test_a_broken_file_is_named(folder, name, kept):
    fill(folder, range(2))
    [path] = folder.glob(name)
    path.write_bytes(path.read_bytes()[:kept])

    def read():
        assert is_cache_of(folder, IDENTITY)
        ClipCache(folder)

    with pytest.raises(CheckpointError, match=path.name) as error:
        read()
    assert "delete it" in error.value.hint


NO_CLIPS = [
    b'{"a": 3}',
    b'{"a": ["latents"]}',
    b'{"a": {}}',
    b'{"a": [[]]}',
    b'{"a": null}',
    b'{"a": {"names": 3, "file": null}}',
]


@pytest.mark.parametrize(
    ("name", "key", "found"),
    [
        *(("clips-0.safetensors", "osora.clips", found) for found in (*NO_OBJECTS, *NO_CLIPS)),
        *((HEADER_FILE, "osora.identity", found) for found in NO_OBJECTS),
    ],
)
def test_broken_metadata_is_named_with_its_file(folder, name, key, found):
    path = folder / name
    write_safetensors(path, {"x": LazyTensor.of(torch.zeros(1))}, metadata={key: found.decode()})
    with pytest.raises(CheckpointError) as caught:
        ClipCache(folder) if is_cache_of(folder, IDENTITY) else None
    assert caught.value.message.startswith(f"{path} is broken: it")
