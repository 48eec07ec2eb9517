"""From embeddings, references and noise to the latents of every sample."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.loaded import LoadedModels, retried
from opensora_cli.engine.generate.outputs import open_latents, sample_settings, save_latents
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.ranks import Ranks, agreed_tensors
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import denoise, denoise_distilled
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """The latents of one sample, and what sampling them took."""

    latents_CTHW: torch.Tensor
    """On the CPU."""
    denoise_s: float
    """Seconds; 0 where they come from a file."""


def saved_samples(plan: ExecutionPlan, files: Sequence[SampleFiles], ranks: Ranks | None) -> dict[int, DenoisedSample]:
    """Return the samples whose latents are there to go on from, by their index; rank 0 reads them."""
    samples = {}
    for sample in files:
        if sample.saved is None:
            continue
        if ranks is None:
            latents_CTHW = open_latents(sample.saved).read()
        else:
            read = [open_latents(sample.saved).read()] if ranks.is_main else None
            [latents_CTHW] = agreed_tensors(read, device=ranks.device)
        if tuple(latents_CTHW.shape) != plan.latent_shape:
            raise RequestError(
                f"{sample.saved} holds latents of {tuple(latents_CTHW.shape)}, and the settings ask for "
                f"{plan.latent_shape}",
                hint="change neither size, length nor model when going on from latents",
            )
        samples[sample.index] = DenoisedSample(latents_CTHW, denoise_s=0.0)
    return samples


def denoise_samples(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    embeds: PromptEmbeds,
    reference_latents: Sequence[torch.Tensor] | None,
    models: LoadedModels,
    record: RunRecord,
    *,
    ranks: Ranks | None = None,
) -> list[DenoisedSample]:
    """Return the latents of every sample, each saved as soon as it is finished, if that is wanted.

    `ranks` share the work; references and files are rank 0's. None: there is only this one.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents cannot be written.
        HardwareError: out of memory.
    """
    if ranks is not None and plan.mode.needs_reference:
        reference_latents = agreed_tensors(reference_latents, device=ranks.device)
    samples: list[DenoisedSample] = []

    def denoise_the_rest(plan: ExecutionPlan) -> None:
        missing = files[len(samples) :]
        with (
            models.transformer(plan, record) as transformer,
            record.blocks_timed(transformer),
            record.stage(DENOISE, total=plan.evaluations_per_sample * len(missing), unit="evaluations") as progress,
        ):
            evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
            for sample in missing:
                start = time.perf_counter()
                latents_1CTHW = sample_latents(
                    plan,
                    evaluate,
                    embeds,
                    reference_latents,
                    seed=sample.seed,
                    ranks=ranks,
                    on_evaluation=progress.advance,
                )
                latents_CTHW = latents_1CTHW[0].cpu()
                samples.append(DenoisedSample(latents_CTHW, time.perf_counter() - start))
                if sample.latents is not None and (ranks is None or ranks.is_main):
                    settings = sample_settings(plan, sample)
                    with record.keeping(sample.latents):
                        save_latents(sample.latents, latents_CTHW, settings, request_sha256=sample.request_sha256)

    retried(denoise_the_rest, plan, DENOISE, models, record)
    return samples


def sample_latents(
    plan: ExecutionPlan,
    transformer: Callable[..., torch.Tensor],
    embeds: PromptEmbeds,
    reference_latents: Sequence[torch.Tensor] | None,
    *,
    seed: int,
    ranks: Ranks | None = None,
    on_evaluation: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return latents_1CTHW of one sample, given frames put back.

    `transformer` is on the plan's device and called like `MMDiT`. `reference_latents` has the latents_CTHW of each
    reference. All `ranks` that share the sample get the latents; None: there is only this one. `on_evaluation` is
    called after each evaluation of the transformer.
    """
    device, settings = plan.hardware.device, plan.settings
    channels, num_latent_frames, rows, columns = plan.latent_shape
    patch_size = settings.model.patch_size
    noise_1CTHW = noise_latents(
        [seed],
        num_latent_frames=num_latent_frames,
        height=plan.height,
        width=plan.width,
        device=device,
        dtype=plan.hardware.dtype,
        latent_channels=channels,
        spatial_compression=settings.vae.grid.spatial_compression_ratio,
        patch_size=patch_size,
    )
    if ranks is not None:
        # The same numbers for the same seed are promised of one kind of device only.
        [noise_1CTHW] = agreed_tensors([noise_1CTHW], device=device)
    mask_11THW, given_1CTHW = prepare_inference_condition(
        noise_1CTHW,
        plan.mode,
        None if reference_latents is None else [reference_latents],
        settings.vae.grid.is_causal,
        lengths=plan.lengths,
    )
    distilled = settings.model.guidance_embed
    velocity = GuidedVelocity(
        transformer,
        embeds,
        conditioning_1NK=pack_conditioning(mask_11THW, given_1CTHW, patch_size) if settings.model.cond_embed else None,
        position_ids_1N3=position_ids(1, num_latent_frames, rows // patch_size, columns // patch_size, device=device),
        embedded_guidance=settings.sampling.embedded_guidance if distilled else None,
        on_evaluation=on_evaluation,
    )
    packed_1ND = pack_latents(noise_1CTHW, patch_size)
    if distilled:
        packed_1ND = denoise_distilled(velocity.distilled, packed_1ND, timesteps=plan.timesteps)
    else:
        packed_1ND = denoise(
            velocity if ranks is None else ranks.share_branches(velocity, on_evaluation=on_evaluation),
            packed_1ND,
            timesteps=plan.timesteps,
            guidance=plan.guidance,
            mode=plan.mode,
            num_latent_frames=num_latent_frames,
        )
    latents_1CTHW = unpack_latents(
        packed_1ND, num_latent_frames=num_latent_frames, height=rows, width=columns, patch_size=patch_size
    )
    if plan.mode.gives_pictures:
        latents_1CTHW = restore_references(latents_1CTHW, mask_11THW, given_1CTHW)
    return latents_1CTHW
