"""T5 loaded: on its device as a whole, or with layers that come there one by one from their mapped file."""

from collections import Counter
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

import torch

from opensora_cli.checkpoint.load import PlannedTensor, plan_tensors
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.weights import Stamp, stamp_of
from opensora_cli.memory.streaming import StreamingFigures, stream_blocks
from opensora_cli.models.text.encoders import T5Encoder

STREAMED_LAYERS = 2
"""On the device at a time: one computes while the next one comes."""

T5_LAYER = "encoder.block."

_TEXT_FILES = tuple(
    f"{stem}{suffix}" for stem in ("model.safetensors", "pytorch_model.bin") for suffix in ("", ".index.json")
)


def load_t5(
    folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype, layers_on_host: bool = False
) -> T5Encoder:
    """Return the T5 encoder; with `layers_on_host` its layers stay on the CPU, for `streamed_layers`.

    There they have the dtype of their file, if they are `cast_later`. A CheckpointError for a folder that is missing,
    incomplete or broken.
    """
    casts = layers_on_host and cast_later(device, dtype)
    return T5Encoder.from_folder(
        folder,
        max_length=max_length,
        device=device,
        dtype=dtype,
        blocks_on_host=layers_on_host,
        blocks_dtype=stored_t5_dtype(folder) if casts else None,
    )


def streamed_layers(
    t5: T5Encoder, *, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[StreamingFigures]:
    """Return the context in which the layers of `load_t5` come to the device and go again, each for one pass."""
    return stream_blocks(
        [t5.blocks],
        device=device,
        resident=STREAMED_LAYERS,
        source="mapped",
        dtype=dtype if cast_later(device, dtype) else None,
    )


def cast_later(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether layers are cast when they are needed, or once shared: on a CPU.

    In float16 transformers keeps some in float32, and these are cast as they are loaded.
    """
    return device.type == "cpu" and dtype is not torch.float16


def stored_t5_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype that most of a T5's layers have in its files; None if these cannot be read."""
    try:
        layers = [tensor for tensor in text_tensors(folder, stamp_of(folder)) if tensor.key.startswith(T5_LAYER)]
    except CheckpointError:
        return None
    sizes: Counter[torch.dtype] = Counter()
    for tensor in layers:
        sizes[tensor.dtype] += tensor.numel
    return sizes.most_common(1)[0][0] if sizes else None


@lru_cache(maxsize=16)
def text_tensors(folder: Path, stamp: Stamp) -> tuple[PlannedTensor, ...]:
    """Return what is in the files of a text encoder's folder that transformers reads, in the order of its preference.

    `stamp` is of the folder now. Raises CheckpointError if they are missing or broken.
    """
    files = [folder / name for name in _TEXT_FILES if (folder / name).exists()]
    return plan_tensors(files[0] if files else folder, dtype=torch.float32)
