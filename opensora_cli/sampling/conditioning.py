"""Condition modes of clips to sample and to train with: their mask and reference latents."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

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
from opensora_cli.core.exceptions import RequestError


def prepare_inference_condition(
    z: torch.Tensor,
    mask_cond: str | ConditionMode,
    ref_list: Sequence[Sequence[torch.Tensor] | None] | None = None,
    causal: bool = True,
    *,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return conditioning_mask (B,1,T,H,W), 1 = given, and reference_latents (B,C,T,H,W), zero where nothing is given.

    The name and the order of the first four parameters are those that the Open-Sora community knows. Raises
    RequestError if a reference or frames are missing, and ValueError if references do not fit the batch.

    Args:
        z: latents_BCTHW; only the shape, device and dtype count.
        mask_cond: mode, by name or as a row. With one latent frame it is `t2v`.
        ref_list: for each sample the encoded references (C,T',H,W), one for each of `reference_parts(mode)`. The head
            takes the first frames of the first, the tail the last frames of the last; one reference serves both.
        causal: whether the autoencoder encodes the first frame on its own.
        lengths: latent frames given by the video modes.
    """
    num_latent_frames = z.shape[2]
    name = mask_cond if isinstance(mask_cond, str) else mask_cond.name
    mode = condition_mode(mask_cond) if isinstance(mask_cond, str) else mask_cond
    mask_B1THW = z.new_zeros((z.shape[0], 1, *z.shape[2:]))
    reference_BCTHW = torch.zeros_like(z)
    if num_latent_frames == 1 or not mode.needs_reference:
        return mask_B1THW, reference_BCTHW
    if ref_list is None:
        raise RequestError(f"condition.mode={name} needs a reference", hint="give one, or use t2v")
    count = lengths.latent_frames(mode, causal=causal)
    if count > num_latent_frames:
        raise RequestError(f"condition.mode={name} gives {count} latent frames, and the clip has {num_latent_frames}")
    if len(ref_list) != len(z):
        raise ValueError(f"references for {len(ref_list)} samples were given to a batch of {len(z)}")
    for index, references in enumerate(ref_list):
        if not references:
            # Falling back to t2v, as the reference implementation does, would ignore the request.
            raise RequestError(
                f"condition.mode={name} needs a reference for sample {index}", hint="give one, or use t2v"
            )
        if mode.at_head:
            mask_B1THW[index, :, :count] = 1
            reference_BCTHW[index, :, :count] = _checked(references[0], z, count, name)[:, :count]
        if mode.at_tail:
            mask_B1THW[index, :, -count:] = 1
            reference_BCTHW[index, :, -count:] = _checked(references[-1], z, count, name)[:, -count:]
    return mask_B1THW, reference_BCTHW


def _checked(reference_CTHW: torch.Tensor, z: torch.Tensor, count: int, name: str) -> torch.Tensor:
    channels, frames, height, width = reference_CTHW.shape
    if (channels, height, width) != (z.shape[1], *z.shape[3:]):
        # Assignment would silently broadcast a 1x1 picture over the frame.
        raise ValueError(f"a reference of shape {tuple(reference_CTHW.shape)} does not fit latents {tuple(z.shape)}")
    if frames < count:
        raise RequestError(
            f"condition.mode={name} needs {count} latent frames of its reference, which has {frames}",
            hint="give a longer one",
        )
    return reference_CTHW.to(z.device, z.dtype)


def restore_references(
    latents_BCTHW: torch.Tensor, conditioning_mask_B1THW: torch.Tensor, reference_latents_BCTHW: torch.Tensor
) -> torch.Tensor:
    """Return the latents with the given frames restored where the mask is 1: sampling only approaches them.

    The reference implementation restores only sample 0. The result has the dtype and device of `latents_BCTHW`.
    """
    return torch.where(
        conditioning_mask_B1THW.to(latents_BCTHW.device) > 0, reference_latents_BCTHW.to(latents_BCTHW), latents_BCTHW
    )


def fitting_modes(
    weights: Mapping[str, float], *, num_latent_frames: int, causal: bool, lengths: ReferenceLengths = RELEASED_LENGTHS
) -> dict[ConditionMode, float]:
    """Return the modes with a weight that leave frames of such a clip to learn; for a single frame only `t2v`."""
    modes = {condition_mode(name): weight for name, weight in weights.items() if weight > 0}
    fitting = {
        mode: weight
        for mode, weight in modes.items()
        if lengths.given_latent_frames(mode, causal=causal) < num_latent_frames
    }
    return fitting if fitting and num_latent_frames > 1 else {T2V: 1.0}


def pick_mode(fitting: Mapping[ConditionMode, float], rng: np.random.Generator) -> ConditionMode:
    """Sample a mode by weight, with one random number."""
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
    latents_CTHW: torch.Tensor,
    mode: ConditionMode,
    encode_part: Callable[[ReferencePart], torch.Tensor],
    *,
    causal: bool,
    temporal_compression: int,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> tuple[torch.Tensor, torch.Tensor]:
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
