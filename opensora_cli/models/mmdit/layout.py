"""Layouts of published MMDiT weights, conversions between them, and names of layers in fused files and in diffusers.

q, k and v are *fused* (`qkv`; `linear1` holds q, k, v and the MLP input) or *split* (`q_proj`, `k_proj`, `v_proj`;
`v_mlp` in single-stream blocks). Rotary pairs of fused files are *interleaved*, dims (2j, 2j+1) as in Flux, and those
of split files *half-split*, dims (j, D/2+j) as in Open-Sora v2, with the even rows of each head of q and k first. Our
model is split.

A plan defines, by names and shapes alone, which rows of a file become which tensor.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from opensora_cli.core.choices import QKV
from opensora_cli.models.mmdit.config import MMDiTConfig

ConvertFn = Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]]
Shape = tuple[int, ...]


FUSED = {"double": "qkv", "single": "linear1"}
"""Layer that holds q, k and v in fused files, by kind of block."""
SPLIT = {"double": ("q_proj", "k_proj", "v_proj"), "single": ("q_proj", "k_proj", "v_mlp")}
"""Layers that hold q, k and v in split files, in the order of their rows."""
ROTATED = frozenset({"q_proj", "k_proj", "query_norm", "key_norm"})
"""Split layers, and scales, whose rows rotary embeddings pair."""
_BLOCK_TENSOR = re.compile(
    r"(?P<module>(?:.*\.)?(?P<stack>double|single)_blocks\.\d+\.(?:.*\.)?)(?P<linear>\w+)\.(?P<kind>\w+)", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Sizes that determine a layout: rows of q, of k and of v, and of one head."""

    hidden_size: int
    head_dim: int

    @classmethod
    def of_config(cls, config: MMDiTConfig) -> Self:
        """Return the sizes of a model."""
        return cls(hidden_size=config.hidden_size, head_dim=config.head_dim)

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> Self | None:
        """Return the sizes of the MMDiT with these tensors; None if they do not belong to an MMDiT."""
        inputs = {shape for key, shape in shapes.items() if f".{key}".endswith(".img_in.weight")}
        norms = {shape for key, shape in shapes.items() if key.endswith(".norm.query_norm.scale")}
        if [len(shape) for shape in (*inputs, *norms)] != [2, 1]:
            return None
        (hidden_size, _), (head_dim,) = inputs.pop(), norms.pop()
        fits = hidden_size > 0 and head_dim > 0 and head_dim % 2 == 0 and hidden_size % head_dim == 0
        return cls(hidden_size=hidden_size, head_dim=head_dim) if fits else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of the file's tensor `key`, as a part of a new tensor. `stop` None means the end."""

    key: str
    start: int = 0
    stop: int | None = None
    reordered: bool = False
    """Whether the rows of every head change from one rotary layout to the other."""


Plan = dict[str, tuple[Piece, ...]]
"""For each tensor to be made, the pieces whose rows it consists of."""


def is_fused(keys: Iterable[str]) -> bool:
    """Return whether the keys belong to a file with fused q, k and v."""
    return any(".qkv." in key or ".linear1." in key for key in keys)


def plan_layout(shapes: Mapping[str, Shape], sizes: HeadSizes, *, qkv: QKV, reorder: bool) -> Plan:
    """Return the plan that converts the tensors of a file to the layout `qkv`, and with `reorder` to the other rotary.

    Tensors that are none of q, k and v, or whose shapes are not what `sizes` demands, pass unchanged.
    """
    split = {name: piece for key in shapes for name, piece in _split(key, shapes, sizes)}
    if reorder:
        split = {name: _reordered(name, piece, shapes, sizes) for name, piece in split.items()}
    if qkv is QKV.SPLIT:
        return {name: (piece,) for name, piece in split.items()}
    plan: Plan = {}
    for name in split:
        whole, parts = _whole(name, split, shapes, sizes)
        plan.setdefault(whole, _joined([split[part] for part in parts]))
    return plan


def left_over(plan: Plan, *, qkv: QKV, reorder: bool) -> list[str]:
    """Return the tensors of q, k and v that a plan cannot convert to its layout."""
    found = []
    for key, pieces in plan.items():
        match = _BLOCK_TENSOR.fullmatch(key)
        if match is None:
            continue
        other = SPLIT[match["stack"]] if qkv is QKV.FUSED else (FUSED[match["stack"]],)
        in_old_order = reorder and match["linear"] in ROTATED and not pieces[0].reordered
        if match["linear"] in other or in_old_order:
            found.append(key)
    return found


