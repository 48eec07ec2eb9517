"""Load text encoders: whole on their device, or T5 with layers that are streamed from its file."""

from collections import Counter
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

import torch

from opensora_cli.checkpoint.load import PlannedTensor, load_into_module, plan_tensors
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.architectures import on_meta
from opensora_cli.engine.components.weights import Stamp, stamp_of
from opensora_cli.memory.streaming import StreamingFigures, stream_blocks
from opensora_cli.models.text.clip import ClipTextModel, clip_weights
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import KEPT_IN_FP32, LAYERS, T5Model, t5_weights

STREAMED_LAYERS = 2
"""Layers on the device at a time: one computes while the next one is copied."""

_WEIGHTS = tuple(
    f"{stem}{suffix}" for stem in ("model.safetensors", "pytorch_model.bin") for suffix in ("", ".index.json")
)


def load_t5(
    folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype, layers_on_host: bool = False
) -> T5Encoder:
    """Return the T5 encoder in a folder; it pads or cuts every text to `max_length` tokens.

    With `layers_on_host` its layers stay on the CPU, for `streamed_layers`: mapped from the file, in the dtype of the
    file if they are `cast_later`. Errors are those of `T5Encoder.reader`, and CheckpointError for unfit weights.
    """
    tokenizer = T5Encoder.reader(folder, max_length=max_length).tokenizer
    with on_meta():
        model = T5Model(T5Sizes.of(folder))
    layers = [f"{LAYERS}.*"] if layers_on_host else []
    load_into_module(
        model,
        _weights(folder),
        device=device,
        dtype=dtype,
        convert=t5_weights,
        keep_on_host=layers,
        keep_dtype=layers if cast_later(device, dtype) else [],
        keep_fp32=[KEPT_IN_FP32] if dtype is torch.float16 else [],
    )
    return T5Encoder(model=model, tokenizer=tokenizer, max_length=max_length, device=device)


def load_clip(folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype) -> ClipEncoder:
    """Return the text tower of the CLIP in a folder, with the errors of `ClipEncoder.reader`; see `load_t5`."""
    tokenizer = ClipEncoder.reader(folder, max_length=max_length).tokenizer
    with on_meta():
        model = ClipTextModel(ClipSizes.of(folder))
    load_into_module(model, _weights(folder), device=device, dtype=dtype, convert=clip_weights)
    return ClipEncoder(model=model, tokenizer=tokenizer, max_length=max_length, device=device)


def streamed_layers(
    t5: T5Encoder, *, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[StreamingFigures]:
    """Return a context that copies the layers of `load_t5` to the device, each for one pass."""
    return stream_blocks(
        [t5.blocks],
        device=device,
        resident=STREAMED_LAYERS,
        source="mapped",
        dtype=dtype if cast_later(device, dtype) else None,
    )


def cast_later(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether layers are cast at use: on a CPU, but not to float16, where some weights stay float32."""
    return device.type == "cpu" and dtype is not torch.float16


def stored_t5_dtype(folder: Path) -> torch.dtype | None:
    """Return the most frequent dtype of the layers in the files of a T5, or None if the files cannot be read."""
    try:
        layers = [tensor for tensor in text_tensors(folder, stamp_of(folder)) if tensor.key.startswith(LAYERS)]
    except CheckpointError:
        return None
    sizes: Counter[torch.dtype] = Counter()
    for tensor in layers:
        sizes[tensor.dtype] += tensor.numel
    return sizes.most_common(1)[0][0] if sizes else None


@lru_cache(maxsize=16)
def text_tensors(folder: Path, stamp: Stamp) -> tuple[PlannedTensor, ...]:
    """Return the tensors in the folder of a text encoder with this stamp. Raises CheckpointError for broken weights."""
    return plan_tensors(_weights(folder), dtype=torch.float32)


def _weights(folder: Path) -> Path:
    """Return the file of weights, or its index, in the order of preference of transformers."""
    return next((folder / name for name in _WEIGHTS if (folder / name).exists()), folder)
