"""Cache of prompts: entries are whole or absent, the folder stays within its limit, and problems end no run."""

import os

import pytest
import torch
from safetensors.torch import load_file
from tiny_world import RecordingReporter

from opensora_cli.engine.encode.prompt_cache import PromptCache, TextEmbeds

LIMIT = 10**6


def embeds(seed=0, *, dtype=torch.float32, size=64):
    generator = torch.Generator().manual_seed(seed)
    states, pooled = torch.randn(1, 4, size, generator=generator), torch.randn(1, 8, generator=generator)
    return TextEmbeds(states.to(dtype), pooled.to(dtype))


def same(first, second):
    return torch.equal(first.prompt_embeds_1LC, second.prompt_embeds_1LC) and torch.equal(
        first.pooled_prompt_embeds_1V, second.pooled_prompt_embeds_1V
    )


@pytest.fixture
def reporter():
    return RecordingReporter()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "osora" / "prompts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_run_reads_the_same_bits(folder, reporter, dtype):
    given = embeds(dtype=dtype)
    cache = PromptCache(folder)
    assert (cache.read("sea", reporter), folder.parent.exists()) == (None, False)
    cache.keep("sea", given, limit=LIMIT, reporter=reporter)
    cache = PromptCache(folder)
    assert cache.read("rain", reporter) is None
    found = cache.read("sea", reporter)
    assert same(found, given)
    assert found.prompt_embeds_1LC.dtype is dtype
    assert reporter.warnings == []
    tensors = load_file(folder / "sea.safetensors")
    assert same(TextEmbeds(tensors["prompt_embeds"], tensors["pooled_prompt_embeds"]), given)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def of_another_kind(path):
    path.write_text("{}")


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [cut, of_another_kind, empty])
def test_a_broken_entry_is_a_warning_and_is_replaced(folder, reporter, spoil):
    given = embeds()
    PromptCache(folder).keep("sea", given, limit=LIMIT, reporter=reporter)
    spoil(folder / "sea.safetensors")
    cache = PromptCache(folder)
    assert cache.read("sea", reporter) is None
    [warning] = reporter.warnings
    assert warning.startswith(f"{folder / 'sea.safetensors'} is broken: its prompt is encoded again (")
    cache.keep("sea", given, limit=LIMIT, reporter=reporter)
    assert same(PromptCache(folder).read("sea", reporter), given)
    assert len(reporter.warnings) == 1


def aged(folder, name, seconds):
    path = folder / f"{name}.safetensors"
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_the_least_recently_used_entry_is_removed(folder, reporter):
    size = embeds().nbytes + 512
    earlier = PromptCache(folder)
    for name in ("a", "b", "c"):
        earlier.keep(name, embeds(), limit=3 * size, reporter=reporter)
    for name, seconds in (("a", 300), ("b", 200), ("c", 100)):
        aged(folder, name, seconds)
    cache = PromptCache(folder)
    assert cache.read("a", reporter) is not None  # the oldest, used again
    cache.keep("d", embeds(), limit=3 * size, reporter=reporter)
    assert {path.stem for path in folder.iterdir()} == {"a", "c", "d"}


@pytest.mark.parametrize("place", ["file", "above"])
def test_a_folder_that_is_a_file_is_one_warning(folder, reporter, place):
    folder.parent.mkdir()
    if place == "file":
        folder.write_text("")
    else:
        folder.parent.rmdir()
        folder.parent.write_text("")
    cache = PromptCache(folder)
    for name in ("sea", "rain"):
        assert cache.read(name, reporter) is None
        cache.keep(name, embeds(), limit=LIMIT, reporter=reporter)
    [warning] = reporter.warnings
    assert warning.startswith("embeddings of prompts are not cached: ")