def planned_shapes(plan: Plan, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a plan's tensors for a file with `shapes`."""
    made = {}
    for name, pieces in plan.items():
        first = shapes[pieces[0].key]
        if len(pieces) == 1 and pieces[0].stop is None:
            made[name] = first
        else:
            rows = (shapes[p.key][0] if p.stop is None else p.stop - p.start for p in pieces)
            made[name] = (sum(rows), *first[1:])
    return made


def reorder_heads(tensor: Tensor, *, head_dim: int, qkv: QKV) -> Tensor:
    """Bring the rows of each head into the order of the layout `qkv`; they must be in the other one.

    `tensor` is the (H·D, ...) weight or bias of q or k, or the (D,) scale of their norm.
    """
    halves = (head_dim // 2, 2) if qkv is QKV.SPLIT else (2, head_dim // 2)
    return tensor.reshape(-1, *halves, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def converter(config: MMDiTConfig, *, interleaved: bool | None = None) -> ConvertFn:
    """Return the function that converts a file's tensors, one at a time, to our layout. Unknown keys pass unchanged.

    `interleaved` is about the file's rotary pairs; None means those of fused files.
    """
    sizes = HeadSizes.of_config(config)

    def convert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        shapes = {key: tuple(tensors[key].shape) for key in tensors}
        reorder = is_fused(tensors) if interleaved is None else interleaved
        for name, (piece,) in plan_layout(shapes, sizes, qkv=QKV.SPLIT, reorder=reorder).items():
            rows = tensors[piece.key] if piece.stop is None else tensors[piece.key][piece.start : piece.stop]
            yield name, reorder_heads(rows, head_dim=sizes.head_dim, qkv=QKV.SPLIT) if piece.reordered else rows

    return convert


def _split(key: str, shapes: Mapping[str, Shape], sizes: HeadSizes) -> Iterator[tuple[str, Piece]]:
    """Cut a fused tensor along its rows; a tensor of any other kind is its own only piece."""
    match, hidden = _BLOCK_TENSOR.fullmatch(key), sizes.hidden_size
    rows = shapes[key][0] if shapes[key] else 0
    if match is not None and match["linear"] == FUSED[match["stack"]]:
        names = [f"{match['module']}{part}.{match['kind']}" for part in SPLIT[match["stack"]]]
        fits = rows == 3 * hidden if match["stack"] == "double" else rows > 3 * hidden
        if fits and not any(name in shapes for name in names):
            for index, name in enumerate(names):
                yield name, Piece(key, index * hidden, (index + 1) * hidden if index < 2 else rows)
            return
    # A fused tensor that does not fit stays: the strict loader reports its key as an unexpected one.
    yield key, Piece(key)


def _reordered(name: str, piece: Piece, shapes: Mapping[str, Shape], sizes: HeadSizes) -> Piece:
    match, shape = _BLOCK_TENSOR.fullmatch(name), shapes[piece.key]
    if match is None or match["linear"] not in ROTATED or not shape:
        return piece
    rows = shape[0] if piece.stop is None else sizes.hidden_size
    return replace(piece, reordered=rows % sizes.head_dim == 0)


def _whole(
    name: str, split: Mapping[str, Piece], shapes: Mapping[str, Shape], sizes: HeadSizes
) -> tuple[str, tuple[str, ...]]:
    """Return the fused tensor that the tensor `name` belongs to, and all its parts; itself, if it belongs to none."""
    match = _BLOCK_TENSOR.fullmatch(name)
    if match is not None and match["linear"] in SPLIT[match["stack"]]:
        whole, *names = (
            f"{match['module']}{linear}.{match['kind']}" for linear in (FUSED[match["stack"]], *SPLIT[match["stack"]])
        )
        if whole not in split and all(part in split for part in names):
            pieces = [split[part] for part in names]
            if _is_one_tensor(pieces) or _fit_together([shapes[piece.key] for piece in pieces], match["stack"], sizes):
                return whole, tuple(names)
    return name, (name,)


def _is_one_tensor(pieces: Sequence[Piece]) -> bool:
    return len({piece.key for piece in pieces}) == 1


def _fit_together(shapes: Sequence[Shape], stack: str, sizes: HeadSizes) -> bool:
    """Return whether q, k and v have the required numbers of rows, and rows of one shape."""
    hidden = sizes.hidden_size
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        return False
    q, k, v = (shape[0] for shape in shapes)
    return q == k == hidden and (v == hidden if stack == "double" else v > hidden)


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Use a tensor unchanged if all its rows have kept their order."""
    if _is_one_tensor(pieces) and not any(piece.reordered for piece in pieces):
        return (Piece(pieces[0].key),)
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a layer of another name, and which rows of ours they are."""

    layer: str
    """Path of our layer."""
    start: int
    """First of our rows."""
    source: int
    """First of the other layer's rows."""
    count: int


@dataclass(frozen=True, slots=True)
class Named:
    """Meaning of a name of a layer."""

    spans: tuple[Span, ...]
    layout: QKV
    """Layout of q and k, with their rotary pairs, in models with this name."""
    is_fused: bool = False

    @property
    def rows(self) -> int:
        """Number of rows of the layer."""
        return sum(span.count for span in self.spans)


_IN_BLOCK = re.compile(r"(?P<stack>double|single)_blocks\.(?P<index>\d+)\.(?P<layer>.+)", re.DOTALL)
_STACKS = {"double": "transformer_blocks", "single": "single_transformer_blocks"}

# The classes FluxTransformerBlock, FluxSingleTransformerBlock and FluxTransformer2DModel of diffusers.
_DIFFUSERS = {
    "double": {
        "img_mod.lin": "norm1.linear",
        "txt_mod.lin": "norm1_context.linear",
        "img_attn.q_proj": "attn.to_q",
        "img_attn.k_proj": "attn.to_k",
        "img_attn.v_proj": "attn.to_v",
        "txt_attn.q_proj": "attn.add_q_proj",
        "txt_attn.k_proj": "attn.add_k_proj",
        "txt_attn.v_proj": "attn.add_v_proj",
        "img_attn.proj": "attn.to_out.0",
        "txt_attn.proj": "attn.to_add_out",
        "img_mlp.0": "ff.net.0.proj",
        "img_mlp.2": "ff.net.2",
        "txt_mlp.0": "ff_context.net.0.proj",
        "txt_mlp.2": "ff_context.net.2",
    },
    "single": {
        "modulation.lin": "norm.linear",
        "q_proj": "attn.to_q",
        "k_proj": "attn.to_k",
        "linear2": "proj_out",
    },
}
_DIFFUSERS_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}


def linear_names(rows: Mapping[str, int], hidden_size: int) -> dict[str, Named]:
    """Return the names by which the linear layers of a split MMDiT are known, its own among them.

    `rows` has the number of rows of each layer, by its path. A layer of another name may hold rows of several of ours,
    or some rows of one.
    """
    names = {path: Named((Span(path, 0, 0, count),), QKV.SPLIT) for path, count in rows.items()}
    fused: dict[str, list[Span]] = {}
    for path, count in rows.items():
        owner, _, part = path.rpartition(".")
        stack = "double" if owner.endswith("_attn") else "single"
        if _IN_BLOCK.match(path) and part in SPLIT[stack]:
            span = Span(path, 0, SPLIT[stack].index(part) * hidden_size, count)
            fused.setdefault(f"{owner}.{FUSED[stack]}", []).append(span)
        for name, *spans in _of_diffusers(path, count, hidden_size):
            names[name] = Named(tuple(spans), QKV.FUSED)
    return names | {name: Named(tuple(spans), QKV.FUSED, is_fused=True) for name, spans in fused.items()}


def _of_diffusers(path: str, count: int, hidden_size: int) -> Iterator[tuple[str, Span] | tuple[str, Span, Span]]:
    match = _IN_BLOCK.fullmatch(path)
    if match is None:
        if path == "final_layer.adaLN_modulation.1":
            # There the scale comes first.
            yield "norm_out.linear", Span(path, hidden_size, 0, hidden_size), Span(path, 0, hidden_size, hidden_size)
        elif path in _DIFFUSERS_OUTSIDE:
            yield _DIFFUSERS_OUTSIDE[path], Span(path, 0, 0, count)
        return
    block = f"{_STACKS[match['stack']]}.{match['index']}"
    if match["layer"] == "v_mlp":
        yield f"{block}.attn.to_v", Span(path, 0, 0, hidden_size)
        yield f"{block}.proj_mlp", Span(path, hidden_size, 0, count - hidden_size)
    elif match["layer"] in _DIFFUSERS[match["stack"]]:
        yield f"{block}.{_DIFFUSERS[match['stack']][match['layer']]}", Span(path, 0, 0, count)
