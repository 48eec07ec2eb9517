"""Condition modes of training clips: sample a mode, and encode the frames that it gives.

Given pictures are encoded on their own, as in generation: inside a clip, an autoencoder whose norms span the clip, or
that sees later frames, gives the same frames other latents. A causal autoencoder encodes given videos on their own,
too. Otherwise they are cut out of the latents of the clip, as in the training of the released model.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from opensora_cli.core.conditions import (
    RELEASED_LENGTHS,
    T2V,
    ConditionMode,
    ReferenceLengths,
    ReferencePart,
    Source,
    condition_mode,
    reference_parts,
)
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.conditioning import prepare_inference_condition


def fitting_modes(
    weights: Mapping[str, float], *, num_latent_frames: int, causal: bool, lengths: ReferenceLengths
) -> dict[ConditionMode, float]:
    """Return the modes with a weight that leave frames of such a clip to learn; for a single frame only `t2v`.

    Raises RequestError for an unknown mode.
    """
    modes = {condition_mode(name): weight for name, weight in weights.items() if weight > 0}
    fitting = {
        mode: weight
        for mode, weight in modes.items()
        if lengths.given_latent_frames(mode, causal=causal) < num_latent_frames
    }
    return fitting if fitting and num_latent_frames > 1 else {T2V: 1.0}


def sample_mode(
    weights: Mapping[str, float],
    *,
    num_latent_frames: int,
    causal: bool,
    rng: np.random.Generator,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> ConditionMode:
    """Sample the condition mode of a clip by weight from `fitting_modes`, with one random number."""
    fitting = fitting_modes(weights, num_latent_frames=num_latent_frames, causal=causal, lengths=lengths)
    shares = np.cumsum(list(fitting.values()))
    index = int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))
    return list(fitting)[min(index, len(fitting) - 1)]


def encoded_parts(
    mode: ConditionMode, *, causal: bool, temporal_compression: int, lengths: ReferenceLengths = RELEASED_LENGTHS
) -> tuple[ReferencePart, ...]:
    """Return the frames of the clip that `mode` needs encoded on their own, the head before the tail."""
    if mode.source is Source.VIDEO and not causal:
        return ()
    return reference_parts(mode, causal=causal, temporal_compression=temporal_compression, lengths=lengths)


def condition_clip(
    latents_CTHW: Tensor,
    mode: ConditionMode,
    encode_part: Callable[[ReferencePart], Tensor],
    *,
    causal: bool,
    temporal_compression: int,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[Tensor, Tensor]:
    """Return the conditioning mask (1,T,H,W), 1 = given, and the reference latents (C,T,H,W) of an encoded clip.

    `encode_part` returns the latents_CTHW of some of its frames, encoded on their own. A `causal` autoencoder encodes
    the first frame alone. `lengths` has the latent frames that video modes give.
    """
    parts = encoded_parts(mode, causal=causal, temporal_compression=temporal_compression, lengths=lengths)
    references = [encode_part(part) for part in parts]
    if mode.needs_reference and not parts:
        references = [latents_CTHW]
    mask_B1THW, reference_BCTHW = prepare_inference_condition(
        latents_CTHW[None], mode, [references], causal, lengths=lengths
    )
    return mask_B1THW[0], reference_BCTHW[0]


def cut_part(clip_TX: Tensor, part: ReferencePart) -> Tensor:
    """Return the frames of `part`, along the first axis."""
    return clip_TX[-part.num_frames :] if part.from_end else clip_TX[: part.num_frames]


def hold_pictures(clip_TX: Tensor, mode: ConditionMode, *, extra: int) -> Tensor:
    """Return a clip of the same length in which the pictures that `mode` gives stand still for `extra` more frames.

    Frames are dropped at the other end, or at the tail if both ends are given.
    """
    room = extra * (mode.at_head + mode.at_tail)
    kept_TX = clip_TX[: len(clip_TX) - room] if mode.at_head else clip_TX[room:]
    head, tail = [kept_TX[:1]] * (extra * mode.at_head), [kept_TX[-1:]] * (extra * mode.at_tail)
    return torch.cat([*head, kept_TX, *tail])


@torch.no_grad()
def encode_with_conditions(
    pixels_BCTHW: Tensor,
    mode_weights: Mapping[str, float],
    autoencoder: Autoencoder,
    *,
    rng: np.random.Generator,
    pad_pictures: bool = False,
) -> tuple[Tensor, Tensor]:
    """Encode clips, and the given frames of a mode that is sampled for each.

    Returns the latents (B,C,T,H,W), and the mask and reference latents (B,1+C,T,H,W) for `packing.pack_latents`.

    Args:
        pixels_BCTHW: frames in [-1, 1].
        mode_weights: weight of each condition mode by name. Modes that would give a whole clip are not used.
        pad_pictures: without a causal autoencoder, hold a given picture until it fills a latent frame. Other frames of
            the clip are dropped for it.

    Raises:
        RequestError: a mode is unknown, or the autoencoder cannot encode the clips.
    """
    causal, ratio = autoencoder.grid.is_causal, autoencoder.grid.time_compression_ratio
    num_latent_frames = autoencoder.grid.latent_frames(pixels_BCTHW.shape[2])
    latents, conditions = [], []
    for pixels_CTHW in pixels_BCTHW:
        mode = sample_mode(mode_weights, num_latent_frames=num_latent_frames, causal=causal, rng=rng)
        clip_TCHW = pixels_CTHW.transpose(0, 1)
        if pad_pictures and mode.gives_pictures and not causal:
            clip_TCHW = hold_pictures(clip_TCHW, mode, extra=ratio - 1)

        def encode_part(part: ReferencePart, clip_TCHW: Tensor = clip_TCHW) -> Tensor:
            return autoencoder.encode(cut_part(clip_TCHW, part).transpose(0, 1)[None])[0]

        latents_CTHW = autoencoder.encode(clip_TCHW.transpose(0, 1)[None])[0]
        condition = condition_clip(latents_CTHW, mode, encode_part, causal=causal, temporal_compression=ratio)
        latents.append(latents_CTHW)
        conditions.append(torch.cat(condition))
    return torch.stack(latents), torch.stack(conditions)
