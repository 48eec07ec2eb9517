"""The transformer's training step on a CUDA device: the same draws and the same loss as on a CPU."""

from pathlib import Path

import pytest
import tiny_autoencoders
import tiny_training
import torch
from torch import Tensor, nn

from opensora_cli.data.batches import ClipBatch, ClipRequest, SampleRng
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.encode.encoders import Encoders
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT

SETTINGS = (
    tiny_training.mmdit_settings(Path("unused"))
    .replace({"train_mmdit.easy_latent_frames": 1})
    .model_copy(update={"vae": tiny_autoencoders.VAES["hunyuan"]})
)
CONFIG = MMDiTConfig(
    in_channels=16,
    vec_in_dim=16,
    context_in_dim=16,
    hidden_size=64,
    num_heads=2,
    depth=1,
    depth_single_blocks=1,
    axes_dim=(8, 12, 12),
)


def encoders(device: str, dtype: torch.dtype) -> Encoders:
    torch.manual_seed(0)
    vae = new_autoencoder(tiny_autoencoders.VAES["hunyuan"]).eval().requires_grad_(False).to(device, dtype)

    def t5(captions: list[str]) -> Tensor:
        return torch.full((len(captions), 4, 16), float(len(captions[0])), device=device, dtype=dtype)

    return Encoders(vae, t5=t5, clip=lambda captions: t5(captions)[:, 0], device=torch.device(device), dtype=dtype)


def task(frozen: Encoders, device: str) -> MMDiTTask:
    torch.manual_seed(0)
    module = MMDiT(CONFIG)
    nn.init.normal_(module.final_layer.linear.weight, std=0.1)
    return MMDiTTask(
        module.to(device),
        SETTINGS,
        empty_prompt=frozen.empty_prompt,
        encoders=lambda: frozen,
        device=torch.device(device),
    )


def clips() -> ClipBatch:
    pixels = torch.randint(0, 256, (3, 9, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ClipBatch(
        number=0,
        epoch=0,
        requests=tuple(
            ClipRequest(path=path, caption=caption, num_frames=9, height=32, width=32, fps=12.0)
            for path, caption in (("a", "x"), ("b", "xx"), ("c", "xxx"))
        ),
        pixels_BTHWC=pixels,
        cached=None,
    )


def test_every_device_draws_the_same() -> None:
    losses = [
        task(encoders(device, torch.float32), device).loss(clips(), SampleRng.of(0, 0))[0].item()
        for device in ("cpu", "cuda")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
