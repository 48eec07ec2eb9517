"""Model FLOPs utilization (MFU) of training steps: FLOPs of the transformer, and peaks of GPUs."""

import re
from collections.abc import Callable

from opensora_cli.core.device import device_name, is_gpu
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import TIME_EMBEDDING_WIDTH, modulation_width
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_loop import Compute

# Dense bf16 and fp16 with sums in fp32, in 1e12 operations per second, from NVIDIA's data sheets. Rates with sparsity
# are halved. The first name that matches counts.
_PEAK_TFLOPS = (
    (r"B200", 2250.0),
    (r"H200 NVL", 835.5),
    (r"H200", 989.5),
    (r"H100 PCIe", 756.5),
    (r"H100 NVL", 835.5),
    (r"H100|H800", 989.5),
    (r"H20", 148.0),
    (r"A100|A800", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"L40S", 362.05),
    (r"L40", 181.05),
    (r"L4", 121.0),
    (r"RTX PRO 6000 Blackwell Workstation", 503.8),
    (r"RTX 6000 Ada Generation", 364.2),
    (r"RTX A6000", 154.8),
    (r"RTX 5090", 209.5),
    (r"RTX 5080", 112.6),
    (r"RTX 5070 Ti", 87.9),
    (r"RTX 4090", 165.2),
    (r"RTX 4080(?! SUPER)", 97.5),
    (r"RTX 4070(?! SUPER| Ti)", 58.3),
    (r"RTX 4060 Ti", 44.1),
    (r"RTX 3090(?! Ti)", 71.0),
    (r"RTX 3060(?! Ti)", 25.5),
)


def open_mfu(settings: TrainSettings, distribution: Distribution) -> Callable[[int, int, float], float] | None:
    """Return a function that computes the MFU, or None if the peak is unknown: on a CPU, or in fp32."""
    if not settings.trains_transformer:
        return None
    peak, precision = settings.watching.peak_tflops, settings.precision
    if peak is None and is_gpu(distribution.device):
        is_half = precision.compute is Compute.BF16
        peak = peak_tflops(device_name(distribution.device)) if is_half else None
    if peak is None:
        return None
    all_devices = peak * 1e12 * distribution.ranks
    config, text_tokens, is_frozen = mmdit_config(settings.model), settings.text.t5_max_length, settings.lora.is_on

    def mfu(samples: int, tokens: int, seconds: float) -> float:
        # Clips of different sizes count as if they had the same size, which slightly underestimates the FLOPs.
        flops = training_flops(
            config, samples=samples, latent_tokens=tokens, text_tokens=text_tokens, is_frozen=is_frozen
        )
        return flops / (seconds * all_devices)

    return mfu


def peak_tflops(device_name: str) -> float | None:
    """Return the bf16 peak of a GPU by torch's name, in 1e12 operations per second, or None if it is unknown."""
    if " MIG " in device_name or " Laptop " in device_name:
        return None  # a slice of a GPU, or one with less power
    found = (peak for name, peak in _PEAK_TFLOPS if re.search(rf"\b{name}\b", device_name))
    return next(found, None)


def training_flops(
    config: MMDiTConfig, *, samples: int, latent_tokens: int, text_tokens: int, is_frozen: bool = False
) -> float:
    """Return the FLOPs of forward and backward of clips of one size.

    A matmul takes two operations for each weight and token, and two for each of the two gradients, 6 in total (Kaplan
    et al. 2020, arXiv 2001.08361). Attention takes 4·S²·width per block for S tokens of a clip, and twice that for its
    gradients. Recomputed activations count once (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    `latent_tokens` counts all samples, and `text_tokens` one sample. With `is_frozen`, only an adapter is trained:
    other weights have no gradient, and the adapter's own operations, a few percent, do not count.
    """
    hidden, guided = config.hidden_size, 2 if config.guidance_embed else 1
    joint = samples * text_tokens + latent_tokens
    of_stream = config.depth * (4 * hidden**2 + 2 * hidden * config.mlp_hidden_size)
    ends = 2 * config.in_channels + (config.conditioning_channels if config.cond_embed else 0)
    of_single_blocks = config.depth_single_blocks * 2 * hidden * (2 * hidden + config.mlp_hidden_size)
    # Embeddings and modulation are computed once per clip.
    embedders = TIME_EMBEDDING_WIDTH * guided + config.vec_in_dim + hidden * (1 + guided)
    linears = (
        latent_tokens * (ends * hidden + of_stream)
        + samples * text_tokens * (config.context_in_dim * hidden + of_stream)
        + joint * of_single_blocks
        + samples * (embedders + modulation_width(config)) * hidden
    )
    attention = 4.0 * joint**2 / max(samples, 1) * hidden * (config.depth + config.depth_single_blocks)
    return (4.0 if is_frozen else 6.0) * linears + 3.0 * attention
