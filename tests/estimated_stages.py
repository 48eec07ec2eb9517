"""The estimate of the stages of a plan, and the bytes that a stage really takes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.estimate.generation import estimate_generation
from opensora_cli.engine.estimate.offload import OffloadPlan, StageMemory
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.model import MMDiT


def estimated(plan: Plan, offload: OffloadPlan, device_type: str = "cpu") -> dict[str, StageMemory]:
    """Return the stages of a plan by name, as estimated with another offload."""
    hardware = replace(plan.hardware, device=torch.device(device_type))
    stages = estimate_generation(replace(plan, hardware=hardware, files=None), offload)
    return {stage.name: stage for stage in stages}


def beside_weights(stage: StageMemory) -> int:
    """Return the bytes of data and activations."""
    return stage.data_bytes + stage.activation_bytes


def counted(run: Callable[[], object]) -> int:
    """Return the peak of the bytes of the tensors that a function makes."""
    with torch.inference_mode(), TensorBytes() as counter:
        kept = run()
        del kept
    return counter.peak_bytes


def denoise_peak(plan: Plan, offload: OffloadPlan, transformer: MMDiT) -> int:
    """Return the peak of sampling beside the weights."""
    transformer.set_sequence_chunk(offload.chunk_tokens)
    plan = replace(plan, offload=offload)
    text, dtype = plan.settings.model, plan.hardware.dtype
    latents = [torch.zeros(plan.latent_shape, dtype=dtype)] * 2 if plan.mode.needs_reference else None

    def run() -> object:
        embeds = PromptEmbeds(
            torch.zeros(2, plan.settings.text.t5_max_length, text.context_in_dim, dtype=dtype),
            torch.zeros(2, text.vec_in_dim, dtype=dtype),
        )
        return sample_latents(plan, transformer, embeds, latents, seed=0)

    return counted(run)
