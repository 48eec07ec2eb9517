"""Step times of sampling at 1, 2, 4 .. ranks, on the demo's transformer with random weights."""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.device import timed
from opensora_cli.core.documents import Document
from opensora_cli.engine.bench_comm.operations import meet
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.mesh import new_group
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.sequence import SequenceParallel, UlyssesAttention
from opensora_cli.parallel.shares import SequenceLengths
from opensora_cli.sampling.denoise import euler_step
from opensora_cli.sampling.packing import position_ids
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.tools import Scaling

_LATENT_FRAMES = 5
_SIDE = 4
"""Tokens along a side of the demo's frames."""


class ScalingRow(Document):
    """Step time at one number of ranks."""

    ranks: int
    step_s: float
    """Median over the steps, on the slowest rank."""
    efficiency: float | None
    """Throughput per rank, relative to one rank. None on gloo, where ranks share the cores of one machine."""


class ScalingTable(Document):
    """Step times of sampling."""

    scaling: Scaling
    rows: tuple[ScalingRow, ...]

    def lines(self) -> list[str]:
        found = [
            f"{self.scaling} scaling of a denoising step",
            f"{'ranks':>8}{'step (ms)':>14}{'efficiency':>14}",
        ]
        for row in self.rows:
            efficiency = "-" if row.efficiency is None else f"{row.efficiency:.1%}"
            found.append(f"{row.ranks:>8}{row.step_s * 1e3:>14.2f}{efficiency:>14}")
        return found


def measure_scaling(
    scaling: Scaling, *, group: dist.ProcessGroup, device: torch.device, steps: int, is_gloo: bool
) -> ScalingTable:
    """Time a step of sampling at 1, 2, 4 .. ranks of a group. All its ranks call this.

    Strong scaling divides the same work, weak scaling gives each rank the same work. One step warms up before `steps`.
    """
    rows: list[ScalingRow] = []
    for ranks in [*(2**power for power in range(group.size().bit_length()) if 2**power < group.size()), group.size()]:
        part = new_group([dist.get_global_rank(group, rank) for rank in range(ranks)])
        seconds = torch.zeros(1, dtype=torch.float64, device=device)
        if dist.get_rank(group) < ranks:
            step = denoising_step(part, device, is_weak=scaling is Scaling.WEAK)
            step()
            times = []
            for _ in range(steps):
                meet(device, part)
                times.append(timed(step, device))
            seconds.fill_(median(times))
        # The other ranks wait here, and do not disturb.
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        if dist.get_rank(group) < ranks:
            dist.destroy_process_group(part)
        step_s = float(seconds)
        ideal_s = (rows[0].step_s if rows else step_s) / (ranks if scaling is Scaling.STRONG else 1)
        efficiency = None if is_gloo else ideal_s / step_s
        rows.append(ScalingRow(ranks=ranks, step_s=step_s, efficiency=efficiency))
    return ScalingTable(scaling=scaling, rows=tuple(rows))


def denoising_step(group: dist.ProcessGroup, device: torch.device, *, is_weak: bool) -> Callable[[], object]:
    """Return a step of sampling: two branches of guidance and an Euler step, with tokens divided between the ranks.

    Up to the number of heads, ranks use Ulysses attention, else a ring. Weak scaling makes the video longer.
    """
    ranks, heads = group.size(), mmdit_config(load_preset("demo").model).num_heads
    ring = ranks if ranks > heads else 1
    lengths = SequenceLengths(ring=ring, ulysses=ranks // ring, ring_rank=dist.get_rank(group) % ring)
    attention: AttentionFn = sdpa
    if ranks > 1:
        attention = (RingAttention if ring > 1 else UlyssesAttention)(sdpa, group, lengths)
    transformer, latents, others = _inputs(_LATENT_FRAMES * (ranks if is_weak else 1), device, attention)
    model = SequenceParallel(
        transformer, group, lengths, sequence_inputs=SEQUENCE_INPUTS, text_sequence_inputs=TEXT_SEQUENCE_INPUTS
    )

    @torch.no_grad()
    def step() -> torch.Tensor:
        guided, free = (model(latents, **others) for _ in range(2))
        return euler_step(latents, free + 4.0 * (guided - free), t=0.5, t_next=0.4)

    return step


def _inputs(
    frames: int, device: torch.device, attention: AttentionFn
) -> tuple[MMDiT, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the demo's transformer, packed_latents_BND and its other arguments, the same on all ranks."""
    settings = load_preset("demo")
    config, tokens = mmdit_config(settings.model), frames * _SIDE * _SIDE
    with torch.device(device):
        model = MMDiT(config, attention=attention)
        others = {
            "prompt_embeds_BLC": torch.zeros(1, settings.text.t5_max_length, config.context_in_dim),
            "pooled_prompt_embeds_BV": torch.zeros(1, config.vec_in_dim),
            "conditioning_BNK": torch.zeros(1, tokens, config.conditioning_channels),
            "timesteps_B": torch.full((1,), 0.5),
            "position_ids_BN3": position_ids(1, frames, _SIDE, _SIDE, device=device),
        }
    model.reset_parameters(generator=torch.Generator(device).manual_seed(0))
    latents = torch.randn(1, tokens, config.in_channels, generator=torch.Generator().manual_seed(1))
    return model, latents.to(device), others
