"""Videos for many prompts at once, computed as `osora generate` computes them one by one.

`sample_batch` is the batched form of `sample_latents` of `opensora_cli.engine.generate.denoise`, made of the same
functions; a batch of one gives the same latents, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opensora_cli.core.conditions import T2V, condition_mode
from opensora_cli.engine.components.autoencoders import vae_tiling
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import load
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.references import Reference, encode_references
from opensora_cli.engine.generate.text import encode_prompts
from opensora_cli.media.resize import fit_frames, to_uint8
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import denoise
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents

Clips = NDArray[np.uint8]
"""(N, T, H, W, 3), RGB."""


class Models(NamedTuple):
    """The parts of the model."""

    t5: T5Encoder
    clip: ClipEncoder
    transformer: MMDiT
    vae: Autoencoder


def load_models(plan: ExecutionPlan) -> Models:
    """Return all parts, of the weights and sizes of a plan."""
    return Models(load.load_t5(plan), load.load_clip(plan), load.load_transformer(plan), load.load_vae(plan))


class BatchVelocity:
    """Evaluates the transformer for a batch of samples, branch after branch.

    Args:
        transformer: on its device.
        embeds: the two prompts of each sample.
        conditioning_BNK: packed mask and reference latents.
        position_ids_BN3: frame, row and column of every token.
    """

    def __init__(
        self,
        transformer: MMDiT,
        embeds: Sequence[PromptEmbeds],
        *,
        conditioning_BNK: Tensor,
        position_ids_BN3: Tensor,
    ) -> None:
        self._transformer = transformer
        self._prompt_embeds_B2LC = torch.stack([each.prompt_embeds_2LC for each in embeds])
        self._pooled_B2V = torch.stack([each.pooled_prompt_embeds_2V for each in embeds])
        self._conditioning_BNK = conditioning_BNK
        self._position_ids_BN3 = position_ids_BN3

    def __call__(self, packed_latents_BND: Tensor, t: float, branches: tuple[Branch, ...], /) -> dict[Branch, Tensor]:
        """Return velocity_BND of every one of `branches` at time `t`."""
        return {branch: self._evaluate(packed_latents_BND, t, branch) for branch in branches}

    def _evaluate(self, packed_latents_BND: Tensor, t: float, branch: Branch) -> Tensor:
        row = 0 if branch.uses_prompt else 1
        given_BNK = self._conditioning_BNK
        velocity_BND: Tensor = self._transformer(
            packed_latents_BND,
            position_ids_BN3=self._position_ids_BN3,
            timesteps_B=torch.full((len(packed_latents_BND),), t, device=packed_latents_BND.device),
            prompt_embeds_BLC=self._prompt_embeds_B2LC[:, row],
            pooled_prompt_embeds_BV=self._pooled_B2V[:, row],
            conditioning_BNK=given_BNK if branch.uses_conditioning else torch.zeros_like(given_BNK),
        )
        return velocity_BND


def sample_batch(
    plan: ExecutionPlan,
    transformer: MMDiT,
    embeds: Sequence[PromptEmbeds],
    reference_latents: Sequence[Sequence[Tensor]] | None,
    *,
    seeds: Sequence[int],
) -> Tensor:
    """Return latents_BCTHW, given frames put back.

    Args:
        plan: sizes, timesteps, guidance and mode, the same for all samples.
        transformer: not guidance-distilled, with a condition embedding, as the demo's is.
        embeds: the two prompts of each sample.
        reference_latents: of each sample the latents_CTHW of each of its references; None without any.
        seeds: of each sample's noise.
    """
    device, settings = plan.hardware.device, plan.settings
    channels, num_latent_frames, rows, columns = plan.latent_shape
    patch_size = settings.model.patch_size
    noise_BCTHW = noise_latents(
        seeds,
        num_latent_frames=num_latent_frames,
        height=plan.height,
        width=plan.width,
        device=device,
        dtype=plan.hardware.dtype,
        latent_channels=channels,
        spatial_compression=settings.vae.spatial_compression_ratio,
        patch_size=patch_size,
    )
    mask_B1THW, given_BCTHW = prepare_inference_condition(
        noise_BCTHW, plan.mode, reference_latents, lengths=plan.lengths
    )
    ids = position_ids(len(seeds), num_latent_frames, rows // patch_size, columns // patch_size, device=device)
    packed_BND = denoise(
        BatchVelocity(
            transformer,
            embeds,
            conditioning_BNK=pack_conditioning(mask_B1THW, given_BCTHW, patch_size),
            position_ids_BN3=ids,
        ),
        pack_latents(noise_BCTHW, patch_size),
        timesteps=plan.timesteps,
        guidance=plan.guidance,
        mode=plan.mode,
        num_latent_frames=num_latent_frames,
    )
    latents_BCTHW = unpack_latents(
        packed_BND, num_latent_frames=num_latent_frames, height=rows, width=columns, patch_size=patch_size
    )
    return restore_references(latents_BCTHW, mask_B1THW, given_BCTHW) if plan.mode.gives_pictures else latents_BCTHW


def decode_batch(plan: ExecutionPlan, vae: Autoencoder, latents_BCTHW: Tensor) -> Clips:
    """Return the clips, cut to what was asked for."""
    pixels_BCTHW = vae.decode(latents_BCTHW, tiling=vae_tiling(plan.settings.vae))
    cut_BCTHW = pixels_BCTHW[:, :, : plan.settings.video.num_frames, : plan.height, : plan.width]
    clips: Clips = torch.stack([to_uint8(clip) for clip in cut_BCTHW]).numpy()
    return clips


@torch.inference_mode()
def reconstruct(plan: ExecutionPlan, vae: Autoencoder, clips_NTHWC: Clips, *, batch: int) -> Clips:
    """Return clips as the autoencoder gives them back: the mode of the posterior, decoded."""
    tiling = vae_tiling(plan.settings.vae)
    decoded = []
    for start in range(0, len(clips_NTHWC), batch):
        given = [as_pixels(plan, clip) for clip in clips_NTHWC[start : start + batch]]
        pixels_BCTHW = torch.stack(given).to(plan.hardware.device, plan.hardware.dtype)
        decoded.append(decode_batch(plan, vae, vae.encode(pixels_BCTHW, tiling=tiling)))
    return np.concatenate(decoded)


@torch.inference_mode()
def generate_clips(
    plan: ExecutionPlan,
    models: Models,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    pictures_NHWC: NDArray[np.uint8] | None = None,
    batch: int = 8,
    on_done: Callable[[int], None] = lambda _: None,
) -> Clips:
    """Return one video for each prompt.

    Args:
        plan: of a generation without references, whatever its prompt and seed.
        models: loaded for that plan.
        prompts: one for each video.
        seeds: of the noise, one for each video.
        pictures_NHWC: first frames to go on from (`i2v_head`), one for each video, in any size.
        batch: videos that are made together.
        on_done: called with how many videos are finished.
    """
    plan = dataclasses.replace(plan, mode=T2V if pictures_NHWC is None else condition_mode("i2v_head"))
    clips = []
    for start in range(0, len(prompts), batch):
        chosen = slice(start, start + batch)
        embeds = [
            encode_prompts(plan.settings.replace({"prompt": prompt}), models.t5, models.clip)
            for prompt in prompts[chosen]
        ]
        reference_latents = None
        if pictures_NHWC is not None:
            given = [Reference(as_pixels(plan, picture[None]), at_head=True) for picture in pictures_NHWC[chosen]]
            tiling = vae_tiling(plan.settings.vae)
            reference_latents = [encode_references([reference], models.vae, tiling=tiling) for reference in given]
        latents = sample_batch(plan, models.transformer, embeds, reference_latents, seeds=seeds[chosen])
        clips.append(decode_batch(plan, models.vae, latents))
        on_done(min(start + batch, len(prompts)))
    return np.concatenate(clips)


def as_pixels(plan: ExecutionPlan, frames_THWC: NDArray[np.uint8]) -> Tensor:
    """Return frames as `osora generate` reads a reference: pixels_CTHW in [-1, 1], fitted to the video."""
    return fit_frames(torch.from_numpy(frames_THWC.copy()), height=plan.height, width=plan.width, fit="crop")
