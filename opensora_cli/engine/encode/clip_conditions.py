"""Condition modes of training clips: sample a mode, and encode the frames that it gives.

Given pictures are encoded on their own, as in generation: inside a clip, an autoencoder whose norms span the clip, or
that sees later frames, gives the same frames other latents. A causal autoencoder encodes given videos on their own,
too. Otherwise they are cut out of the latents of the clip, as in the training of the released model.
"""

from collections.abc import Callable, Mapping

import numpy as np
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
