"""Adapters of a fused model in every style of naming: the same numbers under other names."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_adapters import draw
from torch import Tensor

RANK, ALPHA = 3, 7.5

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A and B by the layer's path in the fused model, as of Flux."""


def fused_factors(fused: Mapping[str, Tensor], *, like: str = ".*", size: float = 0.3) -> Factors:
    """Return random matrices for the linear layers of a fused model whose paths fit a pattern."""
    layers = {name.removesuffix(".weight"): weight.shape for name, weight in fused.items() if weight.ndim == 2}
    chosen = {path: shape for path, shape in layers.items() if re.fullmatch(like, path)}
    assert chosen
    return {
        path: (draw(RANK, shape[1], seed=number) * size / shape[1] ** 0.5, draw(shape[0], RANK, seed=number + 1000))
        for number, (path, shape) in enumerate(chosen.items())
    }


def dotted(
    factors: Factors, *, prefix: str = "", a: str = "lora_A", b: str = "lora_B", alpha: float | None = ALPHA
) -> dict[str, Tensor]:
    """Return the tensors of a file with the paths as they are."""
    tensors: dict[str, Tensor] = {}
    for path, (factor_a, factor_b) in factors.items():
        tensors |= {f"{prefix}{path}.{a}.weight": factor_a.clone(), f"{prefix}{path}.{b}.weight": factor_b.clone()}
        tensors |= {f"{prefix}{path}.alpha": torch.tensor(alpha)} if alpha is not None else {}
    return tensors


def kohya(factors: Factors, *, prefix: str = "lora_unet_") -> dict[str, Tensor]:
    underscored = {path.replace(".", "_"): pair for path, pair in factors.items()}
    return dotted(underscored, prefix=prefix, a="lora_down", b="lora_up")


def diffusers_factors(factors: Factors, *, hidden: int) -> Factors:
    """Return the same for the layers of diffusers, which has q, k, v and the MLP apart, and the last scale first."""
    split: dict[str, tuple[Tensor, Tensor]] = {}
    for path, (a, b) in factors.items():
        name = re.sub(r"^double_blocks", "transformer_blocks", path)
        name = re.sub(r"^single_blocks", "single_transformer_blocks", name)
        for old, new in (
            ("img_mod.lin", "norm1.linear"),
            ("txt_mod.lin", "norm1_context.linear"),
            ("modulation.lin", "norm.linear"),
            ("img_attn.proj", "attn.to_out.0"),
            ("txt_attn.proj", "attn.to_add_out"),
            ("img_mlp.0", "ff.net.0.proj"),
            ("img_mlp.2", "ff.net.2"),
            ("txt_mlp.0", "ff_context.net.0.proj"),
            ("txt_mlp.2", "ff_context.net.2"),
            ("linear2", "proj_out"),
            ("img_in", "x_embedder"),
            ("final_layer.linear", "proj_out"),
            ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
        ):
            name = name.replace(old, new)
        parts = {
            "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        }
        for fused, names in parts.items():
            if name.endswith(f".{fused}"):
                rows = [*([hidden] * 3), len(b) - 3 * hidden][: len(names)]
                for part, piece in zip(names, b.split(rows), strict=True):
                    split[name.replace(fused, part)] = (a, piece)
                break
        else:
            if name == "final_layer.adaLN_modulation.1":
                shift, scale = b.chunk(2)
                name, b = "norm_out.linear", torch.cat([scale, shift])
            split[name] = (a, b)
    return split


STYLES: dict[str, Callable[[Factors, int], dict[str, Tensor]]] = {
    "fused": lambda factors, _: dotted(factors),
    "fused .default": lambda factors, _: dotted(factors, a="lora_A.default", b="lora_B.default"),
    "ComfyUI": lambda factors, _: dotted(factors, prefix="diffusion_model."),
    "ComfyUI lora_down": lambda factors, _: dotted(factors, prefix="diffusion_model.", a="lora_down", b="lora_up"),
    "lora.down": lambda factors, _: dotted(factors, prefix="transformer.", a="lora.down", b="lora.up"),
    "kohya": lambda factors, _: kohya(factors),
    "diffusers": lambda factors, hidden: dotted(diffusers_factors(factors, hidden=hidden), prefix="transformer."),
    "diffusers in kohya's spelling": lambda factors, hidden: kohya(
        diffusers_factors(factors, hidden=hidden), prefix="lora_transformer_"
    ),
}
"""Style -> the tensors of its file, of the factors and the width of the model."""


def write_styles(folder: Path, factors: Factors, *, hidden: int) -> dict[str, Path]:
    paths = {style: folder / f"{number}.safetensors" for number, style in enumerate(STYLES)}
    for style, path in paths.items():
        save_file(STYLES[style](factors, hidden), path)
    return paths
