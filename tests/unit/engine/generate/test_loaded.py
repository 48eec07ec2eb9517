"""Models that are loaded: which stay, which make room, and which are other ones after a change."""

import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_transformer import transformer
from tiny_weights import bit_equal, converted
from tiny_world import demo_settings, released_settings
from torch._dynamo.utils import counters

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.components.weights import Component, find_weights
from opensora_cli.engine.estimate.offload import AUTOENCODER, TEXT_ENCODERS, TRANSFORMER, OffloadPlan
from opensora_cli.engine.generate import models as generate_models
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, host_modulation, load_transformer, move_except, retried
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.run import generate
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.models.attention import BACKENDS

pytestmark = pytest.mark.usefixtures("without_estimates")

ALL = {TEXT_ENCODERS, TRANSFORMER, AUTOENCODER}
LENDERS = {
    "text": LoadedModels.text_encoders,
    "denoise": LoadedModels.transformer,
    "encode": LoadedModels.autoencoder,
    "decode": LoadedModels.autoencoder,
}


@pytest.fixture
def plan(world, tmp_path):
    return make_plan(demo_settings(world, tmp_path))


@pytest.fixture
def record(reporter):
    return Events(reporter)


def changed(plan, **changes):
    return make_plan(plan.settings.replace({key.replace("__", "."): value for key, value in changes.items()}))


def lend(models, plan, record, stage):
    """Begin a stage as a run does, and return its model."""
    models.make_room(plan, stage)
    with LENDERS[stage](models, plan, record) as model:
        return model


def lend_all(models, plan, record):
    return {stage: lend(models, plan, record, stage) for stage in ("text", "denoise", "decode")}


def test_a_run_has_no_more_than_its_plan_keeps(plan, record):
    with LoadedModels() as models:
        for stage, left in (
            ("text", {TEXT_ENCODERS}),
            ("encode", {AUTOENCODER}),
            ("denoise", {AUTOENCODER, TRANSFORMER}),
            ("decode", {AUTOENCODER}),
        ):
            lend(models, plan, record, stage)
            assert set(models.names) == left
    assert models.names == ()


def test_models_that_stay_are_the_same(plan, record, reporter):
    models = LoadedModels(stay=True)
    first = lend_all(models, models.planned(plan), record)
    assert set(models.names) == ALL
    assert reporter.stages.count("load") == 3
    again = lend_all(models, models.planned(plan), record)
    assert all(again[stage] is first[stage] for stage in first)
    assert reporter.stages.count("load") == 3


@pytest.mark.parametrize(
    ("changes", "reloaded"),
    [
        ({"sampling__seed": 7, "video__num_frames": 5, "runtime__attention": "math"}, []),
        ({"text__t5_max_length": 12}, ["text"]),
        ({"vae__sample_tsize": 32}, ["decode"]),
        ({"memory__fp8_storage": True}, ["denoise"]),
        ({"runtime__dtype": "bfloat16"}, ["text", "denoise", "decode"]),
    ],
    ids=str,
)
def test_only_what_changes_is_loaded_again(plan, record, changes, reloaded):
    models = LoadedModels(stay=True)
    first = lend_all(models, models.planned(plan), record)
    other = models.planned(changed(plan, **changes))
    again = lend_all(models, other, record)
    assert {stage for stage in first if again[stage] is not first[stage]} == set(reloaded)
    weight = next(again["denoise"].parameters())
    assert weight.dtype is other.hardware.dtype
    assert again["denoise"].attention is BACKENDS[other.attention.backend]


def test_weights_that_change_on_disk_are_loaded_again(world, plan, record):
    models = LoadedModels(stay=True)
    first = lend(models, models.planned(plan), record, "decode")
    path = world.demo / plan.settings.files.vae
    path.touch()
    assert lend(models, models.planned(plan), record, "decode") is not first


def test_one_that_fails_is_gone_and_the_others_stay(plan, record):
    models = LoadedModels(stay=True)
    plan = models.planned(plan)
    lend_all(models, plan, record)
    with pytest.raises(KeyboardInterrupt), models.transformer(plan, record):
        raise KeyboardInterrupt
    assert set(models.names) == ALL - {TRANSFORMER}


def test_nothing_stays_where_one_model_at_a_time_was_asked_for(plan, record):
    models = LoadedModels(stay=True)
    lend_all(models, models.planned(changed(plan, memory__offload="model")), record)
    assert models.names == (AUTOENCODER,)


def test_what_is_loaded_counts_as_room(plan, record):
    models = LoadedModels(stay=True)
    lend_all(models, models.planned(plan), record)
    # One byte each: see `small_stages`.
    assert models.bytes_on(plan.hardware.device) == 3
    assert models.bytes_on(torch.device("meta")) == 0
    models.release()
    assert models.bytes_on(plan.hardware.device) == 0


