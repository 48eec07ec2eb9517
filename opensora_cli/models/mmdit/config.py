"""The sizes of an MMDiT."""

from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, kw_only=True)
class MMDiTConfig:
    """Sizes of an MMDiT; the defaults are those of the released 11B video model.

    Args:
        in_channels: width of one packed token: latent channels x patch_size².
        vec_in_dim: width of the pooled prompt embedding (CLIP).
        context_in_dim: width of the prompt embedding (T5).
        mlp_ratio: width of an MLP over `hidden_size`.
        depth: double-stream blocks.
        depth_single_blocks: single-stream blocks.
        axes_dim: share of a head's width that the rotary embedding gives to time, height and width; even numbers that
            add up to `hidden_size / num_heads`.
        theta: base of the rotary frequencies.
        qkv_bias: whether q, k and v of double-stream blocks have a bias (single-stream blocks always have one).
        guidance_embed: whether the model is guidance-distilled and takes the guidance scale as an input.
        cond_embed: whether the model takes a conditioning mask and reference latents.
        patch_size: latent pixels along one side of a token.
        predicts_data: whether the last layer puts out the data, from which the velocity is computed, instead of the
            velocity itself (Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise"). The velocity has
            all of a token's noise in it, for which a model that is no wider than its tokens has no room.

    Raises:
        RequestError: sizes that contradict each other.
    """

    in_channels: int = 64
    vec_in_dim: int = 768
    context_in_dim: int = 4096
    hidden_size: int = 3072
    mlp_ratio: float = 4.0
    num_heads: int = 24
    depth: int = 19
    depth_single_blocks: int = 38
    axes_dim: tuple[int, ...] = (16, 56, 56)
    theta: float = 10000
    qkv_bias: bool = True
    guidance_embed: bool = False
    cond_embed: bool = True
    patch_size: int = 2
    predicts_data: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise RequestError(f"model.hidden_size={self.hidden_size} must be divisible by num_heads={self.num_heads}")
        if len(self.axes_dim) != 3 or any(dim <= 0 or dim % 2 for dim in self.axes_dim):
            raise RequestError(f"model.axes_dim={list(self.axes_dim)} must be three even numbers over 0")
        if sum(self.axes_dim) != self.head_dim:
            raise RequestError(
                f"model.axes_dim={list(self.axes_dim)} must add up to hidden_size/num_heads={self.head_dim}"
            )
        if self.in_channels % self.patch_size**2:
            raise RequestError(
                f"model.in_channels={self.in_channels} must be divisible by patch_size²={self.patch_size**2}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_hidden_size(self) -> int:
        """Width inside an MLP."""
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def conditioning_channels(self) -> int:
        """Width of a packed conditioning token: the mask's one channel and the reference latents, packed."""
        return self.in_channels + self.patch_size**2
