"""Memory and work of the text encoders: weights by arithmetic, and activations counted on outlines of few layers."""

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

from opensora_cli.engine.components.parallelize import largest_share
from opensora_cli.engine.components.text_encoders import STREAMED_LAYERS
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.fake_tensors import Need, fake_device, fake_module
from opensora_cli.engine.estimate.offload import TEXT, StageMemory
from opensora_cli.engine.estimate.work import Work
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.host_weights import aligned, streaming_bytes
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model, t5_linears

if TYPE_CHECKING:
    from opensora_cli.engine.generate.plan import Plan

_TEXTS = 2
"""The prompt and the negative prompt."""


def text_memory(plan: "Plan", *, streamed: bool) -> StageMemory:
    """Return the memory of the stage that encodes the prompts. Encoders without a folder have the released sizes.

    With `streamed` T5's layers move to the device one by one; otherwise ranks share them, if there are enough heads.
    """
    text, dtype, files, ranks = plan.settings.text, plan.hardware.dtype, plan.files, plan.mesh.size
    t5_sizes = T5Sizes.of(plan.weights.paths.get(Component.T5))
    clip_sizes = ClipSizes.of(plan.weights.paths.get(Component.CLIP))
    slots, whole, share = _t5_layers(t5_sizes, dtype.itemsize, ranks)
    held = streaming_bytes(slots, resident=STREAMED_LAYERS) if streamed else share
    parameters = plan.parameters[Component.T5] + plan.parameters[Component.CLIP]
    own_bytes, mapped_bytes = parameters * dtype.itemsize - whole + held, 0
    if files is not None:
        t5, clip = files[Component.T5], files[Component.CLIP].total
        # Layers that ranks share are copies.
        layers = t5.in_blocks.held(streamed) if streamed or ranks == 1 else (0, 0)
        copies = held if streamed or ranks > 1 else 0
        parts = t5.outside.held(), clip.held(), layers, (copies, 0)
        own_bytes, mapped_bytes = (sum(column) for column in zip(*parts, strict=True))
    t5_need = _need(t5_sizes, text.t5_max_length, dtype)
    # A longer length is refused when the encoder is loaded.
    clip_need = _need(clip_sizes, min(text.clip_max_length, clip_sizes.max_length), dtype)
    # Texts are encoded one by one, each by T5 and then by CLIP, and their embeddings are joined at the end. Earlier
    # results stay while the next text is encoded.
    one = t5_need.data + clip_need.data
    last = max(t5_need.activations, clip_need.data + clip_need.activations)
    peak = max((_TEXTS - 1) * one + t5_need.data + last, 2 * _TEXTS * one)
    return StageMemory(TEXT, own_bytes, _TEXTS * one, peak - _TEXTS * one, mapped_bytes)


def _t5_layers(sizes: T5Sizes, itemsize: int, ranks: int) -> tuple[list[int], int, int]:
    """Return the bytes of each T5 layer in a slot, of all layers outside slots, and of a rank's share of all."""
    weights = sizes.layer_weights
    slots = [sum(aligned(count * itemsize) for count in weights.values())] * sizes.num_layers
    slots[0] += aligned(sizes.position_biases * itemsize)
    whole = (sizes.num_layers * sum(weights.values()) + sizes.position_biases) * itemsize
    if ranks > sizes.num_heads:
        return slots, whole, whole
    elsewhere = sum(weights[linear.path] * (1 - largest_share(linear, ranks)) for linear in t5_linears(sizes))
    return slots, whole, whole - int(sizes.num_layers * elsewhere * itemsize)


@lru_cache(maxsize=64)
def _need(sizes: T5Sizes | ClipSizes, length: int, dtype: torch.dtype) -> Need:
    """Return the need of an encoder for a text of `length` tokens.

    Two layers represent all, because every layer frees what it allocates except its result.
    """
    few = replace(sizes, num_layers=min(sizes.num_layers, 2))
    with fake_device("cpu") as device:
        encoder = fake_module(
            lambda: T5Model(few) if isinstance(few, T5Sizes) else ClipTextModel(few), device=device, dtype=dtype
        )
        with TensorBytes() as counter:
            ids_1L = torch.empty((1, length), dtype=torch.int64, device=device)
            embeds = encoder(ids_1L)
            del ids_1L
            need = Need.of(counter)
            del embeds
            return need


def text_work(t5: T5Sizes, clip: ClipSizes, lengths: tuple[int, int], itemsize: int, *, prompts: int = 2) -> Work:
    """Return the work of encoding prompts of `lengths` tokens in T5 and CLIP, by arithmetic like their memory.

    The weights are read once for each prompt.
    """
    weights = t5.num_layers * sum(t5.layer_weights.values()), clip.parameters
    tokens = lengths[0], min(lengths[1], clip.max_length)
    widths = t5.num_layers * t5.num_heads * t5.d_kv, clip.num_layers * clip.hidden_size
    return Work(
        product_flops=prompts * 2 * sum(map(prod, zip(weights, tokens, strict=True))),
        attention_flops=prompts * sum(4 * length**2 * width for length, width in zip(tokens, widths, strict=True)),
        product_bytes=prompts * sum(weights) * itemsize,
    )
