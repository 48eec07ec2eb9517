"""Frozen autoencoder and text encoders that the transformer learns from.

They encode clips one by one. So the result for a clip is bitwise identical in any batch, and also the same in training
and for a cache.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.device import is_accelerator, queued_copy, torch_dtype
from opensora_cli.engine.components.architectures import load_autoencoder, vae_tiling
from opensora_cli.engine.components.text_encoders import (
    cast_later,
    load_clip,
    load_t5,
    stored_t5_dtype,
    streamed_layers,
)
from opensora_cli.engine.encode.inputs import require_frozen_parts
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.tiles import NO_TILING, Tiling
from opensora_cli.settings.devices import DType
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import MMDiTTrainSettings

_CPU = torch.device("cpu")

TextEncoder = Callable[[list[str]], Tensor]
"""Function from captions to their embeddings: (B,L,C) for T5, (B,V) for CLIP."""


@dataclass(frozen=True, slots=True)
class EmptyPrompt:
    """Embeddings that replace those of a dropped caption."""

    prompt_embeds_LC: Tensor
    pooled_prompt_embeds_V: Tensor


@dataclass(frozen=True)
class Encoders:
    """Frozen autoencoder and text encoders; latents are the mode of the autoencoder's posterior."""

    autoencoder: Autoencoder
    _: KW_ONLY
    t5: TextEncoder
    clip: TextEncoder
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    """Dtype of the frames that the autoencoder gets."""
    tiling: Tiling = NO_TILING

    @torch.no_grad()
    def latents(self, pixels_THWC: Tensor) -> Tensor:
        """Return the latents (C,T,H,W) of uint8 frames; raises RequestError for a shape that cannot be encoded."""
        pixels_CTHW = queued_copy(pixels_THWC, self.device).permute(3, 0, 1, 2)
        pixels_BCTHW = (pixels_CTHW[None].float() / 127.5 - 1.0).to(self.dtype)
        with torch.autocast(self.device.type, enabled=False):
            return self.autoencoder.encode(pixels_BCTHW, tiling=self.tiling)[0]

    @torch.no_grad()
    def prompt_embeds(self, caption: str) -> Tensor:
        """Return the T5 embeddings of a caption, (L,C)."""
        with torch.autocast(self.device.type, enabled=False):
            return self.t5([caption])[0]

    @torch.no_grad()
    def pooled_prompt_embeds(self, caption: str) -> Tensor:
        """Return the CLIP embedding of a caption, (V)."""
        with torch.autocast(self.device.type, enabled=False):
            return self.clip([caption])[0]

    @cached_property
    def empty_prompt(self) -> EmptyPrompt:
        """Embeddings of the empty prompt."""
        return EmptyPrompt(self.prompt_embeds(""), self.pooled_prompt_embeds(""))


def load_encoders(settings: TrainSettings, *, device: torch.device) -> Encoders:
    """Load the frozen autoencoder and text encoders."""
    (vae, t5, clip), text = require_frozen_parts(settings), settings.text
    dtype = frozen_dtype(settings.train_mmdit, device)
    return Encoders(
        load_autoencoder(settings.vae, vae, device=device, dtype=dtype),
        t5=_load_t5(t5, max_length=text.t5_max_length, device=device, dtype=dtype),
        clip=load_clip(clip, max_length=text.clip_max_length, device=device, dtype=dtype).encode,
        device=device,
        dtype=dtype,
        tiling=vae_tiling(settings.vae),
    )


def _load_t5(folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load T5. On a CPU its layers stay mapped, and are cast one by one for each caption."""
    streams = cast_later(device, dtype) and stored_t5_dtype(folder) not in (None, dtype)
    t5 = load_t5(folder, max_length=max_length, device=device, dtype=dtype, layers_on_host=streams)
    if not streams:
        return t5.encode

    def encode(captions: list[str]) -> Tensor:
        with streamed_layers(t5, device=device, dtype=dtype):
            return t5.encode(captions)

    return encode


def frozen_dtype(settings: MMDiTTrainSettings, device: torch.device) -> torch.dtype:
    """Return the dtype of the frozen parts."""
    if settings.frozen_dtype is not DType.AUTO:
        return torch_dtype(settings.frozen_dtype)
    return torch.bfloat16 if is_accelerator(device) else torch.float32
