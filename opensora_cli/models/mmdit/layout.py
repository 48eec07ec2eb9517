"""Conversion of published MMDiT weights to the one layout of our model, tensor by tensor.

Two choices vary between published files. q, k and v are *fused* (`qkv`; `linear1` holds q, k, v and the MLP input) or
*split* (`q_proj`, `k_proj`, `v_proj`; `v_mlp` in single-stream blocks). Rotary pairs are *interleaved*, dims (2j, 2j+1)
as in Flux, or *half-split*, dims (j, D/2+j) as in Open-Sora v2. Our model is split and half-split. Turning interleaved
into half-split puts the even rows of each head of q and k first, then the odd ones; the function stays the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from opensora_cli.models.mmdit.config import MMDiTConfig

ConvertFn = Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]]

_ROTATED = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
_HEAD_NORMS = (".norm.query_norm.scale", ".norm.key_norm.scale")


def is_fused(keys: Iterable[str]) -> bool:
    """Whether the keys belong to a file with fused q, k and v."""
    return any(".qkv." in key or ".linear1." in key for key in keys)


def converter(config: MMDiTConfig, *, interleaved: bool | None = None) -> ConvertFn:
    """Return the function that converts a file's tensors to our layout: mapping -> iterator of (key, tensor).

    It reads one tensor at a time; pieces of fused tensors are views. Keys it has no rule for pass unchanged, so that a
    strict loader can name them.

    Args:
        config: sizes of the model.
        interleaved: whether rotary pairs are interleaved in the file. None goes by the released models: fused files are
            interleaved, split ones half-split.
    """
    return partial(_convert, config=config, interleaved=interleaved)


def _convert(
    tensors: Mapping[str, Tensor], *, config: MMDiTConfig, interleaved: bool | None
) -> Iterator[tuple[str, Tensor]]:
    permute = is_fused(tensors) if interleaved is None else interleaved
    for key in tensors:
        for name, tensor in _split(key, tensors[key], config):
            if permute and name.endswith(_ROTATED + _HEAD_NORMS):
                yield name, interleaved_to_half_split(tensor, head_dim=config.head_dim)
            else:
                yield name, tensor


def _split(key: str, tensor: Tensor, config: MMDiTConfig) -> Iterator[tuple[str, Tensor]]:
    """Cut a fused tensor along its rows; a tensor of any other kind is its own only piece."""
    hidden = config.hidden_size
    head, separator, kind = key.rpartition(".")
    block, _, linear = head.rpartition(".")
    if linear == "qkv":
        names, sizes = ("q_proj", "k_proj", "v_proj"), [hidden, hidden, hidden]
    elif linear == "linear1":
        names, sizes = ("q_proj", "k_proj", "v_mlp"), [hidden, hidden, hidden + config.mlp_hidden_size]
    else:
        yield key, tensor
        return
    if tensor.shape[:1] != (sum(sizes),):
        # The strict loader says what is wrong: it knows this key only as an unexpected one.
        yield key, tensor
        return
    for name, piece in zip(names, torch.split(tensor, sizes), strict=True):
        yield f"{block}.{name}{separator}{kind}", piece


def interleaved_to_half_split(tensor: Tensor, *, head_dim: int) -> Tensor:
    """Reorder the rows of each head: even ones first, then odd ones.

    Args:
        tensor: (H·D, ...) weight or bias of q or k, or (D,) scale of their norm.
        head_dim: D, even.
    """
    if tensor.shape[0] % head_dim:
        return tensor  # not a tensor of this model: left as it is for the strict loader to refuse
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
