"""Filling a cache: clips are encoded once, and training on the cache equals training on the clips."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import tiny_clips
import tiny_frozen
import tiny_training
import tiny_world
import torch
from safetensors.torch import load_file
from torch import nn

from opensora_cli.checkpoint import lazy
from opensora_cli.core import files as core_files
from opensora_cli.core import limits
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import BatchError, FileProblem, MediaError
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.encode import clip_cache
from opensora_cli.engine.encode.clip_cache import HEADER_FILE, ClipCache, cache_clips
from opensora_cli.engine.encode.clips import ALWAYS_CACHED, Encoders
from opensora_cli.engine.encode.datasets import TableSource, open_batches, open_table
from opensora_cli.engine.train.build import open_clips_cache
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives import mmdit
from opensora_cli.media.write import write_media
from opensora_cli.models.mmdit.model import MMDiT

CPU = torch.device("cpu")


def settings_of(weights, cache, *, clips=6, **changes):
    settings = tiny_training.mmdit_settings("unused", weights)
    table = tiny_training.table_of(clips, weights)
    return settings.replace(
        {"data.table": table, "train_mmdit.cache": None if cache is None else str(cache), **changes}
    )


def all_requests(settings):
    return [*open_table(settings, fixed_starts=True).requests()]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Give every run one thread: the rounding of sums depends on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.object(limits, "read_cores", return_value=(1, None)):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tiny_frozen.save_frozen_parts(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def filled_once(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled") / "cache"
    cache_clips(settings_of(weights, folder))
    return folder


@pytest.fixture
def filled(filled_once, weights, tmp_path):
    """Settings whose cache has all clips already."""
    shutil.copytree(filled_once, tmp_path / "cache")
    return settings_of(weights, tmp_path / "cache")


def prepared(settings, reporter=None):
    reporter = reporter or tiny_world.RecordingReporter()
    return open_clips_cache(settings, distribution=Distribution(CPU), reporter=reporter)


def test_clips_are_encoded_once_and_more_are_added(weights, tmp_path):
    settings, reporter = settings_of(weights, tmp_path / "cache"), tiny_world.RecordingReporter()
    report = cache_clips(settings_of(weights, tmp_path / "cache", clips=4), reporter=reporter)
    assert (report.clips, report.encoded, report.failed) == (4, 4, ())
    assert reporter.advanced["encode"] == reporter.totals["encode"] == 4
    report = cache_clips(settings)
    assert (report.clips, report.encoded) == (6, 2)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    # Weights of modes, dropouts and the objective do not change what is encoded.
    changes = {"train_mmdit.mode_weights.t2v": 1, "train_mmdit.t5_dropout": 0, "train_mmdit.masked_loss": True}
    again = cache_clips(settings.replace(changes), reporter=reporter)
    assert (again.clips, again.encoded) == (6, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == files
    assert reporter.stages.count("encode") == 1


def task_of(settings, module, cache):
    with mock.patch.object(mmdit, "build_transformer", return_value=module):
        return mmdit.OBJECTIVE.build(
            settings,
            distribution=Distribution(CPU),
            clips=cache,
            token_weights=None,
            reporter=tiny_world.RecordingReporter(),
        )


def losses(settings, *, micro_batches):
    cache = prepared(settings)
    torch.manual_seed(0)
    module = MMDiT(mmdit_config(settings.model))
    nn.init.normal_(module.final_layer.linear.weight)
    nn.init.normal_(module.cond_in.weight)
    task = task_of(settings, module, cache)
    batches = open_batches(
        settings,
        data_rank=0,
        data_ranks=1,
        reporter=tiny_world.RecordingReporter(),
        load=cache.clip if cache else None,
    )
    given = [batches.next() for _ in range(micro_batches)]
    batches.close()
    assert all((batch.cached is None) == (cache is None) for batch in given)
    return [task.loss(batch, SampleRng.of(0, batch.number))[0].item() for batch in given]


def test_training_on_the_cache_is_bitwise_identical_to_training_on_the_clips(filled):
    kinds = [filled.replace({"data.workers": 1, **changes}) for changes in ({"train_mmdit.cache": None}, {})]
    fresh, cached = (losses(settings, micro_batches=4) for settings in kinds)  # over the end of the epoch
    assert fresh == cached
    assert len(set(cached)) == 4


def test_broken_clips_are_reported_and_retried(weights, tmp_path, monkeypatch):
    settings = settings_of(weights, tmp_path / "cache")
    bad = all_requests(settings)[2]
    read = TableSource.read

    def broken(self, request):
        if request == bad:
            raise MediaError("it is broken")
        return read(self, request)

    monkeypatch.setattr(TableSource, "read", broken)
    report = cache_clips(settings)
    assert (report.clips, report.encoded) == (5, 5)
    with pytest.raises(BatchError, match="1 of 6 clips could not be read"):
        report.raise_for_problems()
    assert report.to_json()["failed"] == [{"path": bad.path, "reason": "it is broken"}]
    assert report.lines()[1] == f"failed  {bad.path}: it is broken"
    reporter = tiny_world.RecordingReporter()
    assert not prepared(settings, reporter=reporter).names(bad)
    assert reporter.warnings == [f"skipped: {bad.path} (it is broken)"]
    monkeypatch.undo()
    whole = cache_clips(settings)
    whole.raise_for_problems()
    assert whole.encoded == 1


def test_a_clip_whose_file_was_replaced_is_encoded_again(weights, tmp_path):
    table = tiny_clips.clip_table(tmp_path, clips=2, pictures=1, num_frames=13)
    changes = {"data.table": str(table), "data.buckets": {"64px": {1: (1.0, 1), 13: (1.0, 1)}}}
    settings = settings_of(weights, tmp_path / "cache", **changes)
    before = prepared(settings)
    requests = {Path(request.path).name: request for request in all_requests(settings)}
    held = {name: before.clip(request) for name, request in requests.items()}
    path, noise = tmp_path / "clip_1.mp4", torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (13, 64, 64, 3), dtype=torch.uint8, generator=noise)
    write_media([pixels], path, fps=tiny_clips.FPS, format="mp4")
    os.utime(path, (0, 0))  # another file may be an older one

    report = cache_clips(settings)
    assert (report.clips, report.encoded) == (3, 1)
    cache = ClipCache(tmp_path / "cache")
    for name, request in requests.items():
        now = cache.clip(request)
        changed = {each for each, tensor in held[name].items() if not torch.equal(tensor, now[each])}
        assert now.keys() == held[name].keys()
        assert changed == (
            {"latents", *(part for part in now if part[:4] in ("head", "tail"))} if name == path.name else set()
        )
    assert cache_clips(settings).encoded == 0
    # Training from the cache needs no files.
    path.unlink()
    assert cache_clips(settings).encoded == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vae.scale_factor": 0.5}, "autoencoder's settings"),
        ({"text.t5_max_length": 7}, "text lengths"),
        ({"train_mmdit.add_fps": False}, "captions"),
        ({"data.fit": "pad"}, "fit"),
        ({"train_mmdit.frozen_dtype": "bfloat16"}, "precision"),
    ],
)
def test_a_cache_of_other_settings_is_refused(filled, changes, named):
    reporter = tiny_world.RecordingReporter()
    with pytest.raises(FileProblem, match=rf"which differs in: {named}$"):
        cache_clips(filled.replace(changes), reporter=reporter)
    assert reporter.stages == []  # before files are hashed


def test_a_cache_of_other_weights_is_refused(filled, weights, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("t5", "clip"):
        (other / name).symlink_to(weights / name)
    content = bytearray((weights / "vae.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "vae.safetensors").write_bytes(content)
    with pytest.raises(FileProblem, match=r"which differs in: autoencoder$"):
        prepared(settings_of(other, tmp_path / "cache"))


def test_a_cache_that_another_run_begins_meanwhile_is_kept(filled, weights, tmp_path, monkeypatch):
    folder = tmp_path / "new"
    load = clip_cache.load_encoders

    def load_slowly(*arguments, **keywords):
        folder.mkdir()
        shutil.copy(Path(filled.train_mmdit.cache) / HEADER_FILE, folder)
        return load(*arguments, **keywords)

    monkeypatch.setattr(clip_cache, "load_encoders", load_slowly)
    with pytest.raises(FileProblem, match="was made for another run, which differs in: captions"):
        cache_clips(settings_of(weights, folder, **{"train_mmdit.add_fps": False}))
    assert not [*folder.glob("clips-*")]


def test_another_mode_adds_only_its_references(weights, filled_once, tmp_path, monkeypatch):
    all_modes = settings_of(weights, tmp_path / "cache")
    few = all_modes.replace({f"train_mmdit.mode_weights.{mode}": 0 for mode in CONDITION_MODES if mode != "t2v"})
    cache_clips(few)
    [request, *_] = all_requests(few)
    assert ClipCache(tmp_path / "cache").names(request) == set(ALWAYS_CACHED)
    encoded = []
    encode = Encoders.latents
    monkeypatch.setattr(Encoders, "latents", lambda self, pixels: encoded.append(len(pixels)) or encode(self, pixels))
    report = cache_clips(all_modes)
    assert (report.clips, report.encoded) == (6, 6)
    assert sorted(encoded) == [1] * 12 + [5] * 12 + [9] * 12
    assert cache_clips(few).encoded == cache_clips(all_modes).encoded == 0
    clip = prepared(few).clip(request)
    at_once = ClipCache(filled_once).clip(request)
    assert clip.keys() == at_once.keys()
    assert all(torch.equal(tensor, at_once[name]) for name, tensor in clip.items())


def test_training_reads_no_frozen_weights(filled, tmp_path, monkeypatch):
    monkeypatch.setattr(clip_cache, "load_encoders", lambda *_, **__: pytest.fail("frozen parts are loaded"))
    monkeypatch.setattr(mmdit, "load_encoders", lambda *_, **__: pytest.fail("frozen parts are loaded"))
    cache = prepared(filled)
    assert isinstance(cache, ClipCache)
    assert (tmp_path / "cache" / HEADER_FILE).exists()
    task_of(filled, MMDiT(mmdit_config(filled.model)), cache)


class Ended(BaseException):
    """An exception that nothing catches, like a kill."""


def end_at(step, monkeypatch):
    """End the process after `step` steps: clips read, pieces written, files flushed and renamed."""
    left = [step]

    def watched(function):
        def stepping(*args, **options):
            left[0] -= 1
            if not left[0]:
                raise Ended
            return function(*args, **options)

        return stepping

    monkeypatch.setattr(TableSource, "read", watched(TableSource.read))
    monkeypatch.setattr(lazy, "write_all", watched(lazy.write_all))
    monkeypatch.setattr(core_files, "_flush_to_disk", watched(core_files._flush_to_disk))
    monkeypatch.setattr(Path, "replace", watched(Path.replace))
    # A killed process removes no temporary files.
    monkeypatch.setattr(core_files, "remove", watched(core_files.remove))


@pytest.mark.parametrize("stride", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_a_filling_that_ended_at_any_step_continues_to_the_same_bytes(weights, tmp_path, monkeypatch, stride):
    settings = settings_of(weights, tmp_path / "whole", clips=3, threads=1)
    cache_clips(settings)
    whole = tensors_of(tmp_path / "whole")
    ended, step = 0, 1
    while True:
        cache = tmp_path / f"ended{step}"
        settings = settings_of(weights, cache, clips=3, threads=1)
        with monkeypatch.context() as patched:
            end_at(step, patched)
            try:
                cache_clips(settings)
            except Ended:
                ended, step = ended + 1, step + stride
            else:
                break
        cache_clips(settings)
        assert tensors_of(cache) == whole
    assert ended * stride >= 10


def tensors_of(cache):
    """Return the bytes of every tensor by name, whatever the file."""
    found = {}
    for path in cache.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            content = tensor.numpy().tobytes()
            assert found.setdefault(name, content) == content
    return found
