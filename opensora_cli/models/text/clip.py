"""The text tower of a CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020), with the names of its files."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.text.sizes import ClipSizes

_TOWER = "text_model."
_OTHER_PARTS = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")
_POSITION_IDS = "embeddings.position_ids"
"""A constant, which files of older versions carry."""


class ClipTextModel(nn.Module):
    """Tables of tokens and positions, layers in which each token attends to those before it, and a norm."""

    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.sizes = sizes
        # Dictionaries because the published keys are nested.
        self.embeddings = nn.ModuleDict(
            {
                "token_embedding": nn.Embedding(sizes.vocab_size, sizes.hidden_size),
                "position_embedding": nn.Embedding(sizes.max_length, sizes.hidden_size),
            }
        )
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(_Layer(sizes) for _ in range(sizes.num_layers))})
        self.final_layer_norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.eps)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Return the pooled output, (B, C), of token ids: the last state of the token that ends the text."""
        positions_LC: Any = self.embeddings["position_embedding"].weight[: ids_BL.shape[1]]  # type: ignore[index]
        states_BLC = self.embeddings["token_embedding"](ids_BL) + positions_LC
        for layer in cast(nn.ModuleList, self.encoder["layers"]):
            states_BLC = layer(states_BLC)
        states_BLC = self.final_layer_norm(states_BLC)
        # OpenAI's files say 2, and mean the largest id.
        ends_BL = ids_BL if self.sizes.end_id == 2 else (ids_BL == self.sizes.end_id).int()
        pooled: Tensor = states_BLC[torch.arange(len(ids_BL), device=ids_BL.device), ends_BL.argmax(dim=-1)]
        return pooled


class _Layer(nn.Module):
    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        self.layer_norm1 = nn.LayerNorm(sizes.hidden_size, eps=sizes.eps)
        self.mlp = _MLP(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.hidden_size, eps=sizes.eps)

    def forward(self, states_BLC: Tensor) -> Tensor:
        states_BLC = states_BLC + self.self_attn(self.layer_norm1(states_BLC))
        out: Tensor = states_BLC + self.mlp(self.layer_norm2(states_BLC))
        return out


class _Attention(nn.Module):
    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.k_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.v_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.q_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.out_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended_BHLD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out_proj(attended_BHLD.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    def __init__(self, sizes: ClipSizes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        # An approximation of GELU: Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2.
        out: Tensor = self.fc2(inner * torch.sigmoid(1.702 * inner))
        return out


def clip_weights(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the text tower's tensors in a file; the image tower of a whole CLIP is skipped."""
    for key in tensors:
        name = key.removeprefix(_TOWER)
        if name != _POSITION_IDS and not key.startswith(_OTHER_PARTS):
            yield name, tensors[key]
