"""Table of the attention backends. `core/attention.py` describes them without importing torch."""

from opensora_cli.models.attention.libraries import flash3, flash4, xformers
from opensora_cli.models.attention.torch_kernels import bf16_products, cudnn, math, sdpa

BACKENDS = {each.name: each for each in (sdpa, cudnn, flash3, flash4, xformers, math, bf16_products)}
