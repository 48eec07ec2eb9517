"""MMDiT of Open-Sora 2.0: packed latents, time and prompt in, velocity out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.core.attention import AttentionFn
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.models.mmdit.blocks import modulation_layers
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import (
    DoubleStreamBlock,
    Modulation,
    ModulationInput,
    Rotary,
    SingleStreamBlock,
    modulated_norm,
    modulation_values,
)

TIME_EMBEDDING_WIDTH = 256
_LEAST_TIME = 0.05
"""Smallest time that divides predicted data to get a velocity."""
_ZERO_AT_FIRST = frozenset({"final_layer.adaLN_modulation.1", "final_layer.linear", "cond_in"})


@dataclass(slots=True)
class BlockResidual:
    """Sum of the block outputs, for reuse in a later evaluation."""

    added_BND: Tensor | None = None
    """Sum of the block outputs. None means that it has not been computed yet."""
    is_reused: bool = False
    """Whether the sum is added unchanged, instead of computing the blocks."""


@dataclass(frozen=True, slots=True)
class KnownInputs:
    """Embeddings of an evaluation that do not depend on the latents, computed earlier."""

    modulation: Mapping[nn.Module, Tensor]
    """Rows of `MMDiT.modulation_of`, for the times, the pooled prompts and the guidance."""
    text_BLD: Tensor | None = None
    """`MMDiT.text_tokens` of the prompts. None means that the model computes them."""
    rotary: Rotary | None = None
    """`MMDiT.rotary_table` of the positions. None means that the model computes it."""


class VectorEmbedder(nn.Module):
    """MLP of two layers from any vector to the modulation vector."""

    def __init__(self, in_features: int, hidden_size: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_features, hidden_size)
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, hidden_size)."""
        out: Tensor = self.out_layer(functional.silu(self.in_layer(x_BI)))
        return out


