"""Steps of real work on the demo's transformer, whose time is measured at several numbers of ranks.

Weights are fresh ones: time does not depend on their values.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from opensora_cli.core.attention import AttentionFn
from opensora_cli.engine.bench_comm.counting import Traffic
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.sequence import SequenceParallel
from opensora_cli.parallel.shares import SequenceLengths, shares
from opensora_cli.parallel.ulysses import UlyssesAttention
from opensora_cli.sampling.denoise import euler_step
from opensora_cli.sampling.flow import get_batch_loss
from opensora_cli.sampling.packing import position_ids
from opensora_cli.settings.enums import Collective, Scaling
from opensora_cli.settings.load import load_preset

_BRANCHES = 2
_FP32 = 4
_LATENT_FRAMES = 5
_SIDE = 4
"""Tokens along a side of the demo's frames."""


class _DemoInputs:
    """Random inputs of the demo's transformer, the same on all ranks."""

    def __init__(self, *, device: torch.device) -> None:
        self.settings = load_preset("demo", prompt="any")
        self.config = mmdit_config(self.settings.model)
        self.text_tokens = self.settings.text.t5_max_length
        self.device = device

    def model(self, attention: AttentionFn = sdpa) -> MMDiT:
        """Return the transformer."""
        with torch.device(self.device):
            model = MMDiT(self.config, attention=attention)
        model.reset_parameters(generator=torch.Generator(self.device).manual_seed(0))
        return model

    def latents(self, batch: int, frames: int) -> torch.Tensor:
        """Return packed_latents_BND."""
        generator = torch.Generator().manual_seed(1)
        tokens = frames * _SIDE * _SIDE
        return torch.randn(batch, tokens, self.config.in_channels, generator=generator).to(self.device)

    def others(self, batch: int, frames: int) -> dict[str, torch.Tensor]:
        """Return the other arguments of the transformer."""
        tokens, config = frames * _SIDE * _SIDE, self.config
        shapes = {
            "prompt_embeds_BLC": (batch, self.text_tokens, config.context_in_dim),
            "pooled_prompt_embeds_BV": (batch, config.vec_in_dim),
            "conditioning_BNK": (batch, tokens, config.conditioning_channels),
        }
        made = {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}
        return {
            **made,
            "timesteps_B": torch.full((batch,), 0.5, device=self.device),
            "position_ids_BN3": position_ids(1, frames, _SIDE, _SIDE, device=self.device),
        }


class DenoisingStep:
    """One step of sampling: two branches of guidance and an Euler step, its tokens divided between the ranks.

    While the ranks are no more than the heads they share by Ulysses attention, else by a ring. Weak scaling makes the
    video longer.
    """

    name = "denoising step"
    sends = Collective.ALL_TO_ALL

    def __init__(self, *, device: torch.device) -> None:
        self._inputs = _DemoInputs(device=device)

    def prepare(self, group: dist.ProcessGroup, scaling: Scaling) -> Callable[[], object]:
        """Return the step for the ranks of a group."""
        shape, frames = self._shape(group.size()), self._frames(group.size(), scaling)
        lengths = SequenceLengths(ring=shape.ring, ulysses=shape.ulysses, ring_rank=dist.get_rank(group) % shape.ring)
        attention: AttentionFn = sdpa
        if shape.ring > 1:
            attention = RingAttention(sdpa, group, lengths)
        elif shape.ulysses > 1:
            attention = UlyssesAttention(sdpa, group, lengths)
        model = SequenceParallel(
            self._inputs.model(attention),
            group,
            lengths,
            sequence_inputs=SEQUENCE_INPUTS,
            text_sequence_inputs=TEXT_SEQUENCE_INPUTS,
        )
        latents, others = self._inputs.latents(1, frames), self._inputs.others(1, frames)

        @torch.no_grad()
        def step() -> torch.Tensor:
            guided, free = (model(latents, **others) for _ in range(_BRANCHES))
            return euler_step(latents, free + 4.0 * (guided - free), t=0.5, t_next=0.4)

        return step

    def traffic(self, ranks: int, scaling: Scaling) -> Traffic:
        """Return what a step of so many ranks sends: in its attention, and to gather the velocity."""
        if ranks == 1:
            return Traffic(0, 0)
        config = self._inputs.config
        latents, text = self._frames(ranks, scaling) * _SIDE * _SIDE, self._inputs.text_tokens
        if self._shape(ranks).ring > 1:
            # Keys and values, from each rank to the next, all but once round.
            elements, calls = 2 * (ranks - 1) * (text + latents) * config.hidden_size, 2 * (ranks - 1)
        else:
            # Tokens for heads and back, of q, k, v and the result; each rank has its heads of its tokens already. A
            # rank with a latent token more has a text token less, as `SequenceParallel` cuts them.
            tokens = map(sum, zip(shares(latents, ranks), shares(text, ranks)[::-1], strict=True))
            heads = shares(config.num_heads, ranks)
            stays = sum(own * share for own, share in zip(tokens, heads, strict=True))
            elements, calls = 4 * ((text + latents) * config.num_heads - stays) * config.head_dim, 2
        attentions = config.depth + config.depth_single_blocks
        # Shares of the velocity travel padded to the longest.
        velocity = ranks * (ranks - 1) * shares(latents, ranks)[0] * config.in_channels
        sent = _BRANCHES * (attentions * elements + velocity) * _FP32
        return Traffic(sent, _BRANCHES * (attentions * calls + 1))

    def _shape(self, ranks: int) -> MeshShape:
        return MeshShape(ulysses=ranks) if ranks <= self._inputs.config.num_heads else MeshShape(ring=ranks)

    @staticmethod
    def _frames(ranks: int, scaling: Scaling) -> int:
        return _LATENT_FRAMES * (ranks if scaling is Scaling.WEAK else 1)


class TrainingStep:
    """One step of training: samples divided between the ranks, gradients summed, one update.

    `batch` is of all ranks in sum, or in weak scaling of each; at least the ranks.
    """

    name = "training step"
    sends = Collective.ALL_REDUCE

    def __init__(self, *, device: torch.device, batch: int) -> None:
        self._inputs = _DemoInputs(device=device)
        self._batch = batch

    def prepare(self, group: dist.ProcessGroup, scaling: Scaling) -> Callable[[], object]:
        """Return the step for the ranks of a group."""
        model = self._inputs.model().requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        batch = self._batch
        if scaling is Scaling.STRONG:
            batch = shares(batch, group.size())[dist.get_rank(group)]
        latents, others = self._inputs.latents(batch, _LATENT_FRAMES), self._inputs.others(batch, _LATENT_FRAMES)
        target = torch.zeros_like(latents)

        def step() -> None:
            loss = get_batch_loss(model(latents, **others), target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, summed in zip(gradients, pieces, strict=True):
                gradient.copy_(summed.view_as(gradient) / group.size())
            optimizer.step()

        return step

    def traffic(self, ranks: int, scaling: Scaling) -> Traffic:
        """Return what a step of so many ranks sends: all gradients, in one sum."""
        with torch.device("meta"):
            count = sum(weight.numel() for weight in MMDiT(self._inputs.config).parameters())
        return Traffic(2 * (ranks - 1) * _FP32 * count, 1 if ranks > 1 else 0)
