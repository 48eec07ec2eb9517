"""The floating-point operations of training an MMDiT, and their share of the devices' peak (MFU)."""

import re

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import TIME_EMBEDDING_WIDTH, modulation_width

_TERA = 1e12

# Dense bf16 and fp16 with sums in fp32, in 1e12 operations a second, from NVIDIA's data sheets. Where a
# sheet gives the rate with sparsity alone, half of it. The names are those that CUDA gives; the first that fits counts.
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
    (r"RTX 6000 Ada Generation", 364.2),
    (r"RTX A6000", 154.8),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU, by torch's name, in bf16 or fp16, in 1e12 operations a second; None: unknown."""
    if " MIG " in device_name or " Laptop " in device_name:
        return None  # a slice of a GPU, or one with less power
    found = (peak for name, peak in _PEAK_TFLOPS if re.search(rf"\b{name}\b", device_name))
    return next(found, None)


def training_flops(
    config: MMDiTConfig, *, samples: int, latent_tokens: int, text_tokens: int, is_frozen: bool = False
) -> float:
    """Return the floating-point operations of forward and backward of some clips of one size.

    A product of matrices takes two operations for each weight and token, and as many again for the gradient of its
    inputs and for that of its weights: 6 (Kaplan et al. 2020, arXiv 2001.08361). Products of queries and keys, and of
    scores and values, take 4·S²·width a block for S tokens of a clip, and twice that for their gradients. What is
    computed twice to save memory counts once (model FLOPs: Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    `latent_tokens` are those of all samples, `text_tokens` those of each. `is_frozen`: only an adapter is trained: the
    weights beside it have no gradient, and its own, some hundredths of them, do not count.
    """
    hidden, guided = config.hidden_size, 2 if config.guidance_embed else 1
    joint = samples * text_tokens + latent_tokens
    of_stream = config.depth * (4 * hidden**2 + 2 * hidden * config.mlp_hidden_size)
    ends = 2 * config.in_channels + (config.conditioning_channels if config.cond_embed else 0)
    of_single_blocks = config.depth_single_blocks * 2 * hidden * (2 * hidden + config.mlp_hidden_size)
    # Embeddings and modulation are computed once for each clip.
    embedders = TIME_EMBEDDING_WIDTH * guided + config.vec_in_dim + hidden * (1 + guided)
    linears = (
        latent_tokens * (ends * hidden + of_stream)
        + samples * text_tokens * (config.context_in_dim * hidden + of_stream)
        + joint * of_single_blocks
        + samples * (embedders + modulation_width(config)) * hidden
    )
    attention = 4.0 * joint**2 / max(samples, 1) * hidden * (config.depth + config.depth_single_blocks)
    return (4.0 if is_frozen else 6.0) * linears + 3.0 * attention


class ModelFlopsUtilisation:
    """The share of the devices' peak (of one device: `peak_tflops`) that training makes use of.

    Of clips of different sizes in one step it is a little too low: they count as if they had the same.
    """

    def __init__(
        self, config: MMDiTConfig, *, text_tokens: int, peak_tflops: float, devices: int, is_frozen: bool
    ) -> None:
        self._config = config
        self._text_tokens = text_tokens
        self._peak = peak_tflops * _TERA * devices
        self._is_frozen = is_frozen

    def __call__(self, samples: int, tokens: int, seconds: float) -> float:
        """Return the share, usually 0 to 1, from clips and latent tokens of all devices and their seconds."""
        done = training_flops(
            self._config,
            samples=samples,
            latent_tokens=tokens,
            text_tokens=self._text_tokens,
            is_frozen=self._is_frozen,
        )
        return done / (seconds * self._peak)
