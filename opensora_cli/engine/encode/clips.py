"""Training clips for the transformer: frozen encoders, tensors encoded on access or cached, and their conditions.

Clips are encoded one by one. So the result for a clip is bitwise identical in any batch, and also the same in training
and for a cache.

Given pictures are encoded on their own, as in generation: inside a clip, an autoencoder whose norms span the clip, or
that sees later frames, gives the same frames other latents. A causal autoencoder encodes given videos on their own,
too. Otherwise they are cut out of the latents of the clip, as in the training of the released model.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.conditions import (
    ReferencePart,
)
from opensora_cli.core.device import is_accelerator, queued_copy, torch_dtype
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.data.batches import ClipRequest
from opensora_cli.engine.components.architectures import (
    cast_later,
    load_autoencoder,
    load_clip,
    load_t5,
    stored_t5_dtype,
    streamed_layers,
    vae_tiling,
)
from opensora_cli.engine.encode.inputs import require_frozen_parts
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.config import NO_TILING, Tiling
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


LATENTS = "latents"
PROMPT_EMBEDS = "prompt_embeds"
POOLED_PROMPT_EMBEDS = "pooled_prompt_embeds"
ALWAYS_CACHED = (LATENTS, PROMPT_EMBEDS, POOLED_PROMPT_EMBEDS)
"""Tensors of every cached clip. Parts, which are references of condition modes, are extra."""
_HEAD, _TAIL = "head", "tail"


@dataclass(frozen=True, slots=True)
class FreshClip:
    """Clip whose tensors are encoded on access, with the names of a cached clip."""

    encoders: Encoders
    pixels_THWC: Tensor
    """Pixels in uint8."""
    request: ClipRequest
    settings: MMDiTTrainSettings

    def __getitem__(self, name: str) -> Tensor:
        """Return latents (C,T,H,W) of the whole clip or of a part, T5 embeddings (L,C) or the CLIP embedding (V)."""
        if name == LATENTS:
            return self.encoders.latents(self.pixels_THWC)
        if name not in ALWAYS_CACHED:
            frames, pixels = part_frames(name), self.pixels_THWC
            return self.encoders.latents(pixels[-frames:] if name.startswith(_TAIL) else pixels[:frames])
        asked = self.request
        caption = training_caption(
            asked.caption, fps=asked.fps, motion_score=asked.motion_score, settings=self.settings
        )
        if name == PROMPT_EMBEDS:
            return self.encoders.prompt_embeds(caption)
        return self.encoders.pooled_prompt_embeds(caption)


class CachedClip(dict[str, Tensor]):
    """Tensors of a clip from a cache, by name."""

    def __missing__(self, name: str) -> Tensor:
        """Raise FileProblem."""
        raise FileProblem(f"the cache lacks {name} of a clip", hint="run `osora data cache` again")


EncodedClip = FreshClip | CachedClip


def part_name(part: ReferencePart) -> str:
    """Return the name of some frames of a clip, such as `head33` or `tail1`."""
    return f"{_TAIL if part.from_end else _HEAD}{part.num_frames}"


def part_frames(name: str) -> int:
    """Return the number of frames from a result of `part_name`."""
    return int(name.removeprefix(_HEAD).removeprefix(_TAIL))


def encode_for_cache(clip: FreshClip, parts: Iterable[str], *, known: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the tensors of a clip for a cache, on the host, without the `known` ones."""
    return {name: clip[name].cpu().contiguous() for name in (*ALWAYS_CACHED, *parts) if name not in known}


def training_caption(caption: str, *, fps: float, motion_score: float | None, settings: MMDiTTrainSettings) -> str:
    """Return the caption followed by " {fps} FPS, {motion score} motion score.", each part only if it is known.

    The released model was trained with this form. It differs from a prompt (see `sampling.text`): parts are joined by a
    comma, and the end of the caption stays. `fps` is 0 for a picture. The score, from 1 (still) to 7 (very lively), is
    rounded to an integer, halves upwards. `settings` can drop either part.
    """
    suffixes = []
    if settings.add_fps and fps > 0:
        suffixes.append(f"{fps:g} FPS")
    if settings.add_motion_score and motion_score is not None:
        suffixes.append(f"{math.floor(motion_score + 0.5)} motion score")
    return f"{caption} {', '.join(suffixes)}." if suffixes else caption


def cut_part(clip_TX: Tensor, part: ReferencePart) -> Tensor:
    """Return the frames of `part`, along the first axis."""
    return clip_TX[-part.num_frames :] if part.from_end else clip_TX[: part.num_frames]
