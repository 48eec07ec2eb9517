"""Names that settings and files of weights use: floating point types, and the metadata of a converted file."""

import torch

from opensora_cli.core.exceptions import RequestError

ROTARY_METADATA = "osora.rotary"
"""Metadata key under which a converted MMDiT records the layout of its rotary pairs: `interleaved` or `half`."""

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`. Raises RequestError for an unknown name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise RequestError(f"dtype={name!r} is not one of {', '.join(_DTYPES)}") from None
