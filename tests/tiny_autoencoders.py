"""Autoencoders of every kind in small, clips for them, and training tasks: for tests of training."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from toy_training import new_trainer

from opensora_cli.data.batches import ClipBatch, ClipRequest, SampledBatches, SampleRng
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.train.objectives.vae import PerceptualDistance, VAETask, discriminator_role
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.train_sections import OptimizerSettings, VAETrainSettings

VAES: Mapping[str, VAESettings] = {
    "hunyuan": VAESettings.model_validate(
        {
            "latent_channels": 4,
            "block_out_channels": (4, 8),
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "sample_size": 32,
            "sample_tsize": 16,
            "time_compression_ratio": 2,
            "spatial_compression_ratio": 4,
            "spatial_tiling": False,
        }
    ),
    "dc_ae": VAESettings.model_validate(
        {
            "kind": "dc_ae",
            "spatial_tiling": False,
            "dc_ae": {
                "latent_channels": 8,
                "block_types": ("res", "efficientvit"),
                "width_list": (8, 32),
                "encoder_depth_list": (1, 1),
                "decoder_depth_list": (1, 1),
                "temporal": (True, False),
            },
        }
    ),
    "flux_ae": VAESettings.model_validate(
        {
            "kind": "flux_ae",
            "spatial_tiling": False,
            "flux_ae": {"z_channels": 4, "ch": 32, "ch_mult": (1, 1), "num_res_blocks": 1, "tile_size": 64},
        }
    ),
}
NUM_FRAMES: Mapping[str, int] = {"hunyuan": 5, "dc_ae": 4, "flux_ae": 2}
"""Of a clip that each of them brings back whole."""

OPTIMIZER = OptimizerSettings.model_validate({"learning_rate": 2e-3, "warmup_steps": 0})

UNCLIPPED = OPTIMIZER.replace({"max_grad_norm": 1e9})


def vae_task(
    kind: str,
    *,
    perceptual: PerceptualDistance | None = None,
    optimizer: OptimizerSettings = OPTIMIZER,
    **objective: object,
) -> VAETask:
    """Return a task with the same first weights each time; `objective` is the section `train_vae`."""
    torch.manual_seed(0)
    settings = VAETrainSettings.model_validate(objective)
    autoencoder = new_autoencoder(VAES[kind])
    adversary = None
    if settings.discriminator.weight:
        adversary = discriminator_role(settings.discriminator, optimizer=optimizer)
    return VAETask(
        autoencoder,
        settings=settings,
        perceptual=perceptual,
        adversary=adversary,
    )


def moving_clip(seed: int, *, num_frames: int, size: int = 16) -> Tensor:
    """Return a bright square that moves over a ramp: uint8 (T,H,W,3)."""
    generator = torch.Generator().manual_seed(seed)
    ramp_HW = torch.linspace(0, 120, size).expand(size, size)
    frames_THWC = (ramp_HW[:, :, None] * torch.rand(3, generator=generator)).repeat(num_frames, 1, 1, 1)
    row, column = torch.randint(size // 2, (2,), generator=generator).tolist()
    for index in range(num_frames):
        left = (column + index) % (size // 2)
        frames_THWC[index, row : row + 4, left : left + 4] = 100 + 155 * torch.rand(3, generator=generator)
    return frames_THWC.to(torch.uint8)


def clip_batch(number: int, *, num_frames: int, count: int = 2, size: int = 16) -> ClipBatch:
    """Return a micro-batch of moving squares, the same for the same number."""
    clips = [moving_clip(count * number + index, num_frames=num_frames, size=size) for index in range(count)]
    return ClipBatch(
        number=number,
        epoch=0,
        requests=tuple(
            ClipRequest(path=f"clip{count * number + index}", num_frames=num_frames, height=size, width=size, fps=12.0)
            for index in range(count)
        ),
        pixels_BTHWC=torch.stack(clips),
        cached=None,
    )


def mixed_batches(kind: str, *, rank: int = 0, ranks: int = 1) -> SampledBatches:
    """Return endless micro-batches for that kind of autoencoder: two of clips, one of pictures, and so on."""

    def draw(_: SampleRng, number: int) -> ClipBatch:
        return clip_batch(number, num_frames=1 if number % 3 == 2 else NUM_FRAMES[kind])

    return SampledBatches(draw, seed=0, rank=rank, ranks=ranks)


def vae_trainer(
    task: VAETask, batches: SampledBatches, *, optimizer: OptimizerSettings = OPTIMIZER, **options: Any
) -> Trainer:
    """Return what trains the task in float32 with AdamW; `options` are those of `new_trainer`."""
    return new_trainer(task, batches, optimizer=optimizer, ema_decay=0.99, **options)