class FinalLayer(nn.Module):
    """Modulated norm and projection to the velocity of each packed token."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.in_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.hidden_size, 2 * config.hidden_size))

    def forward(self, latents_BND: Tensor, vector: ModulationInput) -> Tensor:
        """Return (B, N, in_channels)."""
        shift, scale = modulation_values(self.adaLN_modulation[1], vector)[:, None].chunk(2, dim=-1)
        velocity: Tensor = self.linear(modulated_norm(latents_BND, shift=shift, scale=scale))
        return velocity


class MMDiT(nn.Module):
    """Model of the velocity (noise - data) of packed latents (Open-Sora 2.0, Peng et al. 2025).

    Weights have one layout: split q, k and v, rotary pairs (j, D/2 + j); `layout.py` converts the others.
    """

    def __init__(self, config: MMDiTConfig, *, attention: AttentionFn = sdpa) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.img_in = nn.Linear(config.in_channels, config.hidden_size)
        self.time_in = VectorEmbedder(TIME_EMBEDDING_WIDTH, config.hidden_size)
        self.vector_in = VectorEmbedder(config.vec_in_dim, config.hidden_size)
        self.guidance_in = VectorEmbedder(TIME_EMBEDDING_WIDTH, config.hidden_size) if config.guidance_embed else None
        self.cond_in = nn.Linear(config.conditioning_channels, config.hidden_size) if config.cond_embed else None
        self.txt_in = nn.Linear(config.context_in_dim, config.hidden_size)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(config, attention=attention) for _ in range(config.depth))
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(config, attention=attention) for _ in range(config.depth_single_blocks)
        )
        self.final_layer = FinalLayer(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, *, generator: torch.Generator | None = None) -> None:
        """Initialize weights for training from scratch, as DiT does (Peebles & Xie 2023).

        Every block starts as the identity, the velocity at zero, and the condition is ignored at first. `generator` is
        on the weights' device; None is torch's global one.
        """
        for name, parameter in self.named_parameters():
            self.initialize_weight(name, parameter, generator=generator)

    @torch.no_grad()
    def initialize_weight(self, name: str, out: Tensor, *, generator: torch.Generator | None = None) -> None:
        """Initialize one parameter, as `reset_parameters` does in the order of `named_parameters`, by filling `out`."""
        path, _, kind = name.rpartition(".")
        parent = self.get_submodule(path.rpartition(".")[0])
        if kind == "scale":
            nn.init.ones_(out)
        elif kind == "bias" or path in _ZERO_AT_FIRST or isinstance(parent, Modulation):
            nn.init.zeros_(out)
        elif isinstance(parent, VectorEmbedder):
            nn.init.normal_(out, std=0.02, generator=generator)
        else:
            nn.init.xavier_uniform_(out, generator=generator)

    def set_attention(self, attention: AttentionFn) -> None:
        """Replace the joint attention of all blocks."""
        self.attention = attention
        for block in (*self.double_blocks, *self.single_blocks):
            block.attention = attention

    def set_sequence_chunk(self, tokens: int | None) -> None:
        """Limit how many tokens blocks compute at a time without gradients, in all but attention, to save memory.

        Results match up to rounding. Some thousands cost hardly any time on a GPU. None means all at once.
        """
        for block in (*self.double_blocks, *self.single_blocks):
            block.chunk_tokens = tokens

    def forward(
        self,
        packed_latents_BND: Tensor,
        *,
        position_ids_BN3: Tensor,
        timesteps_B: Tensor,
        prompt_embeds_BLC: Tensor,
        pooled_prompt_embeds_BV: Tensor,
        conditioning_BNK: Tensor | None = None,
        embedded_guidance_B: Tensor | None = None,
        residual: BlockResidual | None = None,
        known: KnownInputs | None = None,
    ) -> Tensor:
        """Return the velocity, shaped as `packed_latents_BND` and in its dtype.

        The residual stream is kept in the dtype of the weights, also under autocast; norms of q and k and the rotary
        embedding are always in fp32. Raises ValueError if the model needs a missing condition or guidance, or does not
        use a given one, or if there is no residual to reuse.

        Args:
            packed_latents_BND: N tokens of in_channels values.
            position_ids_BN3: time, row and column of each token; a batch of 1 serves all samples.
            timesteps_B: 1 (noise) to 0 (data), in any floating dtype.
            prompt_embeds_BLC: T5 states, context_in_dim wide. Text tokens stand at position zero.
            pooled_prompt_embeds_BV: CLIP embedding, vec_in_dim wide.
            conditioning_BNK: packed conditioning mask and reference latents, in_channels + patch_size² wide.
            embedded_guidance_B: guidance scale.
            residual: storage for block outputs, or block outputs to reuse; of the same samples and branches.
            known: precomputed embeddings of times, prompts, positions and guidance; None computes them.
        """
        if (conditioning_BNK is None) != (self.cond_in is None):
            raise ValueError(
                f"conditioning_BNK must be given exactly where cond_embed ({self.config.cond_embed}) is set"
            )
        if (embedded_guidance_B is None) != (self.guidance_in is None):
            raise ValueError(
                f"embedded_guidance_B must be given exactly where guidance_embed ({self.config.guidance_embed}) is set"
            )
        dtype = self.img_in.weight.dtype
        latents = self.img_in(packed_latents_BND.to(dtype)).to(dtype)
        if self.cond_in is not None and conditioning_BNK is not None:
            latents = latents + self.cond_in(conditioning_BNK.to(dtype))
        vector: ModulationInput = (
            self._modulation_vector(timesteps_B, pooled_prompt_embeds_BV, embedded_guidance_B)
            if known is None
            else known.modulation
        )
        if residual is not None and residual.is_reused:
            if residual.added_BND is None:
                raise ValueError("residual.is_reused is set, and nothing has been added before")
            return self._velocity(latents + residual.added_BND, vector, packed_latents_BND, timesteps_B)
        before = None if residual is None else latents
        text = None if known is None else known.text_BLD
        if text is None:
            text = self.text_tokens(prompt_embeds_BLC)
        rotary = None if known is None else known.rotary
        if rotary is None:
            rotary = self.rotary_table(position_ids_BN3, text_length=text.shape[1])

        for block in self.double_blocks:
            latents, text = block(latents, text, vector, rotary)
        text_length = text.shape[1]
        tokens = torch.cat((text, latents), dim=1)
        del text, latents
        for block in self.single_blocks:
            tokens = block(tokens, vector, rotary)
        latents = tokens[:, text_length:]
        if residual is not None and before is not None:
            residual.added_BND = latents - before
        return self._velocity(latents, vector, packed_latents_BND, timesteps_B)

    def modulation_of(
        self, timesteps_B: Tensor, pooled_prompt_embeds_BV: Tensor, embedded_guidance_B: Tensor | None = None
    ) -> dict[nn.Module, Tensor]:
        """Return the modulation values for each of B times with the pooled prompt, by layer; see `forward`.

        Weights on another device, or in another dtype, are copied to the arguments' device, one layer after the other.
        """
        vector_BD = self._modulation_vector(timesteps_B, pooled_prompt_embeds_BV, embedded_guidance_B)
        activated_BD = functional.silu(vector_BD)
        layers = (self.get_submodule(path) for path in modulation_layers(self.config))
        return {layer: _computed_where(activated_BD, layer) for layer in layers}

    def text_tokens(self, prompt_embeds_BLC: Tensor) -> Tensor:
        """Return the text tokens for the blocks, (B, L, hidden_size)."""
        dtype = self.img_in.weight.dtype
        tokens: Tensor = self.txt_in(prompt_embeds_BLC.to(dtype)).to(dtype)
        return tokens

    def rotary_table(self, position_ids_BN3: Tensor, *, text_length: int) -> Rotary:
        """Return cosine and sine for the joint sequence, text first; see `rotary_angles`."""
        text_ids = position_ids_BN3.new_zeros(position_ids_BN3.shape[0], text_length, position_ids_BN3.shape[2])
        joint_ids = torch.cat((text_ids, position_ids_BN3), dim=1)
        return rotary_angles(joint_ids, axes_dim=self.config.axes_dim, theta=self.config.theta)

    def _velocity(
        self, latents_BND: Tensor, vector: ModulationInput, packed_latents_BND: Tensor, timesteps_B: Tensor
    ) -> Tensor:
        out: Tensor = self.final_layer(latents_BND, vector)
        if self.config.predicts_data:
            # x_t = (1-t)·data + t·noise, so that the velocity noise - data is (x_t - data)/t.
            t_B11 = timesteps_B.float().clamp(min=_LEAST_TIME).view(-1, 1, 1)
            out = (packed_latents_BND.float() - out.float()) / t_B11
        return out.to(packed_latents_BND.dtype)

    def _modulation_vector(self, timesteps_B: Tensor, pooled_BV: Tensor, guidance_B: Tensor | None) -> Tensor:
        dtype = self.img_in.weight.dtype
        vector: Tensor = self.time_in(sinusoidal_embedding(timesteps_B, dtype=dtype)).to(dtype)
        if self.guidance_in is not None and guidance_B is not None:
            vector = vector + self.guidance_in(sinusoidal_embedding(guidance_B, dtype=dtype))
        pooled: Tensor = self.vector_in(pooled_BV.to(dtype))
        return vector + pooled


def _computed_where(x_BD: Tensor, layer: nn.Module) -> Tensor:
    """Return the output of a layer for `x_BD`, on the device and in the dtype of `x_BD`."""
    is_in_8_bits = any(weight.dtype.itemsize == 1 for weight in layer.parameters())
    dtype = None if is_in_8_bits else x_BD.dtype
    weights = {name: weight.to(device=x_BD.device, dtype=dtype) for name, weight in layer.named_parameters()}
    out: Tensor = torch.func.functional_call(layer, weights, (x_BD,))
    return out


def sinusoidal_embedding(
    values_B: Tensor, *, dtype: torch.dtype, width: int = TIME_EMBEDDING_WIDTH, max_period: float = 10000.0
) -> Tensor:
    """Embed times in 0..1 or guidance scales as cosines, then sines, of falling frequencies; (B, width) in `dtype`.

    The number is rounded to `dtype` before the factor 1000, because the released weights were trained so.
    """
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=values_B.device) / half
    frequencies = torch.exp(-math.log(max_period) * exponents)
    angles = 1000.0 * values_B.to(dtype).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def rotary_angles(position_ids_BNA: Tensor, *, axes_dim: tuple[int, ...], theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every rotation angle, both (B, 1, N, D/2) in fp32, the axes concatenated.

    Axis i has axes_dim[i]/2 frequencies theta^(-2k/axes_dim[i]).
    """
    angles = []
    for axis, dim in enumerate(axes_dim):
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids_BNA.device) / dim
        # Multiply by broadcasting because autocast would round the angles of a matmul to bf16.
        angles.append(position_ids_BNA[..., axis, None].float() * theta**-exponents)
    angles_B1NE = torch.cat(angles, dim=-1)[:, None]
    return angles_B1NE.cos(), angles_B1NE.sin()
