"""What the guidance of a plan costs: branches and evaluations of the model."""

from opensora_cli.core.conditions import ConditionMode
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.sampling.guidance import Guidance, branches_needed, count_evaluations, guidance_scales_at
from opensora_cli.settings.generate import GenerateSettings


def guidance_of(settings: GenerateSettings) -> Guidance:
    """Return the guidance that `settings` ask for."""
    sampling = settings.sampling
    return Guidance(
        guidance_scale=sampling.guidance_scale,
        image_guidance_scale=sampling.image_guidance_scale,
        text_oscillation=sampling.text_oscillation,
        image_oscillation=sampling.image_oscillation,
        temporal_image_scaling=sampling.temporal_image_scaling,
    )


def require_branches(settings: GenerateSettings, guidance: Guidance, mode: ConditionMode, mesh: MeshShape) -> None:
    """Refuse ranks that would never have a branch of guidance to compute.

    Raises:
        RequestError: there are such.
    """
    branches = 1
    if not settings.model.guidance_embed:
        steps = settings.sampling.num_inference_steps
        scales = (
            guidance_scales_at(
                step, guidance, mode=mode, num_inference_steps=steps, num_latent_frames=settings.num_latent_frames
            )
            for step in range(steps)
        )
        branches = max(len(branches_needed(each)) for each in scales)
    if mesh.guidance > branches:
        raise RequestError(
            f"parallel.cfg_parallel_degree={mesh.guidance} is over the branches of guidance that a step has here, "
            f"{branches}: use at most {branches}"
        )


def evaluations_of(settings: GenerateSettings, guidance: Guidance, mode: ConditionMode) -> int:
    """Return how often the model is evaluated for one video."""
    if settings.from_latents is not None:
        return 0
    if settings.model.guidance_embed:
        return settings.sampling.num_inference_steps
    return count_evaluations(
        guidance,
        mode=mode,
        num_inference_steps=settings.sampling.num_inference_steps,
        num_latent_frames=settings.num_latent_frames,
    )
