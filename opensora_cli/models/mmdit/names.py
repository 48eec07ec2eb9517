"""Names of the linear layers of an MMDiT in fused files and in diffusers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opensora_cli.core.choices import Rotary
from opensora_cli.models.mmdit.layout import FUSED, SPLIT


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
    rotary: Rotary
    """Layout of rotary pairs in q and k of models with this name."""
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
    names = {path: Named((Span(path, 0, 0, count),), Rotary.HALF) for path, count in rows.items()}
    fused: dict[str, list[Span]] = {}
    for path, count in rows.items():
        owner, _, part = path.rpartition(".")
        stack = "double" if owner.endswith("_attn") else "single"
        if _IN_BLOCK.match(path) and part in SPLIT[stack]:
            span = Span(path, 0, SPLIT[stack].index(part) * hidden_size, count)
            fused.setdefault(f"{owner}.{FUSED[stack]}", []).append(span)
        for name, *spans in _of_diffusers(path, count, hidden_size):
            names[name] = Named(tuple(spans), Rotary.INTERLEAVED)
    return names | {name: Named(tuple(spans), Rotary.INTERLEAVED, is_fused=True) for name, spans in fused.items()}


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
