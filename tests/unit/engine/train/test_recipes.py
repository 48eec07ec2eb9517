"""The packaged recipes: they parse, agree with the reference, and learn when they are shrunk."""

from pathlib import Path

import pytest
import tiny_clips
import tiny_training
import tiny_world
import torch
from safetensors.torch import load_file
from tiny_autoencoders import moving_clip

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.encode.datasets import open_batches
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.train.build import build_task
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.estimate import estimate_training
from opensora_cli.engine.train.memory import plan_activations, plan_frozen_weights
from opensora_cli.engine.train.run import train
from opensora_cli.media.read import read_video
from opensora_cli.media.write import write_media
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.train import TrainSettings, load_train_settings

STAGES = ("image", "stage1", "stage1_i2v", "stage2", "stage2_i2v", "high_compression")
STEPS = 20
SIZE, FRAMES, FPS = 64, 9, 24.0

TINY = {
    "data.workers": "0",
    "device": "cpu",
    "model.vec_in_dim": "16",
    "model.context_in_dim": "16",
    "model.hidden_size": "32",
    "model.num_heads": "2",
    "model.depth": "1",
    "model.depth_single_blocks": "1",
    "model.axes_dim": "4,6,6",
    "text.t5_max_length": "12",
    "text.clip_max_length": "12",
    "train_mmdit.files.t5": "t5",
    "train_mmdit.files.clip": "clip",
    "optimizer.learning_rate": "1e-2",
    "loop.steps": str(STEPS),
    "memory.checkpoint_double_blocks": "1",
}
HUNYUAN = {
    "model.in_channels": "16",
    "vae.latent_channels": "4",
    "vae.block_out_channels": "4,8,8",
    "vae.layers_per_block": "1",
    "vae.norm_num_groups": "2",
    "vae.spatial_compression_ratio": "4",
    "vae.sample_size": str(SIZE),
    "vae.scale_factor": "2.0",
    "train_mmdit.files.vae": "hunyuan.safetensors",
}
DC_AE = {
    **tiny_world.TINY_DC_AE,
    "vae.dc_ae.scaling_factor": "4",
    "train_mmdit.files.vae": "dc_ae.safetensors",
}
ONE_RANK = {"strategy": "zero3", "parallel.gpus": "1", "parallel.ring_degree": "none"}
PICTURES, CLIPS = "{64px: {1: [1.0, 4]}}", f"{{64px: {{1: [1.0, 4], {FRAMES}: [1.0, 2]}}}}"
SHRUNK = {
    "image": {**TINY, **HUNYUAN, "data.buckets": PICTURES},
    "stage1": {**TINY, **HUNYUAN, "data.buckets": CLIPS},
    "stage1_i2v": {**TINY, **HUNYUAN, "data.buckets": CLIPS},
    "stage2": {**TINY, **HUNYUAN, **ONE_RANK, "data.buckets": CLIPS},
    "stage2_i2v": {**TINY, **HUNYUAN, **ONE_RANK, "data.buckets": CLIPS},
    "high_compression": {**TINY, **DC_AE, "data.buckets": "{64px: {1: [1.0, 4], 8: [1.0, 2]}}"},
}


def settings_of(name: str, **overrides: str) -> TrainSettings:
    given = {key: Given(value, "the test") for key, value in overrides.items()}
    return load_train_settings(config=Path(name), overrides=given, environment={})


def test_stages_differ_as_in_the_reference() -> None:
    settings = {name: settings_of(name) for name in STAGES}
    rates = {name: each.optimizer.learning_rate for name, each in settings.items()}
    assert rates == dict(zip(STAGES, (1e-5, 5e-5, 1e-5, 5e-5, 5e-5, 3e-5), strict=True))
    i2v, only = {"t2v": 1, "i2v_head": 5, "i2v_loop": 1, "i2v_tail": 1}, {"t2v": 1}
    modes = dict(zip(STAGES, (only, only, i2v, only, i2v, {"t2v": 1, "i2v_head": 7}), strict=True))
    for name, each in settings.items():
        assert (each.precision.compute, each.train_mmdit.mode_weights.by_mode()) == ("bf16", modes[name])
        is_long = name.startswith("stage2")
        assert each.strategy is (Strategy.HYBRID if is_long else Strategy.ZERO2)
        assert (each.parallel.ring_degree, each.parallel.world_size) == ((4, 8) if is_long else (None, 1))
    assert settings["image"].data.lengths() == (1,)
    assert settings["stage1"].data.lengths() == tuple(range(1, 130, 4))
    assert settings["high_compression"].vae.kind == "dc_ae"
    assert settings["stage2_i2v"].memory.checkpointing == "offload"


