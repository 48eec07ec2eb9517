"""The attention of a generation: what it is used for, and what computes it once that has been timed."""

from dataclasses import replace
from math import prod

import torch.distributed as dist

from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json
from opensora_cli.engine.components.attention import AttentionPlan, AttentionUse, timed_attention, why_unusable
from opensora_cli.engine.components.attention_times import AttentionShape
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.enums import AttentionChoice
from opensora_cli.settings.generate import GenerateSettings


def attention_use(settings: GenerateSettings, hardware: Hardware, mesh: MeshShape) -> AttentionUse:
    """Return what a rank asks of its attention."""
    head_dim = settings.model.hidden_size // settings.model.num_heads
    return AttentionUse(device=hardware.device, dtype=hardware.dtype, head_dim=head_dim, in_parts=mesh.ring > 1)


def attention_shape(
    settings: GenerateSettings, mesh: MeshShape, latent_shape: tuple[int, int, int, int]
) -> AttentionShape:
    """Return what a rank with most heads and tokens computes at a time; `latent_shape` is (C, T, H, W)."""
    model = settings.model
    tokens = prod(latent_shape[1:]) // model.patch_size**2 + settings.text.t5_max_length
    heads, own = -(-model.num_heads // (mesh.tensor * mesh.ulysses)), -(-tokens // mesh.ring)
    return AttentionShape(heads, own, own, model.hidden_size // model.num_heads, in_parts=mesh.ring > 1)


def with_timed_attention(
    plan: ExecutionPlan, reporter: Reporter, *, before: str | None = None, agrees: bool = False
) -> ExecutionPlan:
    """Return a plan of a run, whose attention is decided: it is timed now where that has not been done yet.

    `before` is what computed the attention of the latents that the run goes on from, which `auto` stays with if it
    works here; None: it begins. `agrees`: all ranks call this, and take what rank 0 takes.
    """

    def nested(inner: ExecutionPlan | None) -> ExecutionPlan | None:
        return None if inner is None else with_timed_attention(inner, reporter, agrees=agrees)

    attention = plan.attention
    if attention is not None and plan.settings.runtime.attention is AttentionChoice.AUTO:
        use = attention_use(plan.settings, plan.hardware, plan.mesh)
        if not agrees or dist.get_rank() == 0:
            attention = _decided(plan, attention, use, reporter, before)
        if agrees:
            attention = _agreed(attention, use)
    return replace(
        plan,
        attention=attention,
        picture=nested(plan.picture),
        draft=nested(plan.draft),
        continuation=nested(plan.continuation),
    )


def _decided(
    plan: ExecutionPlan, attention: AttentionPlan, use: AttentionUse, reporter: Reporter, before: str | None
) -> AttentionPlan:
    if before is not None and before != attention.backend and why_unusable(before, use) is None:
        return AttentionPlan(backend=before, reason="auto: as in the run that this one goes on from")
    shape = attention_shape(plan.settings, plan.mesh, plan.latent_shape)
    return timed_attention(attention, use, shape, note=reporter.note)


def _agreed(attention: AttentionPlan, use: AttentionUse) -> AttentionPlan:
    """Return rank 0's choice, or sdpa if that does not work on another."""
    chosen = AttentionPlan.model_validate(broadcast_json(attention.to_json()))
    if chosen.backend == "sdpa":
        return chosen
    problems = [problem for problem in all_gather_json(why_unusable(chosen.backend, use)) if problem is not None]
    return AttentionPlan(backend="sdpa", reason=f"auto: on another rank {problems[0]}") if problems else chosen
