"""Training clips as the transformer sees them: encoded by the frozen autoencoder and the frozen text encoders.

Everything is encoded clip by clip, and so comes out the same, bit for bit, whatever else is in a batch, and whether it
was encoded just now or for a cache.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from opensora_cli.core.conditions import ReferencePart
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.transfers import queued_copy
from opensora_cli.engine.encode.clip_conditions import cut_part
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.tiles import NO_TILING, Tiling
from opensora_cli.settings.train_objectives import MMDiTTrainSettings

TextEncoder = Callable[[list[str]], Tensor]
"""Captions to their embeddings: (B,L,C) of T5, (B,V) of CLIP."""

LATENTS = "latents"
PROMPT_EMBEDS = "prompt_embeds"
POOLED_PROMPT_EMBEDS = "pooled_prompt_embeds"
ALWAYS_CACHED = (LATENTS, PROMPT_EMBEDS, POOLED_PROMPT_EMBEDS)
"""What a cache has of every clip; references come on top."""


class EncodedClip(Protocol):
    """One clip, encoded."""

    def latents(self) -> Tensor:
        """Return the whole clip (C,T,H,W)."""

    def part(self, part: ReferencePart) -> Tensor:
        """Return some of its frames (C,T,H,W), encoded on their own."""

    def prompt_embeds(self) -> Tensor:
        """Return what T5 makes of its caption, (L,C)."""

    def pooled_prompt_embeds(self) -> Tensor:
        """Return what CLIP makes of its caption, (V)."""


@dataclass(frozen=True, slots=True)
class EmptyPrompt:
    """What takes the place of a caption that is dropped."""

    prompt_embeds_LC: Tensor
    pooled_prompt_embeds_V: Tensor


class Encoders:
    """The frozen autoencoder (the mode of its posterior is taken) and text encoders.

    `dtype` is what the autoencoder computes in, and `tiling` how it cuts large clips.
    """

    def __init__(
        self,
        vae: Autoencoder,
        *,
        t5: TextEncoder,
        clip: TextEncoder,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tiling: Tiling = NO_TILING,
    ) -> None:
        self._vae = vae
        self._t5 = t5
        self._clip = clip
        self._device = torch.device(device)
        self._dtype = dtype
        self._tiling = tiling
        self._empty: EmptyPrompt | None = None

    @property
    def autoencoder(self) -> Autoencoder:
        """The one that encodes; its decoder is not used here."""
        return self._vae

    @property
    def grid(self) -> LatentGrid:
        """How the autoencoder maps frames and pixels to latents."""
        return self._vae.grid

    @torch.no_grad()
    def latents(self, pixels_THWC: Tensor) -> Tensor:
        """Return the latents (C,T,H,W) of frames in uint8; a RequestError for a shape that cannot be encoded."""
        pixels_CTHW = queued_copy(pixels_THWC, self._device).permute(3, 0, 1, 2)
        pixels_BCTHW = (pixels_CTHW[None].float() / 127.5 - 1.0).to(self._dtype)
        with torch.autocast(self._device.type, enabled=False):
            return self._vae.encode(pixels_BCTHW, tiling=self._tiling)[0]

    @torch.no_grad()
    def prompt_embeds(self, caption: str) -> Tensor:
        """Return what T5 makes of a caption, (L,C)."""
        with torch.autocast(self._device.type, enabled=False):
            return self._t5([caption])[0]

    @torch.no_grad()
    def pooled_prompt_embeds(self, caption: str) -> Tensor:
        """Return what CLIP makes of a caption, (V)."""
        with torch.autocast(self._device.type, enabled=False):
            return self._clip([caption])[0]

    def empty_prompt(self) -> EmptyPrompt:
        """Return what they make of the empty prompt, which is encoded once."""
        if self._empty is None:
            self._empty = EmptyPrompt(self.prompt_embeds(""), self.pooled_prompt_embeds(""))
        return self._empty


@dataclass(frozen=True, slots=True)
class FreshClip:
    """An `EncodedClip` whose parts are encoded on access."""

    encoders: Encoders
    pixels_THWC: Tensor
    """uint8."""
    caption: str
    """As the text encoders read it, with its suffixes."""

    def latents(self) -> Tensor:
        return self.encoders.latents(self.pixels_THWC)

    def part(self, part: ReferencePart) -> Tensor:
        return self.encoders.latents(cut_part(self.pixels_THWC, part))

    def prompt_embeds(self) -> Tensor:
        return self.encoders.prompt_embeds(self.caption)

    def pooled_prompt_embeds(self) -> Tensor:
        return self.encoders.pooled_prompt_embeds(self.caption)


def fresh_clip(
    encoders: Encoders,
    pixels_THWC: Tensor,
    *,
    caption: str,
    fps: float,
    motion_score: float | None,
    settings: MMDiTTrainSettings,
) -> FreshClip:
    """Return a clip whose parts are encoded on access, its caption with the suffixes of training."""
    described = training_caption(
        caption,
        fps=fps,
        motion_score=motion_score,
        add_fps=settings.add_fps,
        add_motion_score=settings.add_motion_score,
    )
    return FreshClip(encoders, pixels_THWC, described)


def training_caption(
    caption: str, *, fps: float, motion_score: float | None, add_fps: bool = True, add_motion_score: bool = True
) -> str:
    """Return the caption followed by " {fps} FPS, {motion score} motion score.", or by what is known of the two.

    Unlike a prompt (see `sampling.text`) it is joined by a comma, and the caption's own end is left as it is: so the
    released model was trained. `fps` is 0 for a picture, which gets none; the score, 1 (still) to 7 (very lively), is
    rounded to a whole number, halves upwards.
    """
    suffixes = []
    if add_fps and fps > 0:
        suffixes.append(f"{fps:g} FPS")
    if add_motion_score and motion_score is not None:
        suffixes.append(f"{math.floor(motion_score + 0.5)} motion score")
    return f"{caption} {', '.join(suffixes)}." if suffixes else caption


@dataclass(frozen=True, slots=True)
class CachedClip:
    """An `EncodedClip` that was encoded before; a FileProblem for parts that the cache does not have."""

    tensors: Mapping[str, Tensor]

    def latents(self) -> Tensor:
        return self._named(LATENTS)

    def part(self, part: ReferencePart) -> Tensor:
        return self._named(part_name(part))

    def prompt_embeds(self) -> Tensor:
        return self._named(PROMPT_EMBEDS)

    def pooled_prompt_embeds(self) -> Tensor:
        return self._named(POOLED_PROMPT_EMBEDS)

    def _named(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise FileProblem(f"the cache lacks {name} of a clip", hint="run `osora data cache` again")
        return self.tensors[name]


def part_name(part: ReferencePart) -> str:
    """Return the name of a run of a clip's frames: `head33`, `tail1`."""
    return f"{'tail' if part.from_end else 'head'}{part.num_frames}"


def encode_for_cache(
    clip: EncodedClip, parts: Mapping[str, ReferencePart], *, known: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return all that a cache keeps of a clip, on the host: what `CachedClip` holds.

    `parts` are the runs of frames that some condition mode needs, by `part_name`; what is `known` is left out.
    """
    makers: dict[str, Callable[[], Tensor]] = {
        LATENTS: clip.latents,
        PROMPT_EMBEDS: clip.prompt_embeds,
        POOLED_PROMPT_EMBEDS: clip.pooled_prompt_embeds,
        **{name: partial(clip.part, part) for name, part in parts.items()},
    }
    return {name: make().cpu().contiguous() for name, make in makers.items() if name not in known}
