"""Generating in less memory: the same videos, and a second attempt when the memory is not enough."""

import shutil
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from safetensors.torch import load_file, save_file
from tiny_world import released_settings

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.generate import decode, denoise
from opensora_cli.engine.generate import models as generate_models
from opensora_cli.engine.generate import text as generate_text
from opensora_cli.engine.generate.chain import alone
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.generate.sample import Sample
from opensora_cli.media.read import read_video
from opensora_cli.settings.devices import HostWeights, OffloadMode

PICTURE = {"condition__mode": "i2v_head", "model__depth_single_blocks": "1", "output__save_latents": "false"}
BLOCK_BY_BLOCK = {
    "mode": OffloadMode.BLOCKS,
    "resident_blocks": 1,
    "host_weights": HostWeights.MAPPED,
    "chunk_tokens": 2048,
}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")


@pytest.fixture(scope="module")
def plan(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offloaded")
    return make_plan(released_settings(world, folder, condition__references=str(world.picture), **PICTURE))


@pytest.fixture(scope="module")
def resident(plan):
    """Latents and frames of a run with all weights on the device."""
    return latents_and_frames(plan, SilentReporter())


def with_t5_in(dtype, world, folder):
    """Return a world whose T5 has its weights in another dtype."""
    released = folder / "cast"
    shutil.copytree(world.released, released)
    [file] = released.glob("**/t5-v1_1-xxl/model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return replace(world, released=released)


def with_offload(plan, **offload):
    return replace(plan, offload=OffloadPlan(modulation_on_host=plan.offload.modulation_on_host, **offload))


def latents_and_frames(plan, reporter):
    """Return the latents of the one sample, and the frames of its video."""
    record = Events(reporter)
    with torch.inference_mode(), LoadedModels() as models:
        [embeds] = generate_text.text_embeds(plan, models, record)
        sample = Sample(alone(plan), plan, sample_files(plan.settings, 0), references_of(plan, reporter))
        denoise.denoise_samples([sample], [embeds], models, record)
        latents = sample.denoised.latents_CTHW
        with models.autoencoder(plan, record) as autoencoder:
            frames = torch.cat([*decode.decode_latents(plan, autoencoder, latents)])
        return latents, frames


@pytest.mark.parametrize(
    "offload",
    [
        {"mode": OffloadMode.MODEL},
        pytest.param(
            {"mode": OffloadMode.BLOCKS, "resident_blocks": 1, "host_weights": HostWeights.MAPPED},
            marks=pytest.mark.slow,
        ),
        {"mode": OffloadMode.BLOCKS, "resident_blocks": 2, "host_weights": HostWeights.PINNED},
        {"stream_text": True},
    ],
    ids=str,
)
def test_moving_weights_changes_nothing(plan, resident, offload, reporter):
    latents, frames = resident
    moved_latents, moved_frames = latents_and_frames(with_offload(plan, **offload), reporter)
    assert torch.equal(moved_latents, latents)
    assert torch.equal(moved_frames, frames)


@pytest.mark.parametrize(
    "offload", [{"chunk_tokens": 5, "chunk_frames": 2}, {"chunk_frames": 1, "store_on_host": True}], ids=str
)
def test_chunks_change_no_more_than_rounding(plan, resident, offload, reporter):
    latents, frames = resident
    chunked_latents, chunked_frames = latents_and_frames(with_offload(plan, **offload), reporter)
    assert_close(chunked_latents, latents)
    assert (chunked_frames.int() - frames.int()).abs().max() <= 1


@pytest.mark.parametrize("in_8_bits", [{"fp8_storage": True}, {"linear": LinearProducts.INT8}], ids=str)
def test_8_bits_change_little_and_are_the_same_streamed(plan, resident, reporter, in_8_bits):
    latents, _ = resident
    coarse, _ = latents_and_frames(with_offload(plan, **in_8_bits), reporter)
    streams = {"mode": OffloadMode.BLOCKS, "resident_blocks": 1}
    streamed, _ = latents_and_frames(with_offload(plan, **in_8_bits, **streams), reporter)
    assert not torch.equal(coarse, latents)
    assert (coarse - latents).norm() < 0.05 * latents.norm()
    assert torch.equal(streamed, coarse)


class TestSecondAttempt:
    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, world, tmp_path_factory):
        return generate(released_settings(world, tmp_path_factory.mktemp("expected"))).videos[0].path

    @pytest.mark.parametrize(
        ("module", "name", "stage", "stronger"),
        [
            (denoise, "sample_latents", "denoise", BLOCK_BY_BLOCK),
            (generate_models, "load_transformer", "load", BLOCK_BY_BLOCK),
            (decode, "decode_latents", "decode", {"chunk_frames": 4, "store_on_host": True}),
        ],
    )
    def test_each_stage(self, world, tmp_path, monkeypatch, reporter, expected, module, name, stage, stronger):
        calls, function = [], getattr(module, name)

        def failing(*args, **options):
            calls.append(args)
            if len(calls) == 1:
                raise OUT_OF_MEMORY
            return function(*args, **options)

        monkeypatch.setattr(module, name, failing)
        [retried] = generate(released_settings(world, tmp_path), reporter=reporter).videos
        assert len(calls) == 2
        [warning] = [text for text in reporter.warnings if "out of memory" in text]
        assert warning.startswith(f"out of memory in the stage {stage}: CUDA out of memory")
        assert warning.endswith(f"retrying with: {'; '.join(OffloadPlan(**stronger).lines())}")
        shown, again = (read_video(path).frames_THWC.int() for path in (expected, retried.path))
        # What rounding changes, compression spreads.
        assert (shown - again).abs().float().mean() < 2

    def test_text_that_is_cast_is_cast_layer_by_layer_from_the_first_and_has_no_more_to_give_up(
        self, world, tmp_path, reporter
    ):
        settings = released_settings(with_t5_in(torch.bfloat16, world, tmp_path), tmp_path)
        plan, record = make_plan(settings), Events(reporter)
        assert plan.offload.stream_text
        assert plan.with_stronger_offload("text") is None
        [embeds], [expected] = (
            generate_text.text_embeds(replace(plan, offload=offload), LoadedModels(), record)
            for offload in (plan.offload, replace(plan.offload, stream_text=False))
        )
        assert torch.equal(embeds.prompt_embeds_2LC, expected.prompt_embeds_2LC)
        assert torch.equal(embeds.pooled_prompt_embeds_2V, expected.pooled_prompt_embeds_2V)
        # Two ranks compute a half of each layer.
        assert not make_plan(settings.replace({"parallel.gpus": 2})).offload.stream_text

    def test_finished_samples_are_not_denoised_again(self, world, tmp_path, monkeypatch, reporter):
        seeds, sample_latents = [], denoise.sample_latents

        def failing(*args, **options):
            seeds.append(options["seed"])
            if len(seeds) == 2:
                raise OUT_OF_MEMORY
            return sample_latents(*args, **options)

        monkeypatch.setattr(denoise, "sample_latents", failing)
        result = generate(released_settings(world, tmp_path, sampling__num_samples="3"), reporter=reporter)
        assert [seed - seeds[0] for seed in seeds] == [0, 1, 1, 2]
        assert len(result.videos) == 3
