"""The floating-point operations of training an MMDiT, and their share of the devices' peak (MFU)."""

import re

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import TIME_EMBEDDING_WIDTH

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
    joint = samples * text_tokens + latent_tokens
    linears = (
        latent_tokens * _weights_of_latents(config)
        + samples * text_tokens * _weights_of_text(config)
        + joint * config.depth_single_blocks * _weights_of_single_block(config)
        + samples * _weights_of_modulation(config)
    )
    blocks = config.depth + config.depth_single_blocks
    attention = 4.0 * joint**2 / max(samples, 1) * config.hidden_size * blocks
    return (4.0 if is_frozen else 6.0) * linears + 3.0 * attention


def _weights_of_latents(config: MMDiTConfig) -> int:
    ends = config.in_channels + config.in_channels + (config.conditioning_channels if config.cond_embed else 0)
    return ends * config.hidden_size + config.depth * _weights_of_stream(config)


def _weights_of_text(config: MMDiTConfig) -> int:
    return config.context_in_dim * config.hidden_size + config.depth * _weights_of_stream(config)


def _weights_of_stream(config: MMDiTConfig) -> int:
    return 4 * config.hidden_size**2 + 2 * config.hidden_size * config.mlp_hidden_size


def _weights_of_single_block(config: MMDiTConfig) -> int:
    return 2 * config.hidden_size * (2 * config.hidden_size + config.mlp_hidden_size)


def _weights_of_modulation(config: MMDiTConfig) -> int:
    """Return the weights that are used once for each clip: of embeddings and modulation."""
    hidden = config.hidden_size
    embedders = TIME_EMBEDDING_WIDTH * (2 if config.guidance_embed else 1) + config.vec_in_dim
    embedders += hidden * (3 if config.guidance_embed else 2)
    modulations = 12 * config.depth + 3 * config.depth_single_blocks + 2
    return (embedders + modulations * hidden) * hidden


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