class TestOutOfMemory:
    def run(self, models, plan, record, *, failures):
        """Denoise, and run out of memory so often; returns what was loaded beside in each attempt, and the plan."""
        attempts = []

        def denoise(plan):
            with models.transformer(plan, record):
                attempts.append(set(models.names) - {TRANSFORMER})
                if len(attempts) <= failures:
                    raise OutOfMemoryError("out of memory")

        lend(models, plan, record, "text")
        lend(models, plan, record, "decode")
        return attempts, retried(denoise, plan, "denoise", models, record)[1]

    def test_the_others_go_first_and_then_the_offload_is_stronger(self, plan, record, reporter):
        for failures in (1, 2):
            models = LoadedModels(stay=True)
            found, last = self.run(models, models.planned(plan), record, failures=failures)
            assert found == [{TEXT_ENCODERS, AUTOENCODER}, *[set()] * failures]
            stronger = plan if failures == 1 else plan.with_stronger_offload("denoise")
            assert last.offload == stronger.offload
            # They would be in the way again.
            assert models.planned(plan) is plan
        assert reporter.warnings[0] == "out of memory; retrying with one model loaded at a time"
        assert len(reporter.warnings) == 3

    def test_that_does_not_end_is_an_error(self, plan, record):
        models = LoadedModels(stay=True)
        with pytest.raises(OutOfMemoryError):
            self.run(models, models.planned(plan), record, failures=3)
        assert models.names == ()


@pytest.mark.slow
def test_samples_seeds_and_prompts_of_several_runs_share_the_graphs(world, tmp_path, monkeypatch, reporter):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(generate_models, "compile_blocks", partial(compile_blocks, backend="eager"))
    settings = demo_settings(world, tmp_path, compile="true", sampling__num_samples="2")
    first = generate(settings, reporter=reporter)
    second = generate(settings.replace({"prompt": "sea", "sampling.seed": 7}), reporter=reporter)
    assert len(first.videos) == len(second.videos) == 2
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert reporter.warnings == []
    torch._dynamo.reset()


def file_of(settings, component):
    path = find_weights(settings).path(component)
    return path / "model.safetensors" if component in (Component.T5, Component.CLIP) else path


LOADERS = [(Component.T5, "load_t5"), (Component.TRANSFORMER, "load_transformer"), (Component.VAE, "load_autoencoder")]


@pytest.mark.parametrize(("component", "loader"), LOADERS)
def test_a_file_that_is_cut_short_before_it_is_loaded_is_named(world, tmp_path, monkeypatch, component, loader):
    own = shutil.copytree(world.demo, tmp_path / "demo")
    settings = demo_settings(replace(world, demo=own), tmp_path, video__num_frames="1")
    function, cut = getattr(generate_models, loader), []

    def cutting(first, *args, **options):
        if not cut:
            cut.append(file_of(settings, component))
            os.truncate(cut[0], cut[0].stat().st_size // 2)
        return function(first, *args, **options)

    monkeypatch.setattr(generate_models, loader, cutting)
    with pytest.raises(CheckpointError) as caught:
        generate(settings)
    assert cut[0].name in str(caught.value.message) or str(cut[0].parent) in caught.value.message


TRANSFORMER_FILE, VAE_FILE = "Open_Sora_v2.safetensors", "hunyuan_vae.safetensors"


def load_vae(plan):
    path, hardware = plan.weights.path(Component.VAE), plan.hardware
    return load_autoencoder(plan.settings.vae, path, device=hardware.device, dtype=hardware.dtype)


@pytest.mark.parametrize("format", ["safetensors-shards", "torch", "dcp", "colossalai"])
def test_every_form(world, tmp_path, format):
    weights = tmp_path / "weights"
    shutil.copytree(world.released, weights, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in (TRANSFORMER_FILE, VAE_FILE):
        shards = {"shard_size": "20KB"} if "shards" in format else {}
        # A name that says nothing: content decides.
        converted(world.released / name, weights / name.removesuffix(".safetensors"), format=format, **shards)
    names = {"files__transformer": "Open_Sora_v2", "files__vae": "hunyuan_vae"}
    plan = make_plan(released_settings(world, tmp_path, runtime__weights=str(weights), **names))
    assert plan.weights.path(Component.VAE) == weights / "hunyuan_vae"
    original = make_plan(released_settings(world, tmp_path))
    for load in (load_transformer, load_vae):
        assert bit_equal(load(plan).state_dict(), load(original).state_dict())


def test_the_fused_layout(world, tmp_path):
    weights = shutil.copytree(world.released, tmp_path / "weights")
    (weights / TRANSFORMER_FILE).unlink()
    converted(world.released / TRANSFORMER_FILE, weights / TRANSFORMER_FILE, qkv="fused")
    plan = make_plan(released_settings(world, tmp_path, runtime__weights=str(weights)))
    original = make_plan(released_settings(world, tmp_path))
    assert bit_equal(load_transformer(plan).state_dict(), load_transformer(original).state_dict())


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_modulation_alone_stays_where_it_is(in_8_bits):
    model = transformer().requires_grad_(False)
    block = model.double_blocks[0]
    if in_8_bits:
        store_in_fp8(block)
    move_except(host_modulation(model, OffloadPlan(modulation_on_host=True)), block, torch.device("meta"))
    here = {name for name, weight in block.named_parameters() if not weight.is_meta}
    kinds = ("weight", "bias", "weight_scale") if in_8_bits else ("weight", "bias")
    assert here == {f"{stream}_mod.lin.{kind}" for stream in ("img", "txt") for kind in kinds}
    move_except([], block, torch.device("meta"))
    assert all(weight.is_meta for weight in block.parameters())
