"""Adapters where several ranks draw one video: the same as on one, by every way to share the work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_styles import fused_factors, write_styles
from shared_models import plan_without_estimate
from storage_sizes import storage_bytes
from tiny_adapters import write_lora
from torch import Tensor

from opensora_cli.engine.components.configs import transformer_on_meta
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import models
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.process import ALONE
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.linears import LowRankLinear
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset


def _settings(adapters: tuple[str, ...], degrees: dict[str, int], memory: dict[str, object]) -> GenerateSettings:
    return load_preset("demo", prompt="raining, sea").replace(
        {
            "runtime.device": "cpu",
            "sampling.num_inference_steps": 2,
            "video.num_frames": 5,
            "loras": adapters,
            "parallel.gpus": 2 if degrees else None,
            **{f"parallel.{axis}_degree": degree for axis, degree in degrees.items()},
            **{f"memory.{name}": value for name, value in memory.items()},
        }
    )


def _drawn(plan: Plan) -> tuple[Tensor, int, int]:
    """Return the latents, the adapters' bytes on this rank, and how many there are."""
    ranks = Ranks(plan.mesh, torch.device("cpu")) if plan.mesh.size > 1 else None
    transformer = models.load_transformer(plan, group=None if ranks is None else ranks.tensor_group)
    transformer.set_attention(sdpa)
    adapters = [module for module in transformer.modules() if isinstance(module, LowRankLinear)]
    held = storage_bytes(part for adapter in adapters for part in (adapter.lora_a, adapter.lora_b))
    generator = torch.Generator().manual_seed(5)
    model = plan.settings.model
    embeds = PromptEmbeds(
        torch.randn(2, plan.settings.text.t5_max_length, model.context_in_dim, generator=generator),
        torch.randn(2, model.vec_in_dim, generator=generator),
    )
    with torch.inference_mode():
        evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
        latents = sample_latents(plan, evaluate, embeds, None, seed=3, ranks=ranks or ALONE)
    return latents, held, len(adapters)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """One of all layers, a stronger one of the layers that osora trains, and a file as diffusers has it."""
    folder: Path = tmp_path_factory.mktemp("loras")
    transformer = transformer_on_meta(_settings((), {}, {}).model)
    in_blocks = r".*_blocks\..*(proj|v_mlp|linear2|mlp\.\d)"
    hidden, mlp = transformer.config.hidden_size, transformer.config.mlp_hidden_size
    fused = fused_factors({"single_blocks.1.linear1.weight": torch.empty(3 * hidden + mlp, hidden)}, size=0.1)
    return (
        str(write_styles(folder, fused, hidden=hidden)["diffusers"]),
        str(write_lora(folder / "all", transformer, rank=3)),
        f"{write_lora(folder / 'blocks', transformer, like=in_blocks, rank=4, seed=500)}:-0.5",
    )


_FP8 = {"fp8_storage": True}


@pytest.mark.parametrize(
    ("degrees", "memory", "tolerance"),
    [
        ({"tensor_parallel": 2}, {}, 1e-3),
        # Halves of a row have scales of their own.
        pytest.param({"tensor_parallel": 2}, _FP8, 0.05, marks=pytest.mark.slow),
        ({"ulysses": 2}, {}, 1e-3),
        pytest.param({"ring": 2}, {}, 1e-3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_sample_what_one_process_samples(
    pool: Callable[[int], Any],
    adapters: tuple[str, ...],
    degrees: dict[str, int],
    memory: dict[str, object],
    tolerance: float,
) -> None:
    expected, whole_bytes, whole = _drawn(plan_without_estimate(_settings(adapters, {}, memory)))
    for latents, held, count in pool(2).run(_drawn, plan_without_estimate(_settings(adapters, degrees, memory))):
        assert count == whole == 77
        assert torch.linalg.vector_norm(latents - expected) <= tolerance * torch.linalg.vector_norm(expected)
        if "tensor_parallel" in degrees:
            assert 0.4 * whole_bytes < held < 0.8 * whole_bytes
        else:
            assert held == whole_bytes
