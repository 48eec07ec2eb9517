"""Parts of `speed.py` about denoising: the demo's whole loop, and an evaluation of blocks of the released size."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from plain_mmdit import plain_denoise, plain_forward
from speed_pairs import Row, compared
from torch import Tensor

from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.estimate.offload import CHUNK_TOKENS
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.models import load_transformer
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.sampling.conditioning import prepare_inference_condition
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

LOOP_GOALS = {"t2v": 2.2, "i2v_head": 1.5}
BLOCK_GOAL = 1.1
_TEXT_TOKENS = 512
_CPU = torch.device("cpu")


def measure_loop(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for the demo's denoising in 50 steps with the scales of the released presets. The plain way takes 150
    evaluations.
    """
    for mode, goal in LOOP_GOALS.items():
        plan = make_plan(_demo(mode, options.steps))
        plain, ours = _loops(plan, load_transformer(plan))
        with torch.inference_mode():
            error = _error(ours(), plain())
            yield compared(
                f"demo {mode}, {plan.model_evaluations} for {3 * options.steps}",
                plain,
                ours,
                pairs=options.pairs,
                goal=goal,
                note=f"relative error {error:.1e}",
                figures={"error": error, "evaluations": plan.model_evaluations, "plain_evaluations": 3 * options.steps},
            )


def _demo(mode: str, steps: int) -> GenerateSettings:
    return load_preset("demo", prompt="a red ball").replace(
        {
            "sampling.num_inference_steps": steps,
            "sampling.guidance_scale": 7.5,
            "sampling.image_guidance_scale": 3.0,
            "condition.mode": mode,
            "condition.references": () if mode == "t2v" else ("first.png",),
            "runtime.device": "cpu",
        }
    )


def _loops(plan: Plan, transformer: MMDiT) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the plain loop and ours, both from the same noise, embeddings and references to latents_1CTHW."""
    generator, settings = torch.Generator().manual_seed(0), plan.settings
    config, patch = transformer.config, settings.model.patch_size
    embeds = _embeds(config, settings.text.t5_max_length, generator)
    channels, frames, rows, columns = plan.latent_shape
    references = None
    if plan.mode.needs_reference:
        references = [torch.randn(channels, 1, rows, columns, generator=generator)]

    def plain() -> Tensor:
        noise = noise_latents(
            [0],
            num_latent_frames=frames,
            height=plan.height,
            width=plan.width,
            device=_CPU,
            dtype=torch.float32,
            latent_channels=channels,
            spatial_compression=settings.vae.grid.spatial_compression_ratio,
            patch_size=patch,
        )
        batched = None if references is None else [references]
        mask, given = prepare_inference_condition(noise, plan.mode, batched, settings.vae.grid.is_causal)
        per_frame = rows * columns // patch**2
        scales = [
            (each.text, torch.tensor(each.image).repeat_interleave(per_frame)[None, :, None])
            if len(each.image) > 1
            else (each.text, each.image[0])
            for each in plan.scales
        ]
        packed = plain_denoise(
            transformer,
            pack_latents(noise, patch),
            embeds,
            conditioning_1NK=pack_conditioning(mask, given, patch),
            position_ids_1N3=position_ids(1, frames, rows // patch, columns // patch, device=_CPU),
            timesteps=plan.timesteps,
            scales=scales,
        )
        latents = unpack_latents(packed, num_latent_frames=frames, height=rows, width=columns, patch_size=patch)
        return torch.where(mask.bool(), given, latents)

    return plain, partial(sample_latents, plan, transformer, embeds, references, seed=0)


def measure_block(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for two double-stream and four single-stream blocks of the released width in fp32."""
    config = MMDiTConfig(depth=2, depth_single_blocks=4)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = MMDiT(config)
    model = model.to_empty(device=_CPU).requires_grad_(False).eval()
    # The weights repeat a few numbers: drawing five gigabytes takes longer than an evaluation.
    drawn = 0.02 * torch.randn(2**20, generator=generator)
    for weight in model.parameters():
        for piece in weight.view(-1).split(len(drawn)):
            piece.copy_(drawn[: len(piece)])
    model.set_sequence_chunk(CHUNK_TOKENS)  # like plans
    rows, columns = 16, 20
    frames = max(1, (options.tokens - _TEXT_TOKENS) // (rows * columns))
    tokens = frames * rows * columns
    embeds = _embeds(config, _TEXT_TOKENS, generator)
    latents_1ND = torch.randn(1, tokens, config.in_channels, generator=generator)
    conditioning_1NK = torch.zeros(1, tokens, config.conditioning_channels)
    ids_1N3 = position_ids(1, frames, rows, columns, device=_CPU)
    plain = partial(
        plain_forward,
        model,
        latents_1ND,
        position_ids_BN3=ids_1N3,
        timesteps_B=torch.full((1,), 0.5),
        prompt_embeds_BLC=embeds.prompt_embeds_2LC[:1],
        pooled_prompt_embeds_BV=embeds.pooled_prompt_embeds_2V[:1],
        conditioning_BNK=conditioning_1NK,
    )
    velocity = GuidedVelocity(model, embeds, conditioning_BNK=conditioning_1NK, position_ids_1N3=ids_1N3)

    def ours() -> Tensor:
        return velocity(latents_1ND, 0.5, (Branch.COND,))[Branch.COND]

    with torch.inference_mode():
        error = _error(ours(), plain())
        yield compared(
            f"released width, {tokens + _TEXT_TOKENS} tokens",
            plain,
            ours,
            pairs=options.pairs,
            goal=BLOCK_GOAL,
            note=f"relative error {error:.1e}",
            figures={"error": error, "tokens": tokens + _TEXT_TOKENS},
        )


def _embeds(config: MMDiTConfig, length: int, generator: torch.Generator) -> PromptEmbeds:
    return PromptEmbeds(
        torch.randn(2, length, config.context_in_dim, generator=generator),
        torch.randn(2, config.vec_in_dim, generator=generator),
    )


def _error(ours: Tensor, plain: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((ours - plain).abs().max() / plain.abs().max()).item()
