"""How much memory the text encoders take."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.engine.components.parallelize import largest_share
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.fake_tensors import Need, fake_device, fake_module
from opensora_cli.engine.estimate.file_bytes import FileWeights
from opensora_cli.engine.estimate.offload import STREAMED_LAYERS, TEXT, StageMemory
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.host_weights import slot_bytes
from opensora_cli.memory.streaming import streaming_bytes
from opensora_cli.models.text.folder import load_config
from opensora_cli.models.text.t5 import t5_linears


def text_memory(
    weights: Mapping[Component, int],
    lengths: tuple[int, int],
    folders: tuple[Path | None, ...],
    dtype: torch.dtype,
    device_type: str,
    *,
    streamed: bool,
    ranks: int,
    files: Mapping[Component, FileWeights] | None = None,
) -> StageMemory:
    """Return what the stage needs that encodes the prompts.

    Weights are in bytes; lengths (in tokens) and folders are those of T5 and CLIP, None for the released ones' sizes.
    T5's layers come to the device one by one if `streamed`; otherwise `ranks` share them, if there are enough heads.
    `files`: on a CPU, what is mapped.
    """
    t5, t5_blocks, saved, largest_share = _t5(lengths[0], folders[0], dtype, device_type, ranks)
    clip = _clip(lengths[1], folders[1], dtype, device_type)
    weight_bytes, mapped_bytes = weights[Component.T5] + weights[Component.CLIP], 0
    if files is not None:
        weight_bytes, mapped_bytes = _on_cpu(files, t5_blocks, largest_share, streamed=streamed, ranks=ranks)
    elif streamed:
        weight_bytes += streaming_bytes(t5_blocks, resident=STREAMED_LAYERS) - saved
    else:  # each rank has its share of the layers
        weight_bytes -= saved - largest_share
    # One after the other; what the first gives is there while the second computes.
    activations = max(t5.activations, clip.activations + clip.data)
    return StageMemory(TEXT, weight_bytes, t5.data + clip.data, activations, mapped_bytes)


def _on_cpu(
    files: Mapping[Component, FileWeights], t5_blocks: Sequence[int], share: int, *, streamed: bool, ranks: int
) -> tuple[int, int]:
    """Return the bytes of weights that are private, and those that are mapped; `share` is a rank's of the layers."""
    t5, clip = files[Component.T5], files[Component.CLIP].total
    layers = t5.in_blocks
    private, mapped = t5.outside.private + clip.private, t5.outside.mapped + clip.mapped
    if streamed:
        slots = streaming_bytes(t5_blocks, resident=STREAMED_LAYERS)
        return private + layers.copied + slots, mapped + layers.mapped + layers.stored
    if ranks > 1:
        return private + share, mapped
    return private + layers.private, mapped + layers.mapped


@lru_cache(maxsize=16)
def _t5(
    length: int, folder: Path | None, dtype: torch.dtype, device_type: str, ranks: int
) -> tuple[Need, tuple[int, ...], int, int]:
    """Return what T5 needs, and of its layers the bytes of each in a slot, of all elsewhere, and of a rank's share."""
    with fake_device(device_type) as device:
        model = fake_module(lambda: t5_model(folder), device=device, dtype=dtype)
        need = _encoder_need(lambda ids: model(input_ids=ids).last_hidden_state, length, device)
        layers: Sequence[nn.Module] = list(model.encoder.block)
        slots = tuple(slot_bytes(layer) for layer in layers)
        whole = sum(weight.nbytes for layer in layers for weight in layer.parameters())
        if ranks > model.config.num_heads:
            return need, slots, whole, whole
        elsewhere = 0.0
        for layer in layers:
            for linear in t5_linears(model.config):
                weight = layer.get_submodule(linear.path).get_parameter("weight")
                elsewhere += weight.nbytes * (1 - largest_share(linear, ranks))
        return need, slots, whole, whole - int(elsewhere)


@lru_cache(maxsize=16)
def _clip(length: int, folder: Path | None, dtype: torch.dtype, device_type: str) -> Need:
    with fake_device(device_type) as device:
        model = fake_module(lambda: clip_model(folder), device=device, dtype=dtype)
        # A longer one is refused when the encoder is loaded.
        length = min(length, model.config.max_position_embeddings)
        return _encoder_need(lambda ids: model(input_ids=ids).pooler_output, length, device)


def t5_model(folder: Path | None) -> Any:
    """Return a T5 encoder with fresh weights, of the sizes in `folder` (None: the released one's).

    A broken configuration is a CheckpointError.
    """
    # Imported here, since transformers takes seconds to load.
    from transformers import T5Config, T5EncoderModel

    if folder is not None:
        return T5EncoderModel(load_config(T5Config, folder))
    sizes: dict[str, Any] = {"d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_layers": 24, "num_heads": 64}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def clip_model(folder: Path | None) -> Any:
    """Return the text tower of a CLIP likewise."""
    from transformers import CLIPTextConfig, CLIPTextModel

    if folder is not None:
        return CLIPTextModel(load_config(CLIPTextConfig, folder))
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    return CLIPTextModel(CLIPTextConfig(**sizes))


def _encoder_need(encode: Callable[[Tensor], Tensor], length: int, device: torch.device) -> Need:
    """Count the encoding of the prompt and the negative prompt."""
    with TensorBytes(device_type=device.type) as counter:
        ids_2L = torch.empty((2, length), dtype=torch.int64, device=device)
        embeds = encode(ids_2L)
        del ids_2L
        need = Need.of(counter)
        del embeds
        return need