def test_an_adapter_beside_the_released_model_streams_every_block() -> None:
    settings = settings_of("stage1_lora_16gib")
    assert (settings.lora.rank, settings.strategy, settings.memory.offload) == (16, "ddp", "blocks")
    assert (settings.init, settings.model.cond_embed) == ("ckpts/Open_Sora_v2.safetensors", True)
    assert plan_activations(settings).checkpointed_blocks == {"double_blocks": 19, "single_blocks": 38}
    weights = plan_frozen_weights(settings)
    assert (weights.blocks, weights.resident_blocks) == (57, 2)
    # Two double-stream blocks of 340 million numbers in bf16; and all that the file has of blocks.
    assert weights.device_bytes == pytest.approx(2 * 2 * 340e6, rel=0.01)
    assert weights.host_bytes == pytest.approx(2 * 11.82e9, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("frames", [33, 129])
def test_an_adapter_beside_the_released_model_takes_less_than_16_gib(frames: int) -> None:
    settings = settings_of("stage1_lora_16gib")
    bucket = settings.data.buckets["256px"][frames]
    memory = estimate_training(settings.replace({"data.buckets": {"256px": {frames: bucket}}})).rank
    assert memory.at_peak["frozen parts"] == 0
    assert 4 * 2**30 < memory.device_peak_bytes < 12 * 2**30
    assert memory.at_peak["weights"] < 2 * 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random frozen parts of both kinds, four videos, four pictures, and their table."""
    folder = tmp_path_factory.mktemp("stages")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in ("stage1", "high_compression"):
            settings = settings_of(name, **SHRUNK[name])
            tiny_world.save_weights(folder / settings.train_mmdit.files.vae, new_autoencoder(settings.vae))
        tiny_world.save_t5(folder / "t5")
        tiny_world.save_clip(folder / "clip")
    rows = []
    for number in range(8):
        is_picture = number >= 4
        frames = moving_clip(number, num_frames=1 if is_picture else FRAMES + 3, size=SIZE)
        path = folder / f"{number}.{'png' if is_picture else 'mp4'}"
        write_media([frames], path, fps=FPS, format=path.suffix[1:])
        rows.append([path.name, "a boat on the sea", len(frames), SIZE, SIZE, "" if is_picture else FPS])
    tiny_clips.write_rows(folder / "clips.csv", rows)
    return folder


def shrunk(name: str, folder: Path, **changes: str) -> TrainSettings:
    files = {"weights": str(folder), "data.table": str(folder / "clips.csv")}
    return settings_of(name, **{**SHRUNK[name], **files, **changes})


@torch.no_grad()
def fixed_loss(settings: TrainSettings) -> tuple[float, set[int]]:
    """Return the mean loss over an epoch, four samples of time, noise and mode each, and the lengths that clips had."""
    reporter = SilentReporter()
    task = build_task(settings, distribution=Distribution(torch.device("cpu")), reporter=reporter)
    batches = open_batches(settings, data_rank=0, data_ranks=1, reporter=reporter)
    losses, lengths = [], set()
    while (batch := batches.next()).epoch == 0:
        assert batch.pixels_BTHWC is not None
        lengths.add(batch.pixels_BTHWC.shape[1])
        losses += [float(task.loss(batch, SampleRng.of(1, number))[0]) for number in range(4)]
    return sum(losses) / len(losses), lengths


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_shrunk_it_trains_and_its_loss_falls(name: str, folder: Path, tmp_path: Path) -> None:
    settings = shrunk(name, folder, output=str(tmp_path / "run"))
    train(settings)
    weights = tmp_path / "run" / "transformer.safetensors"
    # The same clips, times and noises: only the weights differ.
    before, lengths = fixed_loss(settings)
    after, _ = fixed_loss(settings.replace({"init": str(weights)}))
    assert lengths == set(settings.data.lengths())
    assert len(lengths) == (1 if name == "image" else 2)
    assert after < 0.8 * before


@pytest.mark.slow
def test_what_high_compression_made_generates_at_the_scale_of_its_latents(folder: Path, tmp_path: Path) -> None:
    training = shrunk("high_compression", folder, output=str(tmp_path / "run"), **{"loop.steps": "1"})
    train(training)
    files = {"transformer": str(tmp_path / "run" / "transformer.safetensors"), "vae": training.train_mmdit.files.vae}
    changes = {
        "model": {**training.model.model_dump(), "name": "open-sora-v2-dc-ae"},
        "vae": training.vae.model_dump(),
        "text": {"t5_max_length": 12, "clip_max_length": 12},
        "files": {**files, "t5": "t5", "clip": "clip"},
        **{"runtime.weights": str(folder), "runtime.device": "cpu", "output.path": str(tmp_path / "video.mp4")},
        **{"video.height": SIZE, "video.width": SIZE, "video.num_frames": 8, "sampling.num_inference_steps": 1},
        "picture.first": False,
    }
    settings = load_preset("high_compression", prompt="sea").replace(changes)
    with pytest.raises(CheckpointError, match=r"trained on latents with vae\.dc_ae\.scaling_factor=4\.0") as caught:
        generate(settings.replace({"vae.dc_ae.scaling_factor": None}))
    assert caught.value.hint == "use --set vae.dc_ae.scaling_factor=4.0"
    [video] = generate(settings).videos
    assert tuple(read_video(video.path).frames_THWC.shape) == (8, SIZE, SIZE, 3)


VAE_CLIPS = {
    "data.table": tiny_training.TABLE,
    "data.workers": "0",
    "loop.steps": "30",
    "loop.log_every": "1",
    "checkpoints.every": "100",
    "device": "cpu",
    "optimizer.learning_rate": "2e-3",
}
VAE_HUNYUAN = {
    "data.buckets": "{32px: {5: [1.0, 2]}}",
    "vae.latent_channels": "4",
    "vae.block_out_channels": "4,8",
    "vae.layers_per_block": "1",
    "vae.norm_num_groups": "2",
    "vae.time_compression_ratio": "2",
    "vae.spatial_compression_ratio": "4",
}
VAE_DC_AE = {
    "data.buckets": "{32px: {4: [1.0, 2]}}",
    "vae.dc_ae.latent_channels": "8",
    "vae.dc_ae.block_types": "res,efficientvit",
    "vae.dc_ae.width_list": "8,32",
    "vae.dc_ae.encoder_depth_list": "1,1",
    "vae.dc_ae.decoder_depth_list": "1,1",
    "vae.dc_ae.temporal": "true,false",
}
DISCRIMINATOR = {"train_vae.discriminator.width": "8", "train_vae.discriminator.layers": "2"}
VAE_SHRUNK = {
    "vae_hunyuan": {**VAE_CLIPS, **VAE_HUNYUAN, **DISCRIMINATOR, "train_vae.discriminator.start_step": "20"},
    "vae_dc_ae": {**VAE_CLIPS, **VAE_DC_AE},
    "vae_dc_ae_disc": {**VAE_CLIPS, **VAE_DC_AE, **DISCRIMINATOR, "init": "none"},
}
OPPOSED_STEPS = {"vae_hunyuan": 10, "vae_dc_ae": 0, "vae_dc_ae_disc": 30}


def test_stages_of_autoencoders_are_those_of_the_reference() -> None:
    first, second = settings_of("vae_dc_ae"), settings_of("vae_dc_ae_disc")
    for settings in (first, second):
        assert (settings.optimizer.learning_rate, settings.loop.ema_decay) == (5e-5, 0.99)
        assert (settings.train_vae.perceptual_weight, settings.train_vae.kl_weight) == (0.5, 0.0)
        assert settings.train_vae.squared_error_weight == 0.0
    assert first.train_vae.discriminator.weight == 0.0
    assert second.train_vae.discriminator.weight == 0.05
    assert second.train_vae.discriminator.learning_rate == 1e-4
    assert second.init == f"{first.output}/vae.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("name", VAE_SHRUNK)
def test_a_shrunk_autoencoder_trains_and_its_loss_falls(name: str, tmp_path: Path) -> None:
    train(settings_of(name, output=str(tmp_path), **VAE_SHRUNK[name]))
    lines = tiny_training.log(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert ["adversary_loss" in line for line in lines].count(True) == OPPOSED_STEPS[name]
    first, last = ([line["psnr"] for line in lines[part]] for part in (slice(6), slice(-6, None)))
    assert sum(last) > sum(first) + 6.0  # a decibel in each
    if not OPPOSED_STEPS[name]:
        losses = [line["loss"] for line in lines]
        assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert load_file(tmp_path / "vae.safetensors")
