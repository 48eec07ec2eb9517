"""Stages that fit anywhere, for plans whose estimate, which takes seconds on fake tensors, is not the subject."""

from opensora_cli.engine.estimate.offload import DECODE, DENOISE, ENCODE, TEXT, StageMemory
from opensora_cli.settings.generate import GenerateSettings


def small_stages(settings: GenerateSettings, **sizes: object) -> tuple[StageMemory, ...]:
    """Stand in for `estimate_generation`."""
    names = (DECODE,) if settings.from_latents is not None else (TEXT, ENCODE, DENOISE, DECODE)
    return tuple(StageMemory(name, weight_bytes=1, data_bytes=1) for name in names)
