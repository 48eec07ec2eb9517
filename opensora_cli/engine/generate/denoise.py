"""From prompts and references to finished latents: text, encode, denoise."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from opensora_cli.engine.components.configs import vae_tiling
from opensora_cli.engine.components.hardware import release_memory
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import DENOISE, ENCODE, TEXT
from opensora_cli.engine.generate import load
from opensora_cli.engine.generate.latents import save_latents
from opensora_cli.engine.generate.loaded import KeptVAE, loaded_transformer
from opensora_cli.engine.generate.outputs import SampleFiles
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.ranks import Ranks, agreed_tensors
from opensora_cli.engine.generate.record import RunRecord, retried
from opensora_cli.engine.generate.references import Reference, encode_references
from opensora_cli.engine.generate.sidecar import sample_settings
from opensora_cli.engine.generate.text import encode_prompts, read_vocabulary, warn_about_prompts
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import denoise, denoise_distilled
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents
from opensora_cli.settings.enums import OffloadMode


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """The latents of one sample, and what drawing them took."""

    latents_CTHW: torch.Tensor
    """On the CPU."""
    denoise_s: float
    """Seconds; 0 where they come from a file."""


def draw_samples(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    references: Sequence[Reference],
    vae: KeptVAE,
    record: RunRecord,
    *,
    ranks: Ranks | None = None,
) -> list[DrawnSample]:
    """Return the latents of every sample, each saved as soon as it is finished, if that is wanted.

    Args:
        plan: what to make; its weights are there.
        files: of every sample.
        references: what is given.
        vae: encodes it.
        record: told of stages and saved latents.
        ranks: that draw them together; references and files are rank 0's. None: there is only this one.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents cannot be written.
        HardwareError: out of memory.
    """
    embeds, _ = retried(lambda plan: _prompt_embeds(plan, record, ranks), plan, TEXT, record)
    reference_latents = _reference_latents(plan, references, vae, record)
    if ranks is not None and plan.mode.needs_reference:
        reference_latents = agreed_tensors(reference_latents, device=ranks.device)
    drawn: list[DrawnSample] = []

    def draw_the_rest(plan: ExecutionPlan) -> None:
        if plan.offload.mode is not OffloadMode.NONE:
            vae.put_away()
        missing = files[len(drawn) :]
        with (
            loaded_transformer(
                plan,
                record,
                group=None if ranks is None else ranks.tensor_group,
                neighbours=None if ranks is None else ranks.neighbours,
            ) as transformer,
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
                drawn.append(DrawnSample(latents_CTHW, time.perf_counter() - start))
                if sample.latents is not None and (ranks is None or ranks.is_main):
                    # Remembered first: an interruption may come before the call that makes the file returns.
                    record.kept_latents.append(sample.latents)
                    save_latents(sample.latents, latents_CTHW, sample_settings(plan, sample))

    retried(draw_the_rest, plan, DENOISE, record)
    release_memory(plan.hardware.device)
    return drawn


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

    Args:
        plan: sizes, timesteps and guidance.
        transformer: on the plan's device; called like `MMDiT`.
        embeds: the two prompts.
        reference_latents: latents_CTHW of each reference; None without any.
        seed: of the noise.
        ranks: that share it; all get the latents. None: there is only this one.
        on_evaluation: called after each evaluation of the transformer.
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
        spatial_compression=settings.vae.spatial_compression_ratio,
        patch_size=patch_size,
    )
    if ranks is not None:
        # The same numbers for the same seed are promised of one kind of device only.
        [noise_1CTHW] = agreed_tensors([noise_1CTHW], device=device)
    mask_11THW, given_1CTHW = prepare_inference_condition(
        noise_1CTHW, plan.mode, None if reference_latents is None else [reference_latents], lengths=plan.lengths
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


def _prompt_embeds(plan: ExecutionPlan, record: RunRecord, ranks: Ranks | None) -> PromptEmbeds:
    with ExitStack() as stack:
        with record.stage("load", total=2, unit="encoders") as progress:
            t5 = load.load_t5(plan, group=None if ranks is None else dist.group.WORLD)
            progress.advance()
            clip = load.load_clip(plan)
            progress.advance()
            if plan.offload.stream_text:
                stack.enter_context(load.streamed_layers(plan, t5))
        with record.stage(TEXT):
            vocabulary = read_vocabulary(plan.weights.path(Component.T5).parent)
            warn_about_prompts(plan.settings, t5, clip, record.reporter, vocabulary=vocabulary)
            embeds = encode_prompts(plan.settings, t5, clip)
    del t5, clip
    release_memory(plan.hardware.device)
    return embeds


def _reference_latents(
    plan: ExecutionPlan, references: Sequence[Reference], vae: KeptVAE, record: RunRecord
) -> list[torch.Tensor] | None:
    if not references:
        return None
    autoencoder, tiling = vae.on_device(), vae_tiling(plan.settings.vae)
    with record.stage(ENCODE, total=len(references), unit="references") as progress:
        latents = encode_references(references, autoencoder, tiling=tiling, on_encoded=progress.advance)
    release_memory(plan.hardware.device)
    return latents
