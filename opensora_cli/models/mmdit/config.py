"""Sizes of an MMDiT."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from opensora_cli.core.section import Section

_Width = Annotated[int, Field(ge=1, le=65_536)]
"""Features or heads of a layer."""
_Blocks = Annotated[int, Field(ge=0, le=1000)]


class MMDiTConfig(Section):
    """Sizes of an MMDiT. The defaults describe the released 11B video model.

    A transformer that predicts data instead of velocity (Li & He 2025, "Back to Basics: Let Denoising Generative Models
    Denoise") can be narrower than its tokens. A velocity contains all the noise of a token.
    """

    in_channels: _Width = Field(default=64, description="Channels of a token: latent channels x patch_size squared.")
    vec_in_dim: _Width = Field(default=768, description="Width of the pooled CLIP embedding.")
    context_in_dim: _Width = Field(default=4096, description="Width of the T5 embeddings.")
    hidden_size: _Width = Field(default=3072, description="Width of the transformer.")
    mlp_ratio: float = Field(default=4.0, ge=0.001, le=1024, description="Width of the MLPs relative to hidden_size.")
    num_heads: _Width = Field(default=24, description="Attention heads. They divide hidden_size.")
    depth: _Blocks = Field(default=19, description="Double-stream blocks.")
    depth_single_blocks: _Blocks = Field(default=38, description="Single-stream blocks.")
    axes_dim: tuple[_Width, ...] = Field(
        default=(16, 56, 56), description="Even rotary widths of time, height and width. Their sum is the head width."
    )
    theta: float = Field(default=10_000, ge=0.001, le=10**9, description="Base of the rotary frequencies.")
    qkv_bias: bool = Field(default=True, description="Whether q, k and v of double-stream blocks have a bias.")
    guidance_embed: bool = Field(default=False, description="Whether the model is guidance-distilled.")
    cond_embed: bool = Field(default=True, description="Whether the model takes reference latents.")
    patch_size: int = Field(default=2, ge=1, le=1024, description="Side of a token in latent pixels.")
    predicts_data: bool = Field(default=False, description="Whether the transformer predicts data, not velocity.")

    def rules(self) -> Iterator[str]:
        if self.hidden_size % self.num_heads:
            yield f"model.num_heads={self.num_heads} must divide model.hidden_size={self.hidden_size}"
            return
        axes = self.axes_dim
        if len(axes) != 3 or sum(axes) != self.head_dim or any(dim % 2 for dim in axes):
            yield (
                f"model.axes_dim={','.join(map(str, axes))} must be three even numbers (time, height, width) that add "
                f"up to {self.head_dim}, the width of a head (model.hidden_size={self.hidden_size} / "
                f"model.num_heads={self.num_heads})"
            )
        if not self.mlp_hidden_size:
            yield (
                f"model.mlp_ratio={self.mlp_ratio:g} must give the MLPs of model.hidden_size={self.hidden_size} a width"
            )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_hidden_size(self) -> int:
        """Width inside an MLP."""
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def conditioning_channels(self) -> int:
        """Channels of a packed conditioning token: one of the mask, and the reference latents."""
        return self.in_channels + self.patch_size**2
