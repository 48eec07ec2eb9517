"""Change of the layout of q, k and v in an MMDiT whose tensors have not been read."""

from collections.abc import Mapping, Sequence

import torch

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.choices import QKV, ROTARY_METADATA, Rotary
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.models.mmdit.layout import (
    HeadSizes,
    Piece,
    find_rotary,
    is_fused,
    left_over,
    plan_layout,
    reorder_heads,
)


def find_layout(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> tuple[QKV, Rotary] | None:
    """Return the layout of an MMDiT; None for tensors of another model.

    Raises:
        CheckpointError: the metadata name an unknown layout.
    """
    if HeadSizes.of_shapes(shapes) is None:
        return None
    return QKV.FUSED if is_fused(shapes) else QKV.SPLIT, find_rotary(shapes, metadata)


def is_implied_by_names(qkv: QKV, rotary: Rotary) -> bool:
    """Return whether readers understand a file of this layout without metadata, like the released models."""
    return (qkv is QKV.FUSED) == (rotary is Rotary.INTERLEAVED)


def change_layout(
    entries: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    *,
    qkv: QKV | None = None,
    rotary: Rotary | None = None,
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Convert an MMDiT to another layout, in which it computes the same function.

    Args:
        entries: the tensors, under the names of the published models with an optional prefix.
        metadata: metadata of the file.
        qkv: whether q, k and v are fused; None means no change.
        rotary: the order of rotary pairs; None means no change.

    Returns:
        The tensors, and the metadata with the new order of rotary pairs.

    Raises:
        RequestError: the tensors belong to another model.
        CheckpointError: the sizes of q, k and v do not fit the other tensors, or the metadata name an unknown
            layout.
    """
    shapes = {key: entry.shape for key, entry in entries.items()}
    sizes = HeadSizes.of_shapes(shapes)
    if sizes is None:
        given = " and ".join(f"--{name}={value}" for name, value in (("qkv", qkv), ("rotary", rotary)) if value)
        raise RequestError(
            f"{given} is for an MMDiT, and this checkpoint is none: "
            "it lacks a matching img_in.weight and norm.query_norm.scale",
            hint="osora ckpt inspect shows its tensors; --rename gives them the names of the published models",
        )
    old_rotary = find_rotary(shapes, metadata)
    new_qkv = qkv or (QKV.FUSED if is_fused(shapes) else QKV.SPLIT)
    new_rotary = rotary or old_rotary
    reorder = new_rotary is not old_rotary
    plan = plan_layout(shapes, sizes, qkv=new_qkv, reorder=reorder)
    wrong = left_over(plan, qkv=new_qkv, reorder=reorder)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of q, k and v do not fit the model's hidden_size={sizes.hidden_size} and "
            f"head_dim={sizes.head_dim}: {first_few(wrong)}"
        )
    changed = {
        name: _joined(name, [_taken(piece, entries[piece.key], sizes, new_rotary) for piece in pieces])
        for name, pieces in plan.items()
    }
    return changed, {**metadata, ROTARY_METADATA: new_rotary.value}


def _taken(piece: Piece, entry: LazyTensor, sizes: HeadSizes, rotary: Rotary) -> LazyTensor:
    part = entry if piece.stop is None else entry.map(lambda whole: whole[piece.start : piece.stop])
    if not piece.reordered:
        return part
    return part.map(lambda rows: reorder_heads(rows, head_dim=sizes.head_dim, rotary=rotary))


def _joined(name: str, parts: Sequence[LazyTensor]) -> LazyTensor:
    if len(parts) == 1:
        return parts[0]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"q, k and v have different dtypes and cannot become {name}: {', '.join(sorted(map(str, dtypes)))}",
            hint="give them one with --dtype",
        )
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.read() for part in parts]))
